"""The module that kernels import as `nki`."""

from . import arch, isa, language
from .kernel import jit, simulate

dtype = str  # NKI dtypes are strings; kernels annotate with this name
__version__ = f"{arch.DEFAULT_VERSION}.0+nki_sim"
__all__ = ["isa", "jit", "language", "simulate"]
