"""NKI dtypes are plain strings; numpy and ml_dtypes hold the bits."""

import contextlib
import math

import ml_dtypes
import numpy as np

BY_NAME = {
    name: np.dtype(kind)
    for name, kind in {
        "int8": np.int8,
        "int16": np.int16,
        "int32": np.int32,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "bool_": np.uint8,  # stored as uint8, as the documentation says
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float32": np.float32,
        "float8_e4m3": ml_dtypes.float8_e4m3,  # the legacy kind, largest value 240
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    }.items()
}
ITEMSIZE = {name: dtype.itemsize for name, dtype in BY_NAME.items()}

INTEGERS = frozenset({"int8", "int16", "int32", "uint8", "uint16", "uint32", "bool_"})
FLOATS = frozenset(BY_NAME) - INTEGERS
ANY = frozenset(BY_NAME)
FLOAT8 = frozenset(name for name in FLOATS if name.startswith("float8"))
TWO_BYTE = frozenset(name for name in ANY if ITEMSIZE[name] == 2)

F32 = np.dtype(np.float32)


def name_of(dtype):
    """The NKI name of a dtype given as NKI string, numpy dtype, ml_dtypes type or torch dtype.

    Raises TypeError for one that NKI does not have, such as float64 or int64.
    """
    if isinstance(dtype, str) and dtype in BY_NAME:
        return dtype
    text = str(dtype).removeprefix("torch.")
    if text not in BY_NAME and dtype is not None:  # numpy takes None for float64
        with contextlib.suppress(TypeError):  # what numpy does not know keeps its own name
            text = np.dtype(dtype).name
    text = {"bool": "bool_"}.get(text, text)
    if text not in BY_NAME:
        raise TypeError(f"NKI has no dtype {text}; cast to one of {', '.join(sorted(BY_NAME))}")
    return text


def holds(dtype, number):
    """True if the NKI dtype has a value for the number: an integer for integers, none overflows."""
    kind = BY_NAME[dtype]
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return isinstance(number, (int, np.integer)) and limits.min <= number <= limits.max
    if not isinstance(number, (int, float, np.integer, np.floating)):
        return False
    with np.errstate(over="ignore"):
        stored = float(np.float32(number).astype(kind))
    return math.isnan(stored) == math.isnan(number) and math.isinf(stored) == math.isinf(number)


def cast(values, dtype):
    """float32 `values` rounded once to `dtype` (numpy): to nearest even, integers saturating."""
    if dtype == values.dtype:
        return values
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        rounded = np.rint(np.nan_to_num(values, nan=0.0, posinf=3.4e38, neginf=-3.4e38))
        # Clip in float64, where the limits of 32-bit integers are exact.
        return np.clip(rounded.astype(np.float64), limits.min, limits.max).astype(dtype)
    return values.astype(dtype)
