"""Every instruction against numpy, on random shapes, dtypes and views.

Expected values are stated here again in numpy, from the documentation. They must agree bit for
bit: both sides compute in float32 in the documented order and round once.
"""

import re

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_helpers import (
    Views,
    blank,
    dtypes,
    fill,
    floats,
    on_core,
    random_values,
    rounded,
    same,
    seeds,
    shapes,
    tile,
)

from nki_sim import KernelError, trace
from nki_sim.dtypes import BY_NAME
from nki_sim.table import TABLE

COVERED = set()
F32 = np.float32


def covers(*names):
    COVERED.update(names)
    return lambda f: f


def f32(x):
    return np.asarray(x).astype(F32)


def case(check):
    """A property test whose body runs on a core: check(draw, rng, views)."""

    @given(st.data(), seeds)
    def test(data, seed):
        rng = np.random.default_rng(seed)
        on_core(lambda: check(data.draw, rng, Views(data.draw, rng)))

    test.__name__ = check.__name__
    test.__doc__ = check.__doc__
    return test


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
binary_ops = st.sampled_from(sorted(BINARY))


# ------------------------------------------------------------------ element by element
@covers("tensor_tensor")
@case
def test_tensor_tensor(draw, rng, views):
    shape, kinds, name = draw(shapes), [draw(floats) for _ in range(3)], draw(binary_ops)
    x, y = (random_values(rng, shape, k) for k in kinds[:2])
    dst = views.empty(shape, kinds[2], draw(st.sampled_from(["sbuf", "psum"])))
    a, b = views.holding(x, kinds[0]), views.holding(y, kinds[1], "psum")
    nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=getattr(nl, name))
    same(dst.np, rounded(BINARY[name](f32(x), f32(y)), kinds[2]))


@case
def test_tensor_tensor_pairs_elements_in_row_major_order(draw, rng, views):
    x, y = random_values(rng, (5, 6), "float32"), random_values(rng, (5, 2, 3), "float32")
    dst = views.empty((5, 3, 2), "float32")
    a, b = views.holding(x, "float32"), views.holding(y, "float32")
    nisa.tensor_tensor(dst, a, b, nl.subtract)
    same(dst.np, (x - y.reshape(5, 6)).reshape(5, 3, 2))


@case
def test_power(draw, rng, views):
    """Of floats in float32; of 32-bit integers exactly, modulo 2^32."""
    shape, to = draw(shapes), draw(floats)
    x, y = np.abs(random_values(rng, shape, "float32")), random_values(rng, shape, "float32")
    dst = views.empty(shape, to)
    nisa.tensor_tensor(dst, views.holding(x, "float32"), views.holding(y, "float32"), nl.power)
    same(dst.np, rounded(np.power(x, y), to))
    kind = draw(st.sampled_from(["int32", "uint32"]))
    base, exponent = rng.integers(0, 50, shape), rng.integers(0, 9, shape)
    dst = views.empty(shape, kind)
    a, b = (views.holding(t.astype(kind), kind) for t in (base, exponent))
    nisa.tensor_tensor(dst, a, b, nl.power)
    same(dst.np, (base**exponent).astype(np.int64).astype(kind))


def test_power_of_integers_refuses_negative_exponents():
    def body(exponent):
        x, y = tile(np.full((2, 2), 2, np.int32)), tile(np.array([[1, 2], [3, exponent]], np.int32))
        nisa.tensor_tensor(blank((2, 2), "int32"), x, y, nl.power)

    on_core(lambda: body(0))
    with pytest.raises(KernelError, match="tensor_tensor: power with the exponent -1 in 'y'"):
        on_core(lambda: body(-1))


@case
def test_32_bit_integers_on_gpsimd(draw, rng, views):
    """Around 2^24 and 2^31, where float32 cannot tell neighbours apart."""
    shape, kind, name = draw(shapes), draw(st.sampled_from(["int32", "uint32"])), draw(binary_ops)
    middle = draw(st.sampled_from([0, 2**24, 2**31 - 3]))
    x, y = ((middle + rng.integers(-2, 3, shape)).astype(kind) for _ in range(2))
    dst = views.empty(shape, kind)
    a, b = views.holding(x, kind), views.holding(y, kind)
    nisa.tensor_tensor(dst, a, b, getattr(nl, name))
    expected = BINARY[name](x.astype(np.int64), y.astype(np.int64))
    same(dst.np, expected.astype(np.int64).astype(kind))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "equal", "less", "greater"])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_32_bit_integers_are_exact_on_gpsimd_and_float32_on_vector(name, dtype):
    x, y = np.array([[2**24 + 1, 7]], dtype), np.array([[3, 5]], dtype)

    def body():
        a, b, exact, rough = tile(x), tile(y), blank((1, 2), dtype), blank((1, 2), dtype)
        nisa.tensor_tensor(exact, a, b, getattr(nl, name))
        nisa.tensor_tensor(rough, a, b, getattr(nl, name), engine=nisa.engine.vector)
        same(exact.np, BINARY[name](x, y))
        same(rough.np, rounded(BINARY[name](f32(x), f32(y)), dtype))

    on_core(body)


def _logical_shift(f):
    def shift(x, y):
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        return f(x.astype(unsigned), y.astype(unsigned)).astype(x.dtype)

    return shift


BITS = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": _logical_shift(np.left_shift),
    "right_shift": _logical_shift(np.right_shift),
}
bit_ops = st.sampled_from(sorted(BITS))
bit_dtypes = st.sampled_from(["int8", "int16", "int32", "uint8", "uint16", "uint32"])


@case
def test_bit_operators(draw, rng, views):
    shape, dtype, one, two = draw(shapes), draw(bit_dtypes), draw(bit_ops), draw(bit_ops)
    kind = np.dtype(dtype)
    limits = np.iinfo(kind)
    x = rng.integers(limits.min, limits.max, shape, kind, endpoint=True)
    y = rng.integers(0, 8, shape, kind)
    data = views.holding(x, dtype)
    dst = views.empty(shape, dtype, draw(st.sampled_from(["sbuf", "psum"])))
    nisa.tensor_tensor(dst, data, views.holding(y, dtype), getattr(nl, one))
    same(dst.np, BITS[one](x, y))
    a, b, r0, r1 = draw(st.integers(0, 7)), draw(st.integers(0, 7)), draw(st.booleans()), False
    first = BITS[one](kind.type(a), x) if r0 else BITS[one](x, kind.type(a))
    nisa.tensor_scalar(dst, data, getattr(nl, one), a, r0)
    same(dst.np, first)
    r1 = draw(st.booleans())
    nisa.tensor_scalar(dst, data, getattr(nl, one), a, r0, getattr(nl, two), b, r1)
    same(dst.np, BITS[two](kind.type(b), first) if r1 else BITS[two](first, kind.type(b)))
    nisa.tensor_scalar(dst, data, nl.invert, 0, op1=getattr(nl, two), operand1=b)
    same(dst.np, BITS[two](~x, kind.type(b)))


def test_right_shift_is_logical():
    def body():
        dst = blank((1, 2), "int32")
        nisa.tensor_scalar(dst, tile(np.array([[-1, 16]], np.int32)), nl.right_shift, 1)
        assert dst.np.tolist() == [[2**31 - 1, 8]]
        nisa.tensor_scalar(dst, tile(np.array([[-1, 16]], np.int32)), nl.left_shift, 1)
        assert dst.np.tolist() == [[-2, 32]]

    on_core(body)


@covers("tensor_scalar")
@case
def test_tensor_scalar(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(dtypes)
    one, two = draw(binary_ops), draw(binary_ops)
    x = random_values(rng, shape, kind)
    vec, number = random_values(rng, (shape[0], 1), "float32"), float(rng.standard_normal())
    r0, r1 = draw(st.booleans()), draw(st.booleans())
    dst = views.empty(shape, to)
    nisa.tensor_scalar(
        dst, views.holding(x, kind), getattr(nl, one), views.holding(vec, "float32"), r0,
        getattr(nl, two), number, r1,
    )  # fmt: skip
    v = vec.reshape(-1, *[1] * (len(shape) - 1))
    first = f32(BINARY[one](v, f32(x)) if r0 else BINARY[one](f32(x), v))
    second = BINARY[two](F32(number), first) if r1 else BINARY[two](first, F32(number))
    same(dst.np, rounded(f32(second), to))


def test_tensor_scalar_rsqrt_runs_on_gpsimd():
    def body():
        dst = blank((1, 3))
        nisa.tensor_scalar(dst, tile(np.array([[1, 4, 16]], F32)), nl.rsqrt, 0.0)
        assert dst.np.tolist() == [[1, 0.5, 0.25]]

    on_core(body)


@covers("scalar_tensor_tensor")
@case
def test_scalar_tensor_tensor(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(floats)
    one, two = draw(binary_ops), draw(binary_ops)
    r0, r1 = draw(st.booleans()), draw(st.booleans())
    x, y = random_values(rng, shape, kind), random_values(rng, shape, kind)
    vec = random_values(rng, (shape[0], 1), "float32")
    dst = views.empty(shape, to)
    nisa.scalar_tensor_tensor(
        dst, views.holding(x, kind), getattr(nl, one), views.holding(vec, "float32"),
        getattr(nl, two), views.holding(y, kind), r0, r1,
    )  # fmt: skip
    v = vec.reshape(-1, *[1] * (len(shape) - 1))
    first = f32(BINARY[one](v, f32(x)) if r0 else BINARY[one](f32(x), v))
    second = BINARY[two](f32(y), first) if r1 else BINARY[two](first, f32(y))
    same(dst.np, rounded(f32(second), to))


@covers("tensor_copy")
@case
def test_tensor_copy(draw, rng, views):
    shape, kind, to = draw(shapes), draw(dtypes), draw(dtypes)
    x = random_values(rng, shape, kind)
    dst = views.empty(shape, to, "psum")
    nisa.tensor_copy(dst, views.holding(x, kind))
    same(dst.np, x if kind == to else rounded(f32(x), to))


def test_tensor_copy_of_equal_dtypes_keeps_bits():
    bits = np.array([[0x7FC00001, 0xFF800000, 0x00000001]], np.uint32)

    def body():
        dst = blank((1, 3))
        nisa.tensor_copy(dst, tile(bits).view(nl.float32))
        assert (dst.np.view(np.uint32) == bits).all()

    on_core(body)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [(2.5, "int32", 2), (3.5, "int32", 4), (300.0, "uint8", 255), (-3.0, "uint8", 0),
     (1e20, "int32", 2**31 - 1), (-1e20, "int32", -(2**31)), (1 + 2**-9, "bfloat16", 1.0),
     (1 + 3 * 2**-9, "bfloat16", 1 + 2**-7)],
)  # fmt: skip
def test_casts_round_to_nearest_even_and_integers_saturate(value, dtype, expected):
    def body():
        dst = blank((1, 1), dtype)
        nisa.tensor_copy(dst, tile(np.array([[value]], F32)))
        assert float(dst.np[0, 0]) == expected

    on_core(body)


@covers("memset")
@case
def test_memset(draw, rng, views):
    shape, kind = draw(shapes), draw(dtypes)
    dst = views.empty(shape, kind, draw(st.sampled_from(["sbuf", "psum"])))
    nisa.memset(dst, 7)
    same(dst.np, np.full(shape, 7))
    kind, value = draw(floats), float(rng.standard_normal())
    dst = views.empty(shape, kind)
    nisa.memset(dst, value)
    same(dst.np, np.full(shape, rounded(F32(value), kind)))


@covers("reciprocal")
@case
def test_reciprocal(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(floats)
    x = random_values(rng, shape, kind) + BY_NAME[kind].type(4)
    dst = views.empty(shape, to)
    nisa.reciprocal(dst, views.holding(x, kind))
    same(dst.np, rounded(F32(1) / f32(x), to))


@covers("iota")
@case
def test_iota(draw, rng, views):
    p = draw(st.integers(1, 128))
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    steps = [draw(st.integers(-5, 5)) for _ in counts]
    offset, mult = draw(st.integers(-9, 9)), draw(st.integers(-9, 9))
    dst = views.empty((p, int(np.prod(counts))), draw(st.sampled_from(["int32", "float32"])))
    nisa.iota(dst, [[s, n] for s, n in zip(steps, counts, strict=True)], offset, mult)
    grid = np.indices((p, *counts))
    expected = offset + mult * grid[0] + sum(s * g for s, g in zip(steps, grid[1:], strict=True))
    same(dst.np, expected)


def _erf(x):
    import math

    return np.vectorize(math.erf)(x)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_SWISH = lambda x, s: x * _sigmoid(s * x)  # noqa: E731
_SWISH_DX = lambda x, s: _sigmoid(s * x) * (1 + s * x * (1 - _sigmoid(s * x)))  # noqa: E731
# In float64, from the functions' definitions.
ACTIVATIONS = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "gelu_dx": lambda x: (
        0.5 * (1 + _erf(x / np.sqrt(2))) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    ),
    "gelu_apprx_tanh": lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_apprx_sigmoid": lambda x: _SWISH(x, 1.702),
    "gelu_apprx_sigmoid_dx": lambda x: _SWISH_DX(x, 1.702),
    "silu": lambda x: _SWISH(x, 1.0),
    "silu_dx": lambda x: _SWISH_DX(x, 1.0),
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "erf": _erf,
    "erf_dx": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x),
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sign": np.sign,
    "abs": np.abs,
}
_POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal"}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_functions(name):
    x = np.linspace(0.1, 3, 50) if name in _POSITIVE else np.linspace(-1.5, 1.5, 50)
    x = x.astype(F32).reshape(2, 25)

    def body():
        dst = blank((2, 25))
        nisa.activation(dst, getattr(nl, name), tile(x))
        # Each function is a chain of at most 8 float32 operations on values of magnitude ≤ 8,
        # each within one rounding (2^-24) and the library's 2 units in the last place.
        bound = 8 * 3 * 2.0**-24 * 8
        assert np.abs(dst.np - ACTIVATIONS[name](x.astype(np.float64))).max() < bound

    on_core(body)


@covers("activation", "activation_reduce")
@case
def test_activation_scale_bias_and_row_sums(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(floats)
    x, bias = random_values(rng, shape, kind), random_values(rng, (shape[0], 1), "float32")
    v = bias.reshape(-1, *[1] * (len(shape) - 1))
    expected = np.maximum(f32(x) * F32(0.5) + v, 0)
    sums = expected.reshape(len(x), -1).sum(axis=1, dtype=F32)
    data, b = views.holding(x, kind), views.holding(bias, "float32")
    dst, res = views.empty(shape, to), views.empty((shape[0], 1), "float32")
    nisa.activation_reduce(dst, nl.relu, data, nl.add, res, bias=b, scale=0.5)
    same(dst.np, rounded(expected, to))
    same(res.np, sums)
    # The same in two steps: accumulate twice, read out with the second.
    cmd = nisa.reduce_cmd
    nisa.activation(dst, nl.relu, data, b, 0.5, nl.add, reduce_cmd=cmd.reset_reduce)
    nisa.activation(dst, nl.relu, data, b, 0.5, nl.add, res, reduce_cmd=cmd.reduce)
    same(res.np, sums + sums)
    nisa.activation(dst, nl.copy, data, reduce_res=res)  # idle: the registers stay
    same(res.np, sums + sums)
    nisa.activation(dst, nl.copy, data, reduce_res=res, reduce_cmd=cmd.reset)
    same(res.np, np.zeros_like(sums))
    # activation_reduce leaves its sums in the registers; scale may be a vector, bias a number.
    scale = random_values(rng, (shape[0], 1), "float32")
    w = scale.reshape(v.shape)
    expected = np.maximum(f32(x) * w + F32(0.25), 0)
    scales = views.holding(scale, "float32")
    nisa.activation_reduce(dst, nl.relu, data, nl.add, res, bias=0.25, scale=scales)
    same(dst.np, rounded(expected, to))
    sums = expected.reshape(len(x), -1).sum(axis=1, dtype=F32)
    nisa.activation(dst, nl.copy, data, reduce_res=res)
    same(res.np, sums)


@covers("tensor_copy_predicated")
@case
def test_tensor_copy_predicated(draw, rng, views):
    shape, kind, reverse = draw(shapes), draw(dtypes), draw(st.booleans())
    old, new = random_values(rng, shape, kind), random_values(rng, shape, kind)
    mask = rng.integers(0, 2, shape).astype(np.uint8)
    dst = views.holding(old, kind)
    src = views.holding(new, kind)
    where = views.holding(mask * 3, "uint8")  # every value but 0 is true
    nisa.tensor_copy_predicated(dst, src, where, reverse)
    same(dst.np, np.where((mask != 0) != reverse, new, old))
    number = 7 if kind in ("int32", "int16", "uint8") else 1.3
    nisa.tensor_copy_predicated(dst, number, where, not reverse)
    same(dst.np, np.where((mask == 0) != reverse, rounded(F32(number), kind), new))


# ------------------------------------------------------------------ reductions
REDUCE = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}


@covers("tensor_reduce")
@case
def test_tensor_reduce(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(floats)
    first, name = draw(st.integers(1, len(shape) - 1)), draw(st.sampled_from(sorted(REDUCE)))
    axes, negate = tuple(range(first, len(shape))), draw(st.booleans())
    x = random_values(rng, shape, kind)
    dst = views.empty(shape[:first] if first > 1 else (shape[0], 1), to)
    nisa.tensor_reduce(dst, getattr(nl, name), views.holding(x, kind), axes, negate)
    expected = REDUCE[name].reduce(f32(x), axis=axes)
    same(dst.np, rounded(-expected if negate else expected, to))


@case
def test_tensor_reduce_subtract_logical_and_bits(draw, rng, views):
    """subtract takes all later elements, in row-major order, from the first."""
    shape = draw(shapes)
    first = draw(st.integers(1, len(shape) - 1))
    axes = tuple(range(first, len(shape)))
    out = shape[:first] if first > 1 else (shape[0], 1)
    kind = draw(bit_dtypes)
    x = rng.integers(0, 100, shape).astype(kind)
    flat = x.reshape(*shape[:first], -1)
    dst, data = views.empty(out, "float32"), views.holding(x, kind)
    nisa.tensor_reduce(dst, nl.subtract, data, axes)
    same(dst.np, f32(flat[..., 0]) - f32(flat[..., 1:]).sum(axis=-1))
    name = draw(st.sampled_from(["bitwise_and", "bitwise_or", "bitwise_xor"]))
    bits = views.empty(out, kind)
    nisa.tensor_reduce(bits, getattr(nl, name), data, axes)
    same(bits.np, BITS[name].reduce(flat, axis=-1))
    truth = rng.integers(0, 2, shape).astype(kind)
    name = draw(st.sampled_from(["logical_and", "logical_or", "logical_xor"]))
    nisa.tensor_reduce(dst, getattr(nl, name), views.holding(truth, kind), axes)
    same(dst.np, BINARY[name].reduce(truth, axis=axes))


@covers("tensor_partition_reduce")
@case
def test_tensor_partition_reduce(draw, rng, views):
    shape, kind, to = draw(shapes), draw(floats), draw(floats)
    name = draw(st.sampled_from(["add", "average", "maximum"]))
    x = random_values(rng, shape, kind)
    dst = views.empty((1, int(np.prod(shape[1:]))), to)
    nisa.tensor_partition_reduce(dst, getattr(nl, name), views.holding(x, kind))
    fold = {"add": np.sum, "average": np.mean, "maximum": np.max}[name]
    same(dst.np, rounded(fold(f32(x).reshape(len(x), -1), axis=0), to))
    name, kind = draw(st.sampled_from(["bitwise_and", "bitwise_or"])), draw(bit_dtypes)
    x = rng.integers(0, 100, shape).astype(kind)
    dst = views.empty(dst.shape, kind)
    nisa.tensor_partition_reduce(dst, getattr(nl, name), views.holding(x, kind))
    same(dst.np, BITS[name].reduce(x.reshape(len(x), -1), axis=0))


@covers("tensor_scalar_reduce")
@case
def test_tensor_scalar_reduce(draw, rng, views):
    shape, name = draw(shapes), draw(st.sampled_from(sorted(REDUCE)))
    x = random_values(rng, shape, "float32")
    dst, res = views.empty(shape, "float32"), views.empty((shape[0], 1), "float32")
    data = views.holding(x, "float32")
    nisa.tensor_scalar_reduce(dst, data, nl.multiply, 2.0, getattr(nl, name), res)
    value = (x * F32(2)).reshape(len(x), -1)
    same(dst.np, x * F32(2))
    neutral = {"add": 0, "multiply": 1}.get(name)
    folded = REDUCE[name].reduce(value, axis=1)
    same(res.np, folded if neutral is None else REDUCE[name](F32(neutral), folded))
    nisa.tensor_scalar_reduce(dst, data, nl.multiply, 2.0, getattr(nl, name), res, reduce_init=3.0,
                              reduce_cmd=nisa.reduce_cmd.load_reduce)  # fmt: skip
    same(res.np, REDUCE[name](F32(3), folded))
    # reduce goes on from there, with another operand; the result may be negated on its way out.
    vec = random_values(rng, (shape[0], 1), "float32")
    v = vec.reshape(-1, *[1] * (len(shape) - 1))
    nisa.tensor_scalar_reduce(dst, data, nl.subtract, views.holding(vec, "float32"),
                              getattr(nl, name), res, reduce_res_negate=True,
                              reduce_cmd=nisa.reduce_cmd.reduce)  # fmt: skip
    same(dst.np, x - v)
    again = REDUCE[name].reduce((x - v).reshape(len(x), -1), axis=1)
    same(res.np, -REDUCE[name](REDUCE[name](F32(3), folded), again))
    # reset leaves the neutral value and folds nothing in.
    nisa.tensor_scalar_reduce(dst, data, nl.add, 0.0, getattr(nl, name), res,
                              reduce_cmd=nisa.reduce_cmd.reset)  # fmt: skip
    same(res.np, np.full(len(x), STARTS[name]))


STARTS = {"add": 0, "subtract": 0, "multiply": 1, "maximum": -np.inf, "minimum": np.inf}


@covers("tensor_scalar_cumulative")
@case
def test_tensor_scalar_cumulative(draw, rng, views):
    p, n = draw(st.integers(1, 128)), draw(st.integers(1, 20))
    x = random_values(rng, (p, n), "float32")
    dst, data = views.empty((p, n), "float32"), views.holding(x, "float32")
    nisa.tensor_scalar_cumulative(dst, data, nl.multiply, nl.add, 2.0)
    same(dst.np, np.add.accumulate(x * F32(2), axis=1))
    nisa.tensor_scalar_cumulative(dst, data, nl.add, nl.maximum, 0.0, 0.5,
                                  reduce_cmd=nisa.reduce_cmd.load_reduce)  # fmt: skip
    same(dst.np, np.maximum(np.maximum.accumulate(x, axis=1), F32(0.5)))
    # Any of the five running operators; vectors; and going on where the last one stopped.
    one, two = (
        draw(st.sampled_from(["add", "subtract", "less"])),
        draw(st.sampled_from(sorted(STARTS))),
    )
    vec, start = (random_values(rng, (p, 1), "float32") for _ in range(2))
    a, b = views.holding(vec, "float32"), views.holding(start, "float32")
    cmd = nisa.reduce_cmd
    value, state = f32(BINARY[one](x, vec)), start[:, 0]
    for command, imm1 in [(cmd.load_reduce, b), (cmd.reduce, None), (cmd.reset_reduce, None)]:
        if command is cmd.reset_reduce:
            state = np.full(p, STARTS[two], F32)
        expected = np.empty_like(x)
        for i in range(n):
            state = expected[:, i] = BINARY[two](value[:, i], state)
        nisa.tensor_scalar_cumulative(dst, data, getattr(nl, one), getattr(nl, two), a, imm1,
                                      reduce_cmd=command)  # fmt: skip
        same(dst.np, expected)


@covers("tensor_tensor_scan")
@case
def test_tensor_tensor_scan(draw, rng, views):
    p, n = draw(st.integers(1, 128)), draw(st.integers(1, 20))
    x, y = random_values(rng, (p, n), "float32"), random_values(rng, (p, n), "float32")
    start = random_values(rng, (p, 1), "float32")
    dst = views.empty((p, n), "float32")
    a, b = views.holding(x, "float32"), views.holding(y, "float32")
    nisa.tensor_tensor_scan(dst, a, b, views.holding(start, "float32"), nl.multiply, nl.add)
    state, expected = start[:, 0], np.empty_like(x)
    for i in range(n):
        state = x[:, i] * state + y[:, i]
        expected[:, i] = state
    same(dst.np, expected)
    one, two = draw(binary_ops), draw(binary_ops)
    r0, r1 = draw(st.booleans()), draw(st.booleans())
    nisa.tensor_tensor_scan(dst, a, b, 0.5, getattr(nl, one), getattr(nl, two), r0, r1)
    state = np.full(p, 0.5, F32)
    for i in range(n):
        state = f32(BINARY[one](state, x[:, i]) if r0 else BINARY[one](x[:, i], state))
        state = f32(BINARY[two](y[:, i], state) if r1 else BINARY[two](state, y[:, i]))
        expected[:, i] = state
    same(dst.np, expected)


@covers("bn_stats", "bn_aggr")
@case
def test_bn_stats_and_aggr_give_mean_and_variance(draw, rng, views):
    p, n = draw(st.integers(1, 128)), draw(st.integers(2, 60))
    x = random_values(rng, (p, n), "float32")
    stats, result = views.empty((p, 6), "float32"), blank((p, 2))
    nisa.bn_stats(stats, views.holding(x, "float32"))
    for first, half in ((0, x[:, 0::2]), (3, x[:, 1::2])):
        same(stats.np[:, first], np.full(p, half.shape[1]))
        same(stats.np[:, first + 1], half.mean(axis=1))
        # The sum of at most 30 squares of magnitude ≤ 25, in two orders of float32 operations.
        spread = half.astype(np.float64).var(axis=1) * half.shape[1]
        assert np.abs(stats.np[:, first + 2] - spread).max() < 4 * 30 * 2.0**-24 * 25 * 30
    nisa.bn_aggr(result, stats)
    # Two orders of summing n ≤ 60 float32 terms of magnitude ≤ 5 (variance: ≤ 25): each is
    # within n · 2^-24 of the sum of magnitudes.
    assert np.abs(result.np[:, 0] - x.mean(axis=1)).max() < 2 * 60 * 2.0**-24 * 5
    assert np.abs(result.np[:, 1] - x.var(axis=1)).max() < 4 * 60 * 2.0**-24 * 25


# ------------------------------------------------------------------ selections
@covers("select_reduce")
@case
def test_select_reduce(draw, rng, views):
    shape, kind, reverse = draw(shapes), draw(floats), draw(st.booleans())
    x, mask = random_values(rng, shape, kind), rng.integers(0, 2, shape).astype(np.uint8)
    other = random_values(rng, (shape[0], 1), "float32")
    dst, res = views.empty(shape, kind), views.empty((shape[0], 1), "float32")
    nisa.select_reduce(
        dst, views.holding(mask, "uint8"), views.holding(x, kind), views.holding(other, "float32"),
        res, nisa.reduce_cmd.reset_reduce, nl.maximum, reverse,
    )  # fmt: skip
    v = other.reshape(-1, *[1] * (len(shape) - 1))
    expected = np.where((mask != 0) != reverse, f32(x), v)
    same(dst.np, rounded(expected, kind))
    same(res.np, expected.reshape(len(x), -1).max(axis=1))
    # With a number, and going on from the first maximum.
    larger = np.where((mask != 0) == reverse, f32(x), F32(0.25))
    nisa.select_reduce(
        dst, views.holding(mask.astype(np.int16) * -1, "int16"), views.holding(x, kind), 0.25, res,
        nisa.reduce_cmd.reduce, reverse_pred=not reverse,
    )  # fmt: skip
    same(dst.np, rounded(larger, kind))
    same(res.np, np.maximum(expected, larger).reshape(len(x), -1).max(axis=1))


COMPARISONS = st.sampled_from(["equal", "less", "less_equal", "greater", "greater_equal"])


@covers("range_select")
@case
def test_range_select(draw, rng, views):
    p, n, start = draw(st.integers(1, 128)), draw(st.integers(1, 30)), draw(st.integers(0, 9))
    x = random_values(rng, (p, n), "float32")
    low, high = (rng.integers(0, 30, (p, 1)).astype(F32) for _ in range(2))
    dst, res = views.empty((p, n), "float32"), views.empty((p, 1), "float32")
    nisa.range_select(
        dst, views.holding(x, "float32"), nl.greater_equal, nl.less, views.holding(low, "float32"),
        views.holding(high, "float32"), reduce_res=res, range_start=start,
    )  # fmt: skip
    index = start + np.arange(n)
    expected = np.where((index >= low) & (index < high), x, np.finfo(F32).min)
    same(dst.np, expected)
    same(res.np, expected.max(axis=1))
    one, two = draw(COMPARISONS), draw(COMPARISONS)
    nisa.range_select(
        dst, views.holding(x, "float32"), getattr(nl, one), getattr(nl, two),
        views.holding(low, "float32"), views.holding(high, "float32"), nisa.reduce_cmd.reduce, res,
    )  # fmt: skip
    keep = BINARY[one](np.arange(n), low) & BINARY[two](np.arange(n), high)
    again = np.where(keep, x, np.finfo(F32).min)
    same(dst.np, again)
    same(res.np, np.maximum(expected, again).max(axis=1))


@covers("affine_select")
@case
def test_affine_select_as_causal_mask(draw, rng, views):
    p, n, offset = draw(st.integers(1, 128)), draw(st.integers(1, 60)), draw(st.integers(-9, 9))
    x = random_values(rng, (p, n), "float32")
    dst = views.empty((p, n), "float32")
    nisa.affine_select(
        dst, [[-1, n]], 1, views.holding(x, "float32"), -1e30, nl.greater_equal, offset=offset
    )
    i, j = np.indices((p, n))
    same(dst.np, np.where(offset + i - j >= 0, x, F32(-1e30)))
    name, mult, n = draw(COMPARISONS), draw(st.integers(-3, 3)), 6
    x = random_values(rng, (p, n), "float32")
    dst = views.empty((p, 3, 2), "float32")
    nisa.affine_select(dst, [[2, 3], [-3, 2]], mult, views.holding(x, "float32"), 0.5,
                       getattr(nl, name), offset)  # fmt: skip
    i, j, k = np.indices((p, 3, 2))
    keep = BINARY[name](offset + mult * i + 2 * j - 3 * k, 0)
    same(dst.np, np.where(keep, x.reshape(p, 3, 2), F32(0.5)))


@covers("max8", "nc_find_index8", "nc_match_replace8")
@case
def test_top_sixteen_by_max8_and_match_replace(draw, rng, views):
    p, n = draw(st.integers(1, 128)), draw(st.integers(16, 60))
    x = random_values(rng, (p, n), "float32")
    x[:, 3] = x[:, 2]  # a duplicate
    data, vals = views.holding(x, "float32"), views.empty((p, 8), "float32")
    nisa.max8(vals, data)
    top = -np.sort(-x, axis=1)
    same(vals.np, top[:, :8])
    index = views.empty((p, 8), "uint32")
    nisa.nc_find_index8(index, data, vals)
    same(np.take_along_axis(x, index.np.astype(int), 1), top[:, :8])
    assert all(len(set(row)) == 8 for row in index.np.tolist())
    rest, places = views.empty((p, n), "float32"), blank((p, 8), "uint32")
    nisa.nc_match_replace8(rest, data, vals, -1e30, places)
    assert {tuple(sorted(r)) for r in places.np.tolist()} == {
        tuple(sorted(r)) for r in index.np.tolist()
    }
    nisa.max8(vals, rest)
    same(vals.np, top[:, 8:16])


def test_find_index8_of_absent_and_duplicate_values():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], F32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 5]], F32)

    def body():
        index, dst = blank((1, 8), "uint32"), blank((1, 11))
        nisa.nc_find_index8(index, tile(data), tile(vals))
        assert index.np.tolist() == [[2, 4, 5, 6, 7, 8, 9, 2**32 - 1]]
        nisa.nc_match_replace8(dst, tile(data), tile(vals), 0.0, index)
        assert index.np.tolist() == [[2, 9, 8, 7, 6, 5, 4, 2**32 - 1]]
        assert dst.np.tolist() == [[1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 8]]

    on_core(body)


@covers("nonzero_with_count")
def test_nonzero_with_count():
    x = np.zeros((32, 8), np.int32)
    x[0, [1, 2, 5]] = 1
    x[16, 7] = 3

    def body():
        dst = tile(np.full((32, 9), 99, np.int32))
        nisa.nonzero_with_count(dst, tile(x), index_offset=16)
        assert dst.np[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
        assert dst.np[16].tolist() == [23, -1, -1, -1, -1, -1, -1, -1, 1]
        assert (dst.np[1:16] == 99).all()
        nisa.nonzero_with_count(dst, tile(x), padding_val=-5)
        assert dst.np[16].tolist() == [7, -5, -5, -5, -5, -5, -5, -5, 1]

    on_core(body)


# ------------------------------------------------------------------ gathers
@covers("nc_stream_shuffle")
@case
def test_nc_stream_shuffle(draw, rng, views):
    n, quadrants = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 4]))
    mask = [draw(st.sampled_from([*range(32), 255])) for _ in range(32)]
    x = random_values(rng, (32 * quadrants, n), "float32")
    old = random_values(rng, (32 * quadrants, n), "float32")
    dst = views.holding(old, "float32")
    nisa.nc_stream_shuffle(dst, views.holding(x, "float32"), mask)
    expected = old.copy()
    for q in range(quadrants):
        for i, m in enumerate(mask):
            if m != 255:
                expected[32 * q + i] = x[32 * q + m]
    same(dst.np, expected)


def test_nc_stream_shuffle_broadcasts_one_partition():
    def body():
        dst = blank((32, 4))
        nisa.nc_stream_shuffle(dst, tile(np.arange(4, dtype=F32)[None]), [0] * 32)
        assert (dst.np == np.arange(4)).all()

    on_core(body)


@covers("nc_n_gather")
@case
def test_nc_n_gather(draw, rng, views):
    p, n, k = draw(st.integers(1, 128)), draw(st.integers(1, 20)), draw(st.integers(1, 20))
    x, index = random_values(rng, (p, n), "bfloat16"), rng.integers(0, n, (p, k)).astype("uint32")
    dst = views.empty((p, k), "bfloat16")
    nisa.nc_n_gather(dst, views.holding(x, "bfloat16"), views.holding(index, "uint32"))
    same(dst.np, np.take_along_axis(x, index.astype(int), 1))
    index[-1, -1] = n
    wrong = views.holding(index, "uint32")
    with pytest.raises(KernelError, match=f"index {n} into"):
        nisa.nc_n_gather(dst, views.holding(x, "bfloat16"), wrong)


@covers("local_gather")
@case
def test_local_gather(draw, rng, views):
    p, n, columns = 16 * draw(st.integers(1, 8)), draw(st.integers(32, 50)), draw(st.integers(1, 3))
    each = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    valid = draw(st.integers(1, 16 * columns))
    x, index = random_values(rng, (p, n), "bfloat16"), rng.integers(0, n - each + 1, (p, columns))
    dst = views.empty((p, valid * each), "bfloat16")
    indices = views.holding(index.astype(np.uint16), "uint16")
    nisa.local_gather(dst, views.holding(x, "bfloat16"), indices, each, valid)
    for q in range(p):
        group = index[q // 16 * 16 : q // 16 * 16 + 16]
        listed = [group[i % 16, i // 16] for i in range(valid)]
        same(dst.np[q], np.concatenate([x[q, i : i + each] for i in listed]))
    # All indices, if no count is given; the last element is the last that an index reaches.
    index[-1, -1] = n - each
    indices = views.holding(index.astype(np.uint16), "uint16")
    dst = views.empty((p, 16 * columns * each), "bfloat16")
    nisa.local_gather(dst, views.holding(x, "bfloat16"), indices, each)
    same(dst.np[-1, -each:], x[-1, -each:])
    index[-1, -1] += 1
    wrong = views.holding(index.astype(np.uint16), "uint16")
    with pytest.raises(KernelError, match=f"index {n} into"):
        nisa.local_gather(dst, views.holding(x, "bfloat16"), wrong, each)


# ------------------------------------------------------------------ Tensor engine
@covers("nc_matmul")
@case
def test_nc_matmul(draw, rng, views):
    k, m, n = (draw(st.integers(1, 128)) for _ in range(3))
    pair = draw(st.sampled_from([("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float16")]))
    x, y = random_values(rng, (k, m), pair[0]), random_values(rng, (k, n), pair[1])
    dst = views.empty((m, n), "float32", "psum")
    a, b = views.holding(x, pair[0]), views.holding(y, pair[1])
    nisa.nc_matmul(dst, a, b, accumulate=False)
    product = f32(x).T @ f32(y)
    # Two orders of adding K products: within K · 2^-24 · Σ|ab| of each other, twice.
    bound = 2 * k * 2.0**-24 * (np.abs(f32(x)).T @ np.abs(f32(y))) + 1e-30
    assert (np.abs(dst.np - product) <= bound).all()
    nisa.nc_matmul(dst, a, b, accumulate=True)
    assert (np.abs(dst.np - 2 * product) <= 4 * bound).all()


def test_nc_matmul_takes_operands_of_higher_rank():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 2, 3)).astype(F32), rng.standard_normal((8, 4, 5)).astype(F32)

    def body():
        dst = blank((6, 4, 5), place="psum")
        nisa.nc_matmul(dst, tile(x), tile(y))
        same(dst.np.reshape(6, 20), x.reshape(8, 6).T @ y.reshape(8, 20))

    on_core(body)


def test_nc_matmul_double_row_contracts_over_pairs():
    import ml_dtypes

    rng = np.random.default_rng(0)
    x, y = (rng.integers(-3, 4, (128, 2, 16)).astype(ml_dtypes.float8_e4m3) for _ in range(2))

    def body():
        dst = blank((16, 16), place="psum")
        nisa.nc_matmul(dst, tile(x), tile(y), perf_mode=nisa.matmul_perf_mode.double_row)
        same(dst.np, f32(x).reshape(256, 16).T @ f32(y).reshape(256, 16))

    on_core(body)


@case
def test_nc_matmul_transposes_bit_for_bit(draw, rng, views):
    k, m = draw(st.integers(1, 128)), draw(st.integers(1, 128))
    x = random_values(rng, (k, m), "bfloat16")
    x[rng.integers(0, k), rng.integers(0, m)] = np.inf
    x[rng.integers(0, k), rng.integers(0, m)] = np.nan
    dst, identity = views.empty((m, k), "bfloat16", "psum"), np.eye(k).astype(BY_NAME["bfloat16"])
    nisa.nc_matmul(dst, views.holding(x, "bfloat16"), tile(identity), is_transpose=True)
    same(dst.np, x.T)
    wrong = tile(identity + identity)
    with pytest.raises(KernelError, match="not the identity"):
        nisa.nc_matmul(dst, views.holding(x, "bfloat16"), wrong, is_transpose=True)


@covers("nc_transpose")
@case
def test_nc_transpose(draw, rng, views):
    p, n, kind = draw(st.integers(1, 128)), draw(st.integers(1, 128)), draw(dtypes)
    x = random_values(rng, (p, n), kind)
    dst = views.empty((n, p), kind, "psum")
    nisa.nc_transpose(dst, views.holding(x, kind), engine=nisa.engine.tensor)
    same(dst.np, x.T)


@case
def test_nc_transpose_on_vector(draw, rng, views):
    p, n, kind = draw(st.integers(1, 32)), 2 * draw(st.integers(1, 16)), draw(dtypes)
    x = random_values(rng, (p, 2, n // 2), kind)
    place, to = (draw(st.sampled_from(["sbuf", "psum"])) for _ in range(2))
    dst = views.empty((n, p), kind, to)
    chosen = draw(st.sampled_from([nisa.engine.vector, nisa.engine.unknown]))
    nisa.nc_transpose(dst, views.holding(x, kind, place), engine=chosen)
    same(dst.np, x.reshape(p, n).T)


def test_matmul_costs():
    """Multiply-adds, cycles and the used part of the array, from shapes (§5.5 of the reference)."""
    fp8 = lambda *shape: blank(shape, "float8_e4m3")  # noqa: E731
    psum = lambda *shape: blank(shape, place="psum")  # noqa: E731

    def body():
        for k, m, n, dtype in [(64, 32, 256, "bfloat16"), (128, 128, 16, "float32")]:
            nisa.nc_matmul(psum(m, n), blank((k, m), dtype), blank((k, n), dtype))
        nisa.nc_matmul(psum(64, 128), fp8(128, 2, 64), fp8(128, 2, 128),
                       perf_mode=nisa.matmul_perf_mode.double_row)  # fmt: skip
        nisa.nc_transpose(blank((128, 100), "bfloat16", "psum"), blank((100, 128), "bfloat16"))
        nisa.nc_transpose(psum(64, 40), blank((40, 64)))

    with trace(shapes_only=True) as recorded:
        on_core(body)
    got = [(r.macs, r.columns, r.cycles, r.array_used) for r in recorded.records]
    assert got == [
        (64 * 32 * 256, 256, 256, 1 / 8),
        (128 * 128 * 16, 64, 4 * 64, 1 / 4),
        (2 * 128 * 64 * 128, 128, 128, 1 / 2),
        (0, 100, 100, 0.0),
        (0, 64, 4 * 64, 0.0),
    ]


# ------------------------------------------------------------------ DMA
@covers("dma_copy")
@case
def test_dma_copy(draw, rng, views):
    shape, kind, to = draw(shapes), draw(dtypes), draw(dtypes)
    x = random_values(rng, shape, kind)
    dst = views.empty(shape, to)
    nisa.dma_copy(dst, views.holding(x, kind, "hbm"))
    same(dst.np, x if kind == to else rounded(f32(x), to))


@covers("dma_compute")
@case
def test_dma_compute_adds(draw, rng, views):
    shape, kind, to, count = draw(shapes), draw(floats), draw(floats), draw(st.integers(1, 4))
    xs = [random_values(rng, shape, kind) for _ in range(count)]
    dst = views.empty(shape, to, "hbm")
    nisa.dma_compute(dst, [views.holding(x, kind) for x in xs], nl.add)
    total = f32(xs[0])
    for x in xs[1:]:
        total = total + f32(x)
    same(dst.np, rounded(total, to))


@covers("dma_transpose")
@case
def test_dma_transpose(draw, rng, views):
    axes = draw(st.sampled_from([(1, 0), (2, 1, 0), (3, 1, 2, 0)]))
    shape = (draw(st.integers(1, 20)), 2, 3, draw(st.integers(1, 128)))
    shape = (shape[0], *shape[1 : len(axes) - 1], shape[3])
    kind = draw(dtypes)
    x = random_values(rng, shape, kind)
    dst = views.empty(tuple(shape[i] for i in axes), kind)
    nisa.dma_transpose(dst, views.holding(x, kind, "hbm"), axes)
    same(dst.np, x.transpose(axes))


covers("core_barrier", "sendrecv")  # in test_sim_cores.py
covers("register_move", "register_load", "register_store")  # in test_sim_loops.py


def test_every_instruction_of_the_table_is_compared_here():
    assert set(TABLE) == COVERED


def test_a_view_as_destination_writes_through_and_nothing_else():
    def body():
        base = tile(np.zeros((4, 6), F32))
        nisa.memset(base[0:1, 1:5:2], 5.0)
        expected = np.zeros((4, 6))
        expected[0, [1, 3]] = 5
        same(base.np, expected)

    on_core(body)


def test_helper_fill_marks_only_the_view():
    def body():
        base = blank((4, 6))
        fill(base[:, 0:3], np.ones((4, 3)))
        assert base.storage.written.read(base[:, 0:3]) is True
        assert base.storage.written.read(base).sum() == 12

    on_core(body)


def test_an_idle_instruction_may_clobber_the_vector_accumulators():
    cmd = nisa.reduce_cmd

    def body(between):
        x, dst, res = tile(np.ones((2, 8), F32)), blank((2, 8)), blank((2, 1))
        mask = tile(np.ones((2, 8), np.uint8))
        nisa.tensor_scalar_reduce(dst, x, nl.multiply, 1.0, nl.maximum, res)
        if between:
            nisa.select_reduce(dst, mask, x, 0.0)
        nisa.select_reduce(dst, mask, x, 0.0, res, cmd.reduce)

    on_core(lambda: body(False))
    with pytest.raises(KernelError, match="begin with reduce_cmd"):
        on_core(lambda: body(True))


def test_accumulators_belong_to_one_number_of_partitions():
    cmd = nisa.reduce_cmd

    def scalar(p, q):
        nisa.activation(blank((p, 4)), nl.exp, tile(np.ones((p, 4), F32)),
                        reduce_cmd=cmd.reset_reduce)  # fmt: skip
        nisa.activation(blank((q, 4)), nl.exp, tile(np.ones((q, 4), F32)), reduce_cmd=cmd.reduce)

    def vector(p, q):
        for count, command in ((p, cmd.reset_reduce), (q, cmd.reduce)):
            x, res = tile(np.ones((count, 4), F32)), blank((count, 1))
            nisa.tensor_scalar_reduce(blank((count, 4)), x, nl.add, 1.0, nl.add, res,
                                      reduce_cmd=command)  # fmt: skip

    def running(p, q):
        for count, command in ((p, cmd.reset_reduce), (q, cmd.reduce)):
            nisa.tensor_scalar_cumulative(blank((count, 4)), tile(np.ones((count, 4), F32)), nl.add,
                                          nl.add, 1.0, reduce_cmd=command)  # fmt: skip

    for use, name in ((scalar, "Scalar"), (vector, "Vector"), (running, "Vector")):
        on_core(lambda use=use: use(8, 8))
        with pytest.raises(KernelError, match=f"the {name} accumulators hold 8 partitions"):
            on_core(lambda use=use: use(8, 4))


@pytest.mark.parametrize("use", [
    lambda: nisa.iota(blank((2, 4), "int32"), [1, 4]),
    lambda: nisa.nc_stream_shuffle(blank((32, 4)), tile(np.ones((32, 4), F32)), None),
    lambda: nisa.tensor_scalar(blank((2, 4)), tile(np.ones((2, 4), F32)), nl.add, 10**400),
    lambda: nisa.dma_compute(blank((2, 4)), [tile(np.ones((2, 4), F32))], nl.add, scales=1.0),
    lambda: nisa.affine_select(blank((2, 4)), [[1, 4]], None, tile(np.ones((2, 4), F32)), 0.0),
])  # fmt: skip
def test_no_raw_error_of_numpy_reaches_the_kernel(use):
    """What no rule foresaw still names the instruction, its operands and the kernel's line."""
    with pytest.raises(KernelError) as error:
        on_core(use)
    text = str(error.value)
    assert re.match(r"\w+: \w+", text)
    assert "check the arguments: dst '" in text
    assert "test_sim_instructions.py:" in text
