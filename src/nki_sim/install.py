"""`import nki` on a machine without AWS's package."""

import importlib.metadata
import importlib.util
import sys

# The fifth is a spelling of 0.3 for the enumerations, which AWS's kernel library uses.
_NAMES = ("nki", "nki.isa", "nki.language", "nki.typing", "nki.isa.constants")


def real_nki():
    """True if AWS's NKI 0.3 or newer can be imported.

    The public registry has an empty package of the same name; without `nki.isa`, or below 0.3,
    it counts as absent.
    """
    ours = sys.modules.get("nki")
    if getattr(ours, "__version__", "").endswith("nki_sim"):
        return False
    try:
        version = importlib.metadata.version("nki")
        found = importlib.util.find_spec("nki.isa") is not None
    except (ImportError, AttributeError, ValueError, importlib.metadata.PackageNotFoundError):
        return False
    digits = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    return found and digits >= [0, 3]


def install(instead=False):
    """Make `import nki`, `nki.isa`, `nki.language` and `nki.typing` give this simulator.

    instead   also where a real NKI is installed, for kernel files that are imported from now on
    Returns True if the simulator is in place, False if a real NKI (0.3 or newer) was left alone.
    """
    if real_nki() and not instead:
        return False
    from . import enums, isa, language, nki, typing

    for name, module in zip(_NAMES, (nki, isa, language, typing, enums), strict=True):
        sys.modules[name] = module
    nki.__path__ = isa.__path__ = []  # packages, so that `import nki.isa` looks into sys.modules
    nki.typing, isa.constants = typing, enums
    return True
