"""Each operator by its definition, on a few numbers; instructions only pass numbers to them."""

import math

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, tile

from nki_sim.ops import OPS

F32 = np.float32
NUMBERS = [(3.0, 2.0), (-2.0, 3.0), (2.0, 2.0), (0.0, 5.0), (0.0, 0.0), (-1.5, -1.5)]
BITS = [(12, 3), (-1, 5), (2**31 - 1, 2), (-(2**31), 31), (7, 0)]


def wrapped(value):
    return (value + 2**31) % 2**32 - 2**31


ARITHMETIC = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": max,
    "minimum": min,
    "equal": lambda x, y: x == y,
    "not_equal": lambda x, y: x != y,
    "greater_equal": lambda x, y: x >= y,
    "greater": lambda x, y: x > y,
    "less_equal": lambda x, y: x <= y,
    "less": lambda x, y: x < y,
    "logical_and": lambda x, y: bool(x) and bool(y),
    "logical_or": lambda x, y: bool(x) or bool(y),
    "logical_xor": lambda x, y: bool(x) != bool(y),
}
BITWISE = {
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "left_shift": lambda x, y: wrapped(x << y),
    "right_shift": lambda x, y: wrapped((x % 2**32) >> y),  # logical: zeros come in
}


def of_tiles(op, pairs, dtype):
    """op of two tiles that hold the pairs, as a list."""
    x, y = np.array(pairs).T
    dst = blank((1, len(pairs)), dtype)
    nisa.tensor_tensor(dst, tile(x[None], dtype=dtype), tile(y[None], dtype=dtype), op)
    return dst.np[0].tolist()


def of_numbers(op, pairs, dtype):
    """op of a tile and a number, pair by pair."""
    result = []
    for x, y in pairs:
        dst = blank((1, 1), dtype)
        nisa.tensor_scalar(dst, tile(np.array([[x]]), dtype=dtype), op, y)
        result.append(dst.np[0, 0].item())
    return result


@pytest.mark.parametrize("form", [of_tiles, of_numbers])
@pytest.mark.parametrize("name", list(ARITHMETIC))
def test_arithmetic(name, form):
    expected = [float(ARITHMETIC[name](x, y)) for x, y in NUMBERS]
    assert on_core(lambda: form(OPS[name], NUMBERS, "float32")) == expected


WHOLE = [(2**24 + 1, 2**24), (-7, 3), (5, 5), (0, 9), (-(2**30), 1)]  # float32 merges the first


@pytest.mark.parametrize("name", list(ARITHMETIC))
def test_arithmetic_of_int32_tiles_is_exact(name):
    expected = [wrapped(int(ARITHMETIC[name](x, y))) for x, y in WHOLE]
    assert on_core(lambda: of_tiles(OPS[name], WHOLE, "int32")) == expected


@pytest.mark.parametrize(("name", "x", "y"), [("left_shift", 2, 5), ("right_shift", 2, 64)])
def test_bits_with_the_sides_swapped(name, x, y):
    def body():
        dst = blank((1, 1), "int32")
        data = tile(np.array([[x]], np.int32))
        nisa.tensor_scalar(dst, data, OPS[name], y, reverse0=True)
        return int(dst.np[0, 0])

    assert on_core(body) == BITWISE[name](y, x)


@pytest.mark.parametrize("form", [of_tiles, of_numbers])
@pytest.mark.parametrize("name", list(BITWISE))
def test_bits(name, form):
    expected = [BITWISE[name](x, y) for x, y in BITS]
    assert on_core(lambda: form(OPS[name], BITS, "int32")) == expected


def test_power_and_invert():
    pairs = [(3.0, 2.0), (2.0, -1.0), (9.0, 0.5), (0.0, 0.0)]
    assert on_core(lambda: of_tiles(nl.power, pairs, "float32")) == [9.0, 0.5, 3.0, 1.0]

    def body():
        dst = blank((1, 3), "int32")
        nisa.tensor_scalar(dst, tile(np.array([[0, 5, -1]], np.int32)), nl.invert, 0)
        return dst.np[0].tolist()

    assert on_core(body) == [-1, -6, 0]


def test_every_operator_stands_here():
    assert {n for n, op in OPS.items() if op.kind == "bitvec"} == {*BITWISE, "invert"}
    assert {n for n, op in OPS.items() if op.kind == "arithmetic"} == {*ARITHMETIC, "power"}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def slope(f):
    """The derivative of f by central differences; its own error is below 1e-8 here."""
    return lambda x: (f(x + 1e-4) - f(x - 1e-4)) / 2e-4


def silu(x):
    return x * sigmoid(x)


def gelu_sigmoid(x):
    return x * sigmoid(1.702 * x)


ACTIVATIONS = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": sigmoid,
    "relu": lambda x: max(x, 0.0),
    "gelu": gelu,
    "gelu_dx": slope(gelu),
    "gelu_apprx_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_apprx_sigmoid": gelu_sigmoid,
    "gelu_apprx_sigmoid_dx": slope(gelu_sigmoid),
    "silu": silu,
    "silu_dx": slope(silu),
    "tanh": math.tanh,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "erf": math.erf,
    "erf_dx": slope(math.erf),
    "exp": math.exp,
    "log": lambda x: math.log(x) if x > 0 else math.nan,
    "sin": math.sin,
    "arctan": math.atan,
    "sqrt": lambda x: math.sqrt(x) if x > 0 else math.nan,
    "rsqrt": lambda x: 1 / math.sqrt(x) if x > 0 else math.nan,
    "reciprocal": lambda x: 1 / x,
    "sign": lambda x: math.copysign(1.0, x),
    "abs": abs,
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_functions(name):
    """Formulas in float64 against float32: a few roundings of 2^-24, of numbers up to 3."""
    inputs = [-1.5, -0.25, 0.5, 1.25]

    def body():
        dst = blank((1, len(inputs)))
        nisa.activation(dst, OPS[name], tile(np.array([inputs], F32)))
        return dst.np[0].tolist()

    expected = [ACTIVATIONS[name](x) for x in inputs]
    assert on_core(body) == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


def test_every_activation_function_stands_here():
    assert {n for n, op in OPS.items() if op.kind == "activation"} == set(ACTIVATIONS)
