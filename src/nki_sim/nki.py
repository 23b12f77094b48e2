"""The module that kernels import as `nki`."""

from . import isa, language
from .kernel import jit, simulate

dtype = str  # NKI dtypes are strings; kernels annotate with this name
__version__ = "0.6.0+nki_sim"
__all__ = ["isa", "jit", "language", "simulate"]
