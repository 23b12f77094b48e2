"""Views: what they show, that they alias, and the rules that the documentation states."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_helpers import blank, on_core, refuses, tile

from nki_sim import KernelError
from nki_sim.tensors import regroup, row_major


def numbers(*shape, dtype=np.float32, place="sbuf"):
    return tile(np.arange(np.prod(shape)).reshape(shape).astype(dtype), place)


# ------------------------------------------------------------------ indexing
@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ((0, 0, 10), (1, 1)),
        ((slice(None), 0), (64, 64)),
        ((slice(None), 0, 10), (64, 1)),
        ((0, ...), (1, 64, 64)),
        ((slice(None), slice(None), slice(None, None, 2)), (64, 64, 32)),
        ((...,), (64, 64, 64)),
        ((slice(0, 8), -1), (8, 64)),
        ((slice(None), nl.ds(3, 5)), (64, 5, 64)),
    ],
)
def test_on_chip_indexing_keeps_two_dimensions(key, shape):
    def body():
        t = numbers(64, 64, 64)
        view = t[key]
        assert view.shape == shape
        assert (view.np == t.np[key].reshape(shape)).all()

    on_core(body)


@pytest.mark.parametrize(("key", "shape"), [((0,), (5, 6)), ((0, 1), (6,)), ((0, 1, 2), (1,))])
def test_hbm_indexing_drops_dimensions_down_to_one(key, shape):
    def body():
        view = numbers(4, 5, 6, place="hbm")[key]
        assert view.shape == shape

    on_core(body)


@given(st.data())
def test_chained_slices_are_numpy_slices(data):
    def body():
        t = numbers(16, 12, 10)
        view, expected = t, t.np
        for _ in range(2):
            key = []
            for n in expected.shape:
                start = data.draw(st.integers(0, n - 1))
                key.append(slice(start, data.draw(st.integers(start + 1, n)),
                                 data.draw(st.integers(1, 3))))  # fmt: skip
            view, expected = view[tuple(key)], expected[tuple(key)]
        assert (view.np == expected).all()
        assert view.np.base is not None
        view.np[...] = -1
        assert (expected == -1).all()

    on_core(body)


@pytest.mark.parametrize("key", [slice(0, 65), slice(3, 3), slice(5, 2), slice(0, 4, 0)])
def test_slices_are_not_clipped(key):
    refuses("slice .* on dimension 1", lambda: numbers(4, 64)[:, key])


@pytest.mark.parametrize("key", [64, -65])
def test_index_out_of_bounds(key):
    refuses("out of bounds on dimension 1", lambda: numbers(4, 64)[:, key])


def test_other_keys():
    refuses("not a compile-time integer", lambda: numbers(4, 64)[:, 1.0])
    refuses("3 indices for", lambda: numbers(4, 64)[0, 0, 0])
    refuses("assignment to elements", lambda: numbers(4, 64).__setitem__(0, 1))


# ------------------------------------------------------------------ reshaping
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_regroup_agrees_with_numpy(shape, data):
    """Wherever numpy reshapes without a copy, regroup gives strides that show the same."""
    array = np.arange(np.prod(shape)).reshape(shape)
    if len(shape) > 1:
        order = data.draw(st.permutations(range(len(shape))))
        array = array.transpose(order)
    size = array.size
    factors = [d for d in range(1, size + 1) if size % d == 0]
    first = data.draw(st.sampled_from(factors))
    new = (first, size // first)
    strides = regroup(array.shape, tuple(s // 8 for s in array.strides), new)
    copied = not np.shares_memory(array.reshape(new), array)
    assert (strides is None) == copied
    if strides is not None:
        view = np.lib.stride_tricks.as_strided(array, new, [s * 8 for s in strides])
        assert (view == array.reshape(new)).all()


def test_reshape_and_its_rules():
    def body():
        t = numbers(4, 6, 8)
        assert (t.reshape((4, 48)).np == t.np.reshape(4, 48)).all()
        assert (t.reshape((4, 2, 3, 8)).np == t.np.reshape(4, 2, 3, 8)).all()
        assert t[:, 0:3].reshape((4, 24)).shape == (4, 24)

    on_core(body)
    refuses("number of elements", lambda: numbers(4, 6).reshape((4, 7)))
    refuses("partition dimension", lambda: numbers(4, 6).reshape((2, 12)))
    refuses("a view cannot copy", lambda: numbers(4, 6, 8)[:, :, 0:4].reshape((4, 24)))
    on_core(lambda: numbers(4, 6, place="hbm").reshape((2, 12)))


def test_view_methods_show_what_numpy_shows():
    def body():
        t = numbers(4, 6, 8)
        a = t.np
        assert (t.permute((0, 2, 1)).np == a.transpose(0, 2, 1)).all()
        assert (t.reshape_dim(1, (2, -1)).np == a.reshape(4, 2, 3, 8)).all()
        assert (t.flatten_dims(1, 2).np == a.reshape(4, 48)).all()
        assert (t.expand_dim(1).np == a[:, None]).all()
        assert (t.expand_dim(1).squeeze_dim(1).np == a).all()
        assert (t.slice(1, 1, 5, 2).np == a[:, 1:5:2]).all()
        assert (t.select(1, 3).np == a[:, 3]).all()
        assert (t.expand_dim(1).broadcast(1, 5).np == np.repeat(a[:, None], 5, 1)).all()
        split = t.rearrange(("b", ("h", "w"), "c"), ("b", "w", ("c", "h")), {"h": 2})
        assert split.shape == (4, 3, 16)

    with pytest.raises(KernelError, match="contiguous"):
        on_core(body)  # merging c and h needs a copy, which a view cannot make

    def fine():
        t = numbers(4, 24)
        turned = t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
        assert (turned.np == t.np.reshape(4, 4, 6).transpose(0, 2, 1)).all()
        assert turned.get_pattern() == [[24, 4], [1, 6], [6, 4]]
        assert not turned.is_contiguous()
        assert t[:, 3:9].is_contiguous()

    on_core(fine)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.permute((1, 0, 2)),
        lambda t: t.reshape_dim(0, (2, 2)),
        lambda t: t.flatten_dims(0, 1),
        lambda t: t.expand_dim(0),
        lambda t: t[0:1].squeeze_dim(0),
        lambda t: t[0:1].broadcast(0, 4),
        lambda t: t.select(0, 1),
        # The same dimension, counted from the end.
        lambda t: t.reshape_dim(-3, (2, 2)),
        lambda t: t.flatten_dims(-3, -2),
        lambda t: t.expand_dim(-4),
        lambda t: t[0:1].squeeze_dim(-3),
        lambda t: t[0:1].broadcast(-3, 4),
        lambda t: t.select(-3, 1),
    ],
)
def test_no_view_moves_the_partition(make):
    refuses("partition dimension cannot be moved", lambda: make(numbers(4, 6, 8)))
    on_core(lambda: make(numbers(4, 6, 8, place="hbm")))


def test_rows_by_indices_stay_where_they_are():
    def rows():
        index = tile(np.zeros((16, 1), np.int32))
        return numbers(4, 6, 8, place="hbm").vector_select(0, index)

    on_core(lambda: rows().flatten_dims(1, 2))
    refuses("partition dimension cannot be moved", lambda: rows().flatten_dims(0, 1))
    refuses("partition dimension cannot be moved", lambda: rows().permute((1, 0, 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.select(-1, 3), lambda t: t.slice(-1, 2, 5), lambda t: t.expand_dim(-1),
        lambda t: t[:, 0:1].broadcast(-2, 5), lambda t: t.flatten_dims(1, -1),
        lambda t: t.reshape_dim(-1, (2, -1)), lambda t: t.expand_dim(3).squeeze_dim(-1),
    ],
)  # fmt: skip
def test_dimensions_may_count_from_the_end(make):
    expected = {(4, 6): "...3", (4, 6, 3): "...2:5", (4, 6, 8, 1): "all", (4, 5, 8): "rows",
                (4, 48): "all", (4, 6, 2, 4): "all", (4, 6, 8): "all"}  # fmt: skip

    def body():
        t = numbers(4, 6, 8)
        a, view = t.np, make(t)
        shown = {"...3": a[..., 3], "...2:5": a[..., 2:5], "rows": np.repeat(a[:, 0:1], 5, 1)}
        want = shown.get(expected[view.shape], a)
        assert (view.np == want.reshape(view.shape)).all()

    on_core(body)


@pytest.mark.parametrize("dim", [3, -4, 1.0, True, None])
@pytest.mark.parametrize(
    "call",
    [
        lambda t, d: t.select(d, 0), lambda t, d: t.slice(d, 0, 1),
        lambda t, d: t.broadcast(d, 2), lambda t, d: t.squeeze_dim(d),
        lambda t, d: t.expand_dim(d if d not in (3, -4) else d * 2),
        lambda t, d: t.reshape_dim(d, (1, 1)), lambda t, d: t.flatten_dims(1, d),
        lambda t, d: t.flatten_dims(d, 2),
        lambda t, d: t.ap([[1, 1], [1, 1]], scalar_offset=nisa.register_alloc(0), indirect_dim=d),
    ],
)  # fmt: skip
def test_dimensions_that_do_not_exist(call, dim):
    refuses("a dimension is 0 to", lambda: call(numbers(4, 6, 8, place="hbm"), dim))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.select(1, 0), lambda t: t.select(1, nisa.register_alloc(0)),
        lambda t: t.squeeze_dim(1), lambda t: t.reshape((4,)), lambda t: t.ap([[1, 4]]),
        lambda t: t.flatten_dims(1, 1).select(1, 0),
    ],
)  # fmt: skip
def test_on_chip_views_keep_a_free_dimension(make):
    refuses("a partition and at least one free dimension", lambda: make(numbers(4, 1)))
    on_core(lambda: make(numbers(4, 1, place="hbm")))
    on_core(lambda: numbers(4, 1, 1).select(1, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.broadcast(1, 0), lambda t: t.broadcast(1, -1), lambda t: t.broadcast(1, 2.0),
        lambda t: t.reshape((4, -1, -1)), lambda t: t.reshape((4, 1.0)),
        lambda t: t.reshape((-4, -1)),
        lambda t: t.reshape_dim(1, (0, -1)), lambda t: t.reshape_dim(1, (-1, -1)),
        lambda t: t.reshape_dim(1, (-2, -1)), lambda t: t.reshape_dim(1, (True, 1)),
        lambda t: t.rearrange(("a", ("b", "c")), ("a", "b", "c"), {"b": 0}),
    ],
)  # fmt: skip
def test_sizes_are_at_least_one(make):
    refuses("sizes are integers ≥ 1", lambda: make(numbers(4, 1)))
    on_core(lambda: numbers(4, 1).broadcast(1, 1).reshape((4, 1)).reshape_dim(1, (1, -1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.slice(1, 0, 2), lambda t: t.select(1, 0), lambda t: t.permute((0, 2, 1)),
        lambda t: t.broadcast(1, 2), lambda t: t.expand_dim(1), lambda t: t.squeeze_dim(1),
        lambda t: t.reshape_dim(1, (2, 3)), lambda t: t.flatten_dims(1, 2),
        lambda t: t.rearrange(("a", "b", "c"), ("a", "c", "b")),
    ],
)  # fmt: skip
def test_view_methods_came_with_0_5(make):
    refuses("added in NKI 0.5", lambda: make(numbers(4, 6, 8)), version="0.4")


def test_other_rules_of_view_methods():
    refuses("must have size 1", lambda: numbers(4, 6).broadcast(1, 8))
    refuses("must have size 1", lambda: numbers(4, 6).squeeze_dim(1))
    refuses("name every dimension once", lambda: numbers(4, 6).permute((0, 0)))
    refuses("contiguous in memory", lambda: numbers(4, 6, 8)[:, 0:3, 0:4].flatten_dims(1, 2))
    refuses("names differ", lambda: numbers(4, 6).rearrange(("a", "b"), ("a", "c")))
    refuses("product must equal", lambda: numbers(4, 6).reshape_dim(1, (4, 2)))
    refuses("product must equal", lambda: numbers(4, 6).reshape_dim(1, (4, -1)))
    refuses("first dimension comes before", lambda: numbers(4, 6, 8).flatten_dims(2, 1))
    refuses("names every dimension", lambda: numbers(4, 6, 8).rearrange(("a", "b"), ("a", "b")))
    refuses("0 <= index < 6", lambda: numbers(4, 6, 8).select(1, -1))
    refuses("out of bounds", lambda: numbers(4, 6, 8).select(1, 6))
    refuses("compile-time integer", lambda: numbers(4, 6, 8).select(1, 1.0))
    refuses("counts from the front", lambda: numbers(4, 6).slice(1, -3, 6))


# ------------------------------------------------------------------ bits
def test_view_reinterprets_bits():
    def body():
        t = numbers(4, 6)
        assert (t.view(nl.uint8).np == t.np.view(np.uint8)).all()
        assert (t.view(nl.uint8).view(nl.float32).np == t.np).all()
        assert (t[:, 2:4].view(nl.int16).np == t.np[:, 2:4].copy().view(np.int16)).all()
        assert t.view(nl.int32).shape == (4, 6)

    on_core(body)
    refuses("last dimension must be contiguous", lambda: numbers(4, 6)[:, ::2].view(nl.uint8))
    refuses("multiples of the new item", lambda: numbers(4, 6, dtype=np.uint8).view(nl.float32))


# ------------------------------------------------------------------ access patterns
@given(st.data())
def test_ap_is_as_strided(data):
    def body():
        t = numbers(8, 5, 12)
        counts = [data.draw(st.integers(1, 4)) for _ in range(2)]
        strides = [data.draw(st.integers(0, 6)) for _ in range(2)]
        column, start = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 4))
        parts = data.draw(st.integers(1, 4))
        pattern = [[60, parts], *[[s, n] for s, n in zip(strides, counts, strict=True)]]
        view = t.ap(pattern, offset=start * 60 + column)
        flat = np.arange(480)
        expected = np.lib.stride_tricks.as_strided(
            flat[start * 60 + column :], (parts, *counts), [60 * 8, *[s * 8 for s in strides]]
        )
        assert (view.np == expected).all()

    on_core(body)


def test_ap_ignores_the_view_and_chains_to_the_last():
    def body():
        t = numbers(4, 12)
        first = t.ap([[12, 4], [1, 6]])
        assert (t[:, 0:4].ap([[12, 4], [1, 6]]).np == first.np).all()
        assert (t.ap([[12, 2], [3, 2]]).ap([[12, 4], [1, 6]]).np == first.np).all()
        halves = t.ap([[24, 4], [1, 24]], dtype=nl.bfloat16)
        assert (halves.np.view(np.uint16) == t.np.view(np.uint16)).all()

    on_core(body)


@pytest.mark.parametrize(
    ("pattern", "offset", "text"),
    [
        ([[6, 8], [1, 6]], 0, "partitions cannot be skipped"),
        ([[12, 4], [1, 13]], 0, "leaves its partition"),
        ([[12, 4], [1, 12]], 1, "leaves its partition"),
        ([[12, 5], [1, 12]], 0, "inside the storage"),
        ([[12, 4], [1, 12]], 12, "inside the storage"),
        ([[12, 0], [1, 12]], 0, "count below 1"),
    ],
)
def test_static_patterns_stay_inside(pattern, offset, text):
    refuses(text, lambda: numbers(4, 12).ap(pattern, offset=offset))
    on_core(lambda: numbers(4, 12).ap([[12, 4], [1, 12]]))


@pytest.mark.parametrize("make", [lambda t: t.view(nl.int16), lambda t: t.view(nl.int32),
                                  lambda t: t.ap([[6, 1], [1, 6]])])  # fmt: skip
def test_views_of_bytes_come_before_the_run_time_index(make):
    """After it they would forget the index, and show other rows than those asked for."""

    def source():
        return numbers(10, 6, place="hbm")

    def rows():
        return tile(np.array([[4], [0], [9]], np.int32))

    on_core(lambda: make(source()))
    for indirect in (
        lambda: source().vector_select(0, rows()),
        lambda: source().ap([[6, 3], [1, 6]], vector_offset=rows()),
        lambda: source().ap([[6, 1], [1, 6]], scalar_offset=nisa.register_alloc(1)),
        lambda: source().select(0, nisa.register_alloc(1)),
    ):
        refuses("not supported after select, vector_select or .ap", lambda i=indirect: make(i()))


def test_a_run_time_index_counts_elements_of_the_new_dtype():
    """4 × 6 float32 are 4 × 12 bfloat16: index 2 starts at element 2 · 12, column 1 at 25."""

    def body():
        t = numbers(4, 6, place="hbm")
        view = t.ap([[12, 1], [1, 4]], offset=1, dtype=nl.bfloat16,
                    scalar_offset=nisa.register_alloc(2))  # fmt: skip
        row = blank((1, 4), "bfloat16")
        nisa.dma_copy(row, view)
        assert (row.np.view(np.uint16) == t.np[2].view(np.uint16)[1:5]).all()
        wide = numbers(4, 6, dtype=np.int16, place="hbm")
        view = wide.ap([[3, 1], [1, 3]], dtype=nl.int32, scalar_offset=nisa.register_alloc(2))
        row = blank((1, 3), "int32")
        nisa.dma_copy(row, view)
        assert (row.np == wide.np[2].view(np.int32)).all()

    on_core(body)


def test_ap_patterns_are_pairs():
    refuses("one pair a dimension", lambda: numbers(4, 12).ap([12, 4]))
    refuses("one pair a dimension", lambda: numbers(4, 12).ap([[12, 4], [1]]))


def test_ap_on_a_sliced_receiver_is_refused_because_the_pages_disagree():
    refuses("starts at element 3", lambda: numbers(4, 12)[:, 3:].ap([[12, 4], [1, 2]]))


@pytest.mark.parametrize(("stride", "fits"), [(32_767, True), (32_768, False)])
def test_strides_on_chip_are_16_bit_numbers(stride, fits):
    def body():
        t = blank((1, 2 * stride), "uint8")
        view = t.ap([[2 * stride, 1], [stride, 2]])
        nisa.memset(view, 1)

    if fits:
        on_core(body)
    else:
        refuses("a stride on chip is at most 32,767 elements", body)


def test_hbm_patterns_are_free():
    def body():
        t = numbers(4, 12, place="hbm")
        assert (t.ap([[1, 12], [12, 4]]).np == t.np.T).all()
        refuses_hbm = [[12, 5], [1, 12]]
        with pytest.raises(KernelError, match="inside the storage"):
            t.ap(refuses_hbm)

    on_core(body)


def test_a_tensor_has_no_truth_value():
    with pytest.raises(TypeError, match="no value at compile time"):
        on_core(lambda: bool(numbers(1, 1)))


@pytest.mark.parametrize(
    "compare", [lambda t: t == 0, lambda t: t != 0, lambda t: t == t, lambda t: t in (0, 1)]
)
def test_a_tensor_is_compared_with_none_only(compare):
    with pytest.raises(TypeError, match="compare it with None only"):
        on_core(lambda: compare(numbers(1, 1)))

    def body():
        t = numbers(1, 1)
        assert (t == None) is False  # noqa: E711
        assert t != None  # noqa: E711
        assert t in [t]  # the same object, which Python finds without ==
        assert {t: 1}[t] == 1

    on_core(body)


def test_shapes_and_buffers():
    refuses("not a tuple of positive integers", lambda: blank((4, 0)))
    refuses("a partition and a free dimension", lambda: blank((4,)))
    with pytest.raises(TypeError, match="buffer must be"):
        on_core(lambda: nl.ndarray((4, 4), nl.float32, buffer="sbuf"))
    with pytest.raises(TypeError, match="NKI has no dtype float64"):
        on_core(lambda: nl.ndarray((4, 4), np.float64))
    assert row_major((2, 3, 4)) == (12, 4, 1)
