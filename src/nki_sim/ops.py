"""Operators (`nl.add`, `nl.exp`, ...): one object each, used as `op=` and called as a helper.

Values are float32 inside every engine; bit operators work on integers without a cast.
Tables: nki.api.shared (operators and activation functions).
"""

import math

import numpy as np

OPS = {}
HELPER = []  # nki.language installs the function that turns `nl.add(x, y)` into an instruction


class Op:
    """An ALU operator or activation function.

    kind    "arithmetic", "bitvec" (integers only), "activation", or "absent" (not on trn2)
    binary  numpy function of two arrays, or None    unary  function of one array, or None
    """

    def __init__(self, name, kind, binary=None, unary=None, reduces=False):
        self.name, self.kind, self.binary, self.unary = name, kind, binary, unary
        self.reduces = reduces
        self.ufunc = isinstance(binary, np.ufunc) and name in _FLOAT_UFUNCS
        OPS[name] = self

    def __call__(self, *args, **kwargs):
        return HELPER[0](self, *args, **kwargs)

    def __repr__(self):
        return f"nl.{self.name}"


_FLOAT_UFUNCS = {"add", "subtract", "multiply", "maximum", "minimum"}


def _truth(f):
    return lambda x, y: f(x, y).astype(np.float32)


def _shift(f):
    def shift(x, y):
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        return f(x.view(unsigned), np.asarray(y).astype(unsigned)).view(x.dtype)

    return shift


def erf(x):
    return np.frompyfunc(math.erf, 1, 1)(x).astype(np.float32)


def sigmoid(x):
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def _gelu(x):
    return np.float32(0.5) * x * (1 + erf(x * np.float32(math.sqrt(0.5))))


def _gelu_dx(x):
    density = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
    return np.float32(0.5) * (1 + erf(x * np.float32(math.sqrt(0.5)))) + x * density


def _gelu_tanh(x):
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _swish(x, slope):
    return x * sigmoid(np.float32(slope) * x)


def _swish_dx(x, slope):
    s = sigmoid(np.float32(slope) * x)
    return s * (1 + np.float32(slope) * x * (1 - s))


def _softplus(x):
    return np.logaddexp(np.float32(0), x)


def _in_range(f, low, high):
    def limited(x):
        bad = ~((x >= np.float32(low)) & (x <= np.float32(high)))
        if bad.any():
            raise ValueError(f"input {x[bad].flat[0]} outside [{low:.6g}, {high:.6g}]")
        return f(x)

    return limited


for _name, _f, _reduces in [
    ("add", np.add, True),
    ("subtract", np.subtract, True),
    ("multiply", np.multiply, True),
    ("maximum", np.maximum, True),
    ("minimum", np.minimum, True),
    ("equal", _truth(np.equal), False),
    ("not_equal", _truth(np.not_equal), False),
    ("greater_equal", _truth(np.greater_equal), False),
    ("greater", _truth(np.greater), False),
    ("less_equal", _truth(np.less_equal), False),
    ("less", _truth(np.less), False),
    ("logical_and", _truth(np.logical_and), True),
    ("logical_or", _truth(np.logical_or), True),
    ("logical_xor", _truth(np.logical_xor), True),
    ("power", np.power, False),
]:
    Op(_name, "arithmetic", binary=_f, reduces=_reduces)

for _name, _f in [
    ("bitwise_and", np.bitwise_and),
    ("bitwise_or", np.bitwise_or),
    ("bitwise_xor", np.bitwise_xor),
    ("left_shift", _shift(np.left_shift)),
    ("right_shift", _shift(np.right_shift)),
]:
    Op(_name, "bitvec", binary=_f, reduces=_name.startswith("bitwise"))
Op("invert", "bitvec", unary=np.invert)

for _name, _f in [
    ("copy", lambda x: x),
    ("square", lambda x: x * x),
    ("sigmoid", sigmoid),
    ("relu", lambda x: np.maximum(x, np.float32(0))),
    ("gelu", _gelu),
    ("gelu_dx", _gelu_dx),
    ("gelu_apprx_tanh", _gelu_tanh),
    ("gelu_apprx_sigmoid", lambda x: _swish(x, 1.702)),
    ("gelu_apprx_sigmoid_dx", lambda x: _swish_dx(x, 1.702)),
    ("silu", lambda x: _swish(x, 1)),
    ("silu_dx", lambda x: _swish_dx(x, 1)),
    ("tanh", np.tanh),
    ("softplus", _softplus),
    ("mish", lambda x: x * np.tanh(_softplus(x))),
    ("erf", erf),
    ("erf_dx", lambda x: np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x)),
    ("exp", np.exp),
    ("log", np.log),
    ("sin", _in_range(np.sin, -math.pi, math.pi)),
    ("arctan", _in_range(np.arctan, -math.pi / 2, math.pi / 2)),
    ("sqrt", np.sqrt),
    ("rsqrt", lambda x: np.float32(1) / np.sqrt(x)),
    ("reciprocal", lambda x: np.float32(1) / x),
    ("sign", np.sign),
    ("abs", np.abs),
]:
    Op(_name, "activation", unary=_f)

# Named by the documentation, but no trn2 engine computes them in the instructions modelled here.
for _name in ("divide", "mod", "fmod", "abs_max", "abs_min"):
    Op(_name, "absent")
