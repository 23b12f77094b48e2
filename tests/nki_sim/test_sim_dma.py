"""Run-time addresses of DMA: scalar offsets, gather, scatter, out of bounds, skipping."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_helpers import blank, on_core, seeds, tile

from nki_sim import KernelError

F32 = np.float32
SKIP = nisa.oob_mode.skip


def table(rows=10, width=6, place="hbm"):
    return tile(np.arange(rows * width).reshape(rows, width).astype(F32), place)


def index(*values, dtype=np.int32):
    return tile(np.array(values, np.int64).astype(dtype).reshape(-1, 1))


def refuses(text, body):
    with pytest.raises(KernelError, match=text):
        on_core(body)


# ------------------------------------------------------------------ scalar offsets
@pytest.mark.parametrize("kind", ["tensor", "register"])
def test_scalar_offset_counts_rows_of_the_receiver(kind):
    def body():
        weights = tile(np.arange(3 * 4 * 5).reshape(3, 4, 5).astype(F32), "hbm")
        at = index(2) if kind == "tensor" else nisa.register_alloc(2)
        dst = blank((4, 5))
        nisa.dma_copy(dst, weights.ap([[5, 4], [1, 5]], scalar_offset=at))
        assert (dst.np == weights.np[2]).all()
        # After a reshape the multiplier is that of the new shape.
        flat = weights.reshape((12, 5))
        nisa.dma_copy(dst, flat.ap([[5, 4], [1, 5]], scalar_offset=at))
        assert (dst.np == weights.np.reshape(12, 5)[2:6]).all()
        row = blank((1, 5))
        nisa.dma_copy(row, weights.ap([[5, 1], [1, 5]], offset=5, scalar_offset=at, indirect_dim=1))
        assert (row.np == weights.np[0, 3]).all()
        picked = blank((4, 5))
        nisa.dma_copy(picked, weights.select(0, at))
        assert (picked.np == weights.np[2]).all()

    on_core(body)


def test_scalar_offset_on_chip():
    def body():
        t, at, dst = table(4, 6, "sbuf"), nisa.register_alloc(3), blank((4, 1))
        nisa.tensor_copy(dst, t.ap([[6, 4], [1, 1]], scalar_offset=at, indirect_dim=1))
        assert (dst.np[:, 0] == t.np[:, 3]).all()

    on_core(body)


def test_scalar_offset_counts_in_elements_of_the_new_dtype():
    def body():
        weights = tile(np.arange(3 * 4).reshape(3, 4).astype(F32), "hbm")
        dst = blank((1, 8), "int16")
        row = weights.ap([[8, 1], [1, 8]], scalar_offset=index(2), dtype=nl.int16)
        nisa.dma_copy(dst, row)
        assert (dst.np == weights.np[2:3].view(np.int16)).all()
        rows = weights.ap([[8, 2], [1, 8]], vector_offset=index(2, 0), dtype=nl.int16)
        both = blank((2, 8), "int16")
        nisa.dma_copy(both, rows)
        assert (both.np == weights.np[[2, 0]].view(np.int16)).all()

    on_core(body)


def test_a_run_time_offset_on_chip_stays_in_its_partition():
    def view(at):
        return table(4, 6, "sbuf").ap(
            [[6, 4], [1, 4]], scalar_offset=nisa.register_alloc(at), indirect_dim=1
        )

    on_core(lambda: nisa.tensor_copy(blank((4, 4)), view(2)))
    refuses("index 3 leaves", lambda: nisa.tensor_copy(blank((4, 4)), view(3)))
    on_core(lambda: nisa.dma_copy(blank((4, 4)), view(2)))
    # The first row already runs over into the next partition; so do all, and skip drops them.
    refuses("index 3 \\(row 0\\) .* out of bounds", lambda: nisa.dma_copy(blank((4, 4)), view(3)))

    def skip():
        dst = tile(np.full((4, 4), -1, F32))
        nisa.dma_copy(dst, view(3), oob_mode=SKIP)
        assert (dst.np == -1).all()

    on_core(skip)


def test_scalar_offset_out_of_bounds():
    def read(at, **kwargs):
        dst = tile(np.full((4, 6), -1, F32))
        source = table(8).ap([[6, 4], [1, 6]], scalar_offset=index(at))
        nisa.dma_copy(dst, source, **kwargs)
        return dst.np.copy()

    assert (on_core(lambda: read(4)) == np.arange(24, 48).reshape(4, 6)).all()
    refuses("run-time index 5 .* out of bounds", lambda: read(5))
    refuses("run-time index -1", lambda: read(-1))
    assert (on_core(lambda: read(8, oob_mode=SKIP)) == -1).all()  # "same expert, load nothing"
    partly = on_core(lambda: read(6, oob_mode=SKIP))
    assert (partly[:2] == np.arange(36, 48).reshape(2, 6)).all()
    assert (partly[2:] == -1).all()

    def compute():
        nisa.tensor_copy(blank((4, 1)), table(4, 6, "sbuf").ap(
            [[6, 4], [1, 1]], scalar_offset=nisa.register_alloc(40), indirect_dim=1))  # fmt: skip

    refuses("run-time index 40 leaves", compute)


def view_by(make):
    """A run-time view of a table by the offset that make() returns, through .ap and select."""
    nisa.dma_copy(blank((1, 6)), table().ap([[6, 1], [1, 6]], scalar_offset=make()))
    nisa.dma_copy(blank((1, 6)), table().select(0, make()))


@pytest.mark.parametrize("make", [
    lambda: index(2), lambda: index(2, dtype=np.uint32), lambda: nisa.register_alloc(2),
    lambda: tile(np.full((1, 1, 1), 2, np.int32)), lambda: index(0, 1, 2)[2:3],
])  # fmt: skip
def test_what_a_scalar_offset_may_be(make):
    on_core(lambda: view_by(make))


@pytest.mark.parametrize("make", [
    lambda: tile(np.zeros((1, 2), np.int32)), lambda: index(0, 1),
    lambda: index(2, dtype=np.int8), lambda: index(2, dtype=np.int16), lambda: index(2, dtype=F32),
    lambda: tile(np.zeros((1, 1), np.int32), "hbm"),
    lambda: tile(np.zeros((1, 1), np.int32), "psum"),
    lambda: nisa.engine.vector, lambda: "2",
])  # fmt: skip
def test_what_a_scalar_offset_may_not_be(make):
    refuses("an int32 or uint32 SBUF tensor of one element", lambda: view_by(make))


def test_a_compile_time_integer_is_no_scalar_offset():
    refuses("belongs into offset=",
            lambda: table().ap([[6, 1], [1, 6]], scalar_offset=2))  # fmt: skip


def test_the_address_of_an_offset_is_static():
    def body():
        at = index(1, 2).ap([[1, 1], [1, 1]], scalar_offset=nisa.register_alloc(0), indirect_dim=1)
        nisa.dma_copy(blank((1, 6)), table().ap([[6, 1], [1, 6]], scalar_offset=at))

    refuses("has a run-time address itself", body)


def test_a_scalar_offset_is_written_and_the_only_run_time_index():
    refuses("without a value",
            lambda: nisa.dma_copy(blank((4, 6)), table().ap(
                [[6, 4], [1, 6]], scalar_offset=nisa.register_alloc())))  # fmt: skip
    refuses("exclusive", lambda: table().ap([[6, 1], [1, 6]], scalar_offset=index(0),
                                            vector_offset=index(0)))  # fmt: skip
    refuses("one dynamic index", lambda: table().ap([[6, 1], [1, 6]], scalar_offset=index(0)).ap(
        [[6, 1], [1, 6]], scalar_offset=index(0)))  # fmt: skip


# ------------------------------------------------------------------ gather and scatter
@given(st.integers(1, 128), st.integers(0, 5), seeds)
def test_gather_rows_with_a_column_offset(count, column, seed):
    def body():
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 10, count)
        source, dst = table(), blank((count, 6 - column))
        pattern = [[6, count], [1, 6 - column]]
        nisa.dma_copy(dst, source.ap(pattern, offset=column, vector_offset=index(*ids)))
        assert (dst.np == source.np[ids, column:]).all()

    on_core(body)


def test_vector_select_is_a_gather():
    def body():
        source, dst = table(), blank((3, 6))
        nisa.dma_copy(dst, source.vector_select(0, index(4, 0, 9)))
        assert (dst.np == source.np[[4, 0, 9]]).all()
        narrow = blank((3, 2))
        nisa.dma_copy(narrow, source.vector_select(0, index(4, 0, 9))[:, 2:4])
        assert (narrow.np == source.np[[4, 0, 9], 2:4]).all()
        with pytest.raises(KernelError, match="dimension 0"):
            source.vector_select(0, index(4, 0, 9))[0:2]

    on_core(body)


@pytest.mark.parametrize(("bad", "dtype"), [(-1, np.int32), (10, np.int32), (2**32 - 1, np.uint32)])
def test_out_of_bounds_rows(bad, dtype):
    def gather(**kwargs):
        dst = tile(np.full((3, 6), -7, F32))
        source = table().ap([[6, 3], [1, 6]], vector_offset=index(2, bad, 5, dtype=dtype))
        nisa.dma_copy(dst, source, **kwargs)
        return dst.np.copy(), source.storage.data.view(F32).reshape(10, 6)

    refuses(f"run-time index {bad} \\(row 1\\) of src", gather)
    got, source = on_core(lambda: gather(oob_mode=SKIP))
    assert (got[[0, 2]] == source[[2, 5]]).all()
    assert (got[1] == -7).all()


def test_a_skipped_row_leaves_an_unwritten_destination_unwritten():
    def body():
        dst = blank((3, 6))
        source = table().ap([[6, 3], [1, 6]], vector_offset=index(2, -1, 5))
        nisa.dma_copy(dst, source, oob_mode=SKIP)
        nisa.tensor_copy(blank((3, 6)), dst)

    refuses(r"'dst' float32\[3, 6\] in sbuf is read, but element \[1, 0\] was never written", body)


def test_scatter_and_scatter_add():
    def body():
        target, rows = table(), tile(np.full((3, 6), 100, F32))
        before = target.np.copy()
        where = target.ap([[6, 3], [1, 6]], vector_offset=index(7, -1, 0))
        nisa.dma_copy(where, rows, oob_mode=SKIP)
        expected = before.copy()
        expected[[7, 0]] = 100
        assert (target.np == expected).all()
        nisa.dma_compute(where, [where, rows], nl.add, oob_mode=SKIP)
        expected[[7, 0]] += 100
        assert (target.np == expected).all()
        mine = tile(np.ones((3, 6), F32))
        nisa.dma_compute(mine, [mine, where], nl.add, oob_mode=SKIP)
        assert (mine.np == np.where([[True], [False], [True]], expected[[7, 0, 0]] + 1, 1)).all()

    on_core(body)


def test_scatter_marks_only_its_rows_as_written():
    def body():
        target = blank((10, 6), place="hbm")
        nisa.dma_copy(target.ap([[6, 2], [1, 6]], vector_offset=index(3, 4)), table(2, 6, "sbuf"))
        nisa.dma_copy(blank((2, 6)), target[3:5])
        nisa.dma_copy(blank((2, 6)), target.ap([[6, 2], [1, 6]], vector_offset=index(3, 5)))

    refuses(r"gathers element \[5, 0\] of 'target' float32\[10, 6\]", body)


def test_a_gather_names_the_first_element_that_nothing_wrote():
    def source():
        target = blank((10, 6), place="hbm")
        nisa.dma_copy(target[2:5], table(3, 6, "sbuf"))
        nisa.dma_copy(target[7:8, 0:4], table(1, 4, "sbuf"))
        return target

    def gather(*rows, column=0, dtype=None, oob_mode=nisa.oob_mode.error):
        target, item = source(), 2 if dtype else 1
        width = item * (6 - column)
        view = target.ap([[item * 6, len(rows)], [1, width]], offset=item * column,
                         vector_offset=index(*rows), dtype=dtype)  # fmt: skip
        dst = blank((len(rows), width), dtype or "float32")
        nisa.dma_copy(dst, view, oob_mode=oob_mode)

    on_core(lambda: gather(4, 2, 3))
    refuses(r"gathers element \[9, 0\] of 'target'", lambda: gather(4, 9, 0))
    refuses(r"gathers element \[7, 4\] of 'target'", lambda: gather(4, 7, 0))
    refuses(r"gathers element \[7, 4\] of 'target'", lambda: gather(4, 7, dtype="int16"))
    refuses(r"gathers element \[0, 5\] of 'target'", lambda: gather(4, 0, 1, column=5))
    refuses(r"gathers element \[1, 0\] of 'nothing'", lambda: nisa.dma_copy(
        blank((1, 6)), nl.ndarray((2, 6), nl.float32, nl.shared_hbm, name="nothing").ap(
            [[6, 1], [1, 6]], vector_offset=index(1))))  # fmt: skip
    # Rows that are skipped are not read.
    on_core(lambda: gather(3, -1, oob_mode=SKIP))
    on_core(lambda: nisa.dma_copy(blank((1, 6)), blank((2, 6), place="hbm").ap(
        [[6, 1], [1, 6]], vector_offset=index(-1)), oob_mode=SKIP))  # fmt: skip


def test_where_a_vector_of_indices_may_be_used():
    on_chip = lambda: table(place="sbuf").ap([[6, 3], [1, 6]], vector_offset=index(1, 2, 3))  # noqa: E731
    refuses("selects rows", on_chip)
    refuses("selects rows", lambda: table().ap([[6, 3], [1, 6]], vector_offset=index(1, 2, 3),
                                               indirect_dim=1))  # fmt: skip
    refuses("int32 or uint32 SBUF", lambda: table().ap([[6, 3], [1, 6]], vector_offset=tile(
        np.zeros((3, 1), np.int16))))  # fmt: skip
    refuses("number of row indices",
            lambda: table().ap([[6, 4], [1, 6]], vector_offset=index(1, 2, 3)))  # fmt: skip
    refuses("axes", lambda: nisa.dma_transpose(blank((6, 10)), table(), axes=(0, 1)))


# ------------------------------------------------------------------ destinations
@pytest.mark.parametrize("pattern", [
    [[0, 4], [1, 8]], [[8, 4], [0, 8]], [[7, 4], [1, 8]], [[1, 4], [2, 4], [1, 2]],
    [[4, 8], [-2, 4]],
])  # fmt: skip
def test_a_destination_in_hbm_holds_each_element_once(pattern):
    def body():
        count = int(np.prod([n for _, n in pattern]))
        out = blank((8, 8), place="hbm").ap(pattern, offset=8)
        nisa.dma_copy(out, tile(np.ones((1, count), F32)))

    refuses("operand dst .* holds an element more than once", body)


@pytest.mark.parametrize("pattern", [
    [[8, 4], [1, 8]], [[3, 2], [2, 3]], [[1, 8], [8, 4]], [[-8, 2], [1, 8]], [[0, 1], [1, 8]],
])  # fmt: skip
def test_a_destination_in_hbm_may_have_any_pattern_without_overlap(pattern):
    """[[3, 2], [2, 3]] interleaves 0 2 4 with 3 5 7."""
    shape = [n for _, n in pattern]
    values = np.arange(np.prod(shape)).reshape(shape).astype(F32)

    def body():
        out = blank((8, 8), place="hbm").ap(pattern, offset=8)
        nisa.dma_copy(out, tile(values.reshape(1, -1)))
        assert (out.np == values).all()

    on_core(body)


def test_a_destination_on_chip_holds_each_element_once():
    def write(inner):
        view = blank((4, 12)).ap([[12, 4], *inner])
        nisa.memset(view, 1.0)

    on_core(lambda: write([[2, 6], [1, 2]]))
    refuses("holds an element more than once", lambda: write([[1, 6], [1, 6]]))
    refuses("holds an element more than once", lambda: write([[0, 2], [1, 6]]))


def test_a_scatter_overlaps_neither_inside_a_row():
    def scatter(inner):
        rows = table().ap([[6, 2], *inner], vector_offset=index(1, 4))
        nisa.dma_copy(rows, tile(np.ones((2, 6), F32)))

    on_core(lambda: scatter([[1, 6]]))
    refuses("holds an element more than once", lambda: scatter([[1, 3], [1, 2]]))


# ------------------------------------------------------------------ layouts
def test_partition_broadcast_by_stride_zero():
    def body():
        dst = blank((128, 6))
        nisa.dma_copy(dst, table(1, 6).ap([[0, 128], [1, 6]]))
        assert (dst.np == np.arange(6)).all()

    on_core(body)


def test_shapes_may_differ_elements_go_in_row_major_order():
    def body():
        dst, source = blank((5, 12)), table(10, 6)
        nisa.dma_copy(dst, source)
        assert (dst.np == source.np.reshape(5, 12)).all()

    on_core(body)


@given(st.sampled_from([16, 48, 128]), st.integers(1, 128), seeds)
def test_dma_transpose_of_gathered_rows(count, width, seed):
    def body():
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 200, count)
        source = tile(rng.integers(-999, 999, (200, width)).astype(np.int16), "hbm")
        rows = source.ap([[width, count], [1, width]], vector_offset=index(*ids, dtype=np.uint32))
        dst = blank((width, count), "int16")
        nisa.dma_transpose(dst, rows)
        assert (dst.np == source.np[ids].T).all()

    on_core(body)


def test_dma_transpose_rank_before_and_since_0_4():
    def loose():
        nisa.dma_transpose(blank((6, 10, 1)), table())

    on_core(loose, version="0.3")
    refuses("transposed shape", loose)


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_hwdge_transpose_shapes_were_relaxed_in_0_6(version):
    def body():
        source = tile(np.zeros((10, 6), np.int16), "hbm")
        nisa.dma_transpose(blank((6, 10), "int16"), source, dge_mode=nisa.dge_mode.hwdge)

    if version == "0.6":
        on_core(body, version=version)
    else:
        with pytest.raises(KernelError, match="and before"):
            on_core(body, version=version)
