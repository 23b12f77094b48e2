"""Helpers of nki.language: each a fresh tile and one or two instructions."""

import dataclasses

import nki.language as nl
import numpy as np
import pytest
from sim_helpers import on_core, same, tile

from nki_sim import KernelError

F32 = np.float32
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
    ],
)
def test_refusals(text, use):
    with pytest.raises(KernelError, match=text):
        on_core(lambda: use(tile(X)))


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
