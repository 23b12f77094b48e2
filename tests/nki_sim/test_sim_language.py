"""Helpers of nki.language: each a fresh tile and one or two instructions."""

import dataclasses

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, same, tile

from nki_sim import KernelError, trace
from nki_sim.dtypes import BY_NAME

F32, BF16 = np.float32, BY_NAME["bfloat16"]
X = np.random.default_rng(0).standard_normal((8, 3, 4)).astype(F32)


@pytest.mark.parametrize(
    ("helper", "expected"),
    [
        (lambda x: nl.add(x, x), X + X),
        (lambda x: nl.subtract(x, 1.0), X - 1),
        (lambda x: nl.subtract(1.0, x), 1 - X),
        (lambda x: nl.relu(x), np.maximum(X, 0)),
        (lambda x: nl.square(x), X * X),
        (lambda x: nl.copy(x), X),
        (lambda x: nl.reciprocal(x), 1 / X),
        (lambda x: nl.rsqrt(nl.square(x)), 1 / np.sqrt(X * X)),
        (lambda x: nl.negative(x), -X),
        (lambda x: nl.logical_not(nl.less(x, 0.0)), X >= 0),
        (lambda x: nl.where(nl.less(x, 0.0), x, 0.0), np.minimum(X, 0)),
        (lambda x: nl.where(nl.less(x, 0.0), x, nl.square(x)), np.where(X < 0, X, X * X)),
        # Two floats of different dtype: the result has x's.
        (lambda x: nl.where(nl.less(x, 0.0), nl.copy(x, nl.bfloat16), x, nl.float32),
         np.where(X < 0, X.astype(BF16).astype(F32), X)),
        (lambda x: nl.where(nl.less(x, 0.0), x, nl.copy(x, nl.bfloat16)),
         np.where(X < 0, X, X.astype(BF16).astype(F32))),
        (lambda x: nl.power(nl.square(x), x), np.power(X * X, X)),
        (lambda x: nl.exp(x, np.float16), np.exp(X).astype(np.float16)),
        (lambda x: nl.add(x, x, nl.bfloat16), (X + X).astype(BF16)),
        (lambda x: nl.invert(nl.ones((2, 3), nl.int32)), np.full((2, 3), -2)),
        (lambda x: nl.left_shift(1, nl.full((2, 3), 4, nl.int32)), np.full((2, 3), 16)),
        (lambda x: nl.sum(x, axis=[1, 2]), X.sum(axis=(1, 2))),
        (lambda x: nl.sum(x, axis=-1), X.sum(axis=-1)),
        (lambda x: nl.max(x, axis=2, keepdims=True), X.max(axis=2, keepdims=True)),
        (lambda x: nl.min(x, axis=2), X.min(axis=2)),
        (lambda x: nl.prod(x, axis=2), X.prod(axis=2)),
        (lambda x: nl.expand_dims(x, 1), X[:, None]),
        (lambda x: nl.broadcast_to(nl.expand_dims(x, 1), (8, 5, 3, 4)),
         np.repeat(X[:, None], 5, 1)),
        (lambda x: nl.broadcast_to(x[0:1], (100, 3, 4)), np.repeat(X[:1], 100, 0)),
        (lambda x: nl.transpose(x.reshape((8, 12))), X.reshape(8, 12).T),
        (lambda x: nl.zeros((2, 3), nl.float32), np.zeros((2, 3))),
        (lambda x: nl.ones((2, 3), nl.int32), np.ones((2, 3))),
        (lambda x: nl.zeros_like(x), np.zeros_like(X)),
    ],
)  # fmt: skip
def test_helper(helper, expected):
    on_core(lambda: same(helper(tile(X)).np, expected))


def test_mean_divides_by_the_count():
    def body():
        # One sum of 12 terms and one product: 13 roundings of values below 12 · 4.
        result = nl.mean(tile(X), axis=(1, 2))
        assert np.abs(result.np[:, 0] - X.astype(np.float64).mean((1, 2))).max() < 13 * 2**-24 * 48

    on_core(body)


def test_load_store_and_matmul():
    def body():
        x = tile(X.reshape(8, 12), "hbm")
        y = nl.ndarray((8, 12), nl.float32, buffer=nl.shared_hbm)
        nl.store(y, nl.load(x))
        same(y.np, x.np)
        product = nl.matmul(nl.load(x), nl.load(x), transpose_x=True)
        same(product.np, x.np.T @ x.np)
        same(nl.shared_identity_matrix(4, nl.float32).np, np.eye(4))

    on_core(body)


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("only transpose_x=True", lambda x: nl.matmul(x, x)),
        ("not a hardware instruction", lambda x: nl.divide(x, x)),
        ("only size-1 dimensions grow", lambda x: nl.broadcast_to(x, (8, 3, 8))),
        ("dimension 0 is the partition", lambda x: nl.expand_dims(x, 0)),
        ("never 0", lambda x: nl.sum(x, axis=0)),
        ("nl.sum of .* over axis 3", lambda x: nl.sum(x, axis=3)),
        ("nl.max of .* over axis -4", lambda x: nl.max(x, axis=-4)),
        ("nl.min of .* over axis 1.0", lambda x: nl.min(x, axis=1.0)),
        ("nl.prod of .* over axis None", lambda x: nl.prod(x, axis=None)),
        ("nl.mean of .* over axis \\(2, -1\\)", lambda x: nl.mean(x, axis=(2, -1))),
        ("nl.sum of .* over axis \\(\\)", lambda x: nl.sum(x, axis=())),
        ("only tensor_tensor computes", lambda x: nl.power(x, 2.0)),
        ("no access to PSUM", lambda x: nl.rsqrt(tile(X[:, 0], "psum"))),
        ("only size-1 dimensions grow", lambda x: nl.broadcast_to(x[:, :, 0:1], (8, 3, 0))),
        ("only size-1 dimensions grow", lambda x: nl.broadcast_to(x[:, :, 0:1], (8, 3, 2.0))),
        ("only size-1 dimensions grow", lambda x: nl.broadcast_to(x, 8)),
        ("not one that row indices select", lambda x: nl.broadcast_to(rows_of(x, 1), (5, 3, 4))),
        ("what row indices select", lambda x: nl.expand_dims(rows_of(x, 1), 0)),
        ("at axis 4", lambda x: nl.expand_dims(x, 4)),
        ("at axis -5", lambda x: nl.expand_dims(x, -5)),
        ("at axis 1.0", lambda x: nl.expand_dims(x, 1.0)),
        ("destination in HBM", lambda x: nl.store(x, x)),
        ("value lies in SBUF", lambda x: nl.store(tile(X, "hbm"), tile(X, "hbm"))),
        ("value 300 for dst", lambda x: nl.full((2, 2), 300, nl.int8)),
        ("value 1.5 for dst", lambda x: nl.full((2, 2), 1.5, nl.int8)),
        ("at least one element", lambda x: nl.shared_constant(np.zeros((0, 2), F32))),
        ("rule: a numpy array", lambda x: nl.shared_constant([[1], [2, 3]])),
        ("n is 1 to 128", lambda x: nl.shared_identity_matrix(0)),
        ("n is 1 to 128", lambda x: nl.shared_identity_matrix(129)),
        ("n is 1 to 128", lambda x: nl.shared_identity_matrix(2.0)),
        ("the dtype has 0 and 1", lambda x: nl.shared_identity_matrix(2, nl.float8_e8m0fnu)),
        ("one axis, 0", lambda x: nl.program_id(1)),
        ("one axis, 0", lambda x: nl.num_programs(axes=2)),
        ("was never written", lambda x: nl.device_print("x", blank((2, 2)))),
        ("only DMA gathers rows", lambda x: nl.device_print("x", rows_of(x, 1))),
    ],
)
def test_refusals(text, use):
    with pytest.raises(KernelError, match=text):
        on_core(lambda: use(tile(X)))


def rows_of(x, *indices):
    """Rows of a copy of x in HBM, selected by indices."""
    return tile(x.np, "hbm").vector_select(0, tile(np.array(indices, np.int32).reshape(-1, 1)))


@pytest.mark.parametrize("name", [
    "add", "exp", "rsqrt", "invert", "negative", "logical_not", "sum", "mean", "load", "transpose",
    "matmul", "broadcast_to", "expand_dims", "empty_like", "zeros_like", "device_print", "where",
    "store",
])  # fmt: skip
def test_what_is_no_tensor_is_named(name):
    others = {
        "add": [1.0], "sum": [1], "mean": [1], "matmul": [1.0, True], "broadcast_to": [(2, 2)],
        "expand_dims": [1], "where": [1.0, 2.0], "store": [1.0],
    }  # fmt: skip
    arguments = ["x", 3] if name == "device_print" else [3, *others.get(name, [])]
    with pytest.raises(TypeError, match=f"nl.{name} takes a tensor, not (int|float)"):
        on_core(lambda: getattr(nl, name)(*arguments))


def test_views_keep_a_run_time_address():
    def body():
        h, at = tile(X.reshape(24, 4), "hbm"), nisa.register_alloc(5)
        row = h.ap([[4, 1], [1, 4]], scalar_offset=at)
        same(nl.load(nl.broadcast_to(row, (3, 4))).np, np.repeat(X.reshape(24, 4)[5:6], 3, 0))
        same(nl.load(nl.expand_dims(row, 0).reshape((1, 4))).np, X.reshape(24, 4)[5:6])
        wide = nl.broadcast_to(nl.expand_dims(rows_of(tile(X[:, 0]), 6, 2), 1), (2, 3, 4))
        same(nl.load(wide).np, np.repeat(X[[6, 2], 0][:, None], 3, 1))

    on_core(body)


def test_device_print_shows_the_values(capsys):
    def body():
        nl.device_print("all", tile(np.arange(4, dtype=F32).reshape(1, 4)))
        h = tile(np.arange(6, dtype=F32).reshape(3, 2), "hbm")
        nl.device_print("row", h.select(0, nisa.register_alloc(2)))

    on_core(body)
    assert capsys.readouterr().out == "all [[0. 1. 2. 3.]]\nrow [4. 5.]\n"
    with trace(shapes_only=True):
        on_core(lambda: nl.device_print("x", blank((2, 2))))
    assert "float32[2, 2]" in capsys.readouterr().out


def test_dtypes_that_nki_does_not_have():
    for dtype in (None, "float64", np.int64, 7):
        with pytest.raises(TypeError, match="NKI has no dtype"):
            on_core(lambda d=dtype: nl.ndarray((2, 2), d))


class Sizes(nl.NKIObject):
    rows: int
    columns: int = 3
    twice: int

    def __post_init__(self):
        self.twice = 2 * self.rows


@dataclasses.dataclass(frozen=True)
class Frozen(nl.NKIObject):
    rows: int = 1


def test_classes_of_a_kernel_need_no_init():
    assert (Sizes(4).columns, Sizes(rows=4).twice) == (3, 8)
    assert Frozen(rows=2).rows == 2
    with pytest.raises(TypeError, match="has the fields rows, columns, twice"):
        Sizes(row=1)
