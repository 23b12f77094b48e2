"""Traces: counts against numbers worked out by hand."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch
from sim_helpers import blank, on_core, tile

from nki_sim import KernelError, arch, simulate, trace

F32 = np.float32


def matmul(x_KM, y_KN):
    """One tile of a product, out in bfloat16."""
    K, M = x_KM.shape
    _, N = y_KN.shape
    out_MN = nl.ndarray((M, N), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    x = nl.ndarray((K, M), dtype=x_KM.dtype, buffer=nl.sbuf)
    y = nl.ndarray((K, N), dtype=y_KN.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=x_KM)
    nisa.dma_copy(dst=y, src=y_KN)
    acc = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=x, moving=y, accumulate=False)
    result = nl.ndarray((M, N), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=acc)
    nisa.dma_copy(dst=out_MN, src=result)
    return out_MN


def traced(K, M, N, dtype="float32", **kwargs):
    x, y = (torch.zeros(K, n, dtype=getattr(torch, dtype)) for n in (M, N))
    with trace(**kwargs) as t:
        simulate(matmul)(x, y)
    return t


def test_numbers_of_a_matmul():
    t = traced(128, 64, 512)
    assert [r.instruction for r in t.records] == [
        "dma_copy", "dma_copy", "nc_matmul", "tensor_copy", "dma_copy"]  # fmt: skip
    assert t.count("dma") == 3
    assert t.count(instruction="nc_matmul") == 1
    assert t.hbm_read() == {"x_KM": 128 * 64 * 4, "y_KN": 128 * 512 * 4}
    assert t.hbm_write() == {"out_MN": 64 * 512 * 2}
    assert t.hbm_bytes() == 128 * 64 * 4 + 128 * 512 * 4 + 64 * 512 * 2
    assert t.macs() == 128 * 64 * 512
    assert t.array_utilization() == 0.5  # 64 of 128 columns
    assert t.peak_sbuf == 64 * 4 + 512 * 4  # the result comes when the inputs are used up
    assert t.peak_psum == 2048
    assert t.pieces() == {64 * 4: 128 * 64 * 4, 512 * 2: 64 * 512 * 2, 512 * 4: 128 * 512 * 4}
    assert t.pieces("out_MN") == {1024: 65_536}
    assert t.descriptors() == 128 + 128 + 64
    record = t.records[2]
    assert record.engine == "tensor"
    assert record.shapes["moving"] == ("float32", (128, 512), "sbuf")
    assert record.cycles == 4 * 512
    assert record.line[0].endswith("test_sim_trace.py")


def test_a_narrow_moving_tile_still_occupies_64_columns():
    t = traced(128, 128, 16, "bfloat16")
    assert t.array_utilization() == 16 / 64
    assert t.records[2].cycles == 64


def test_transposes_occupy_the_array_without_useful_work():
    def body():
        nisa.nc_transpose(blank((128, 128), place="psum"), tile(np.zeros((128, 128), F32)))
        x = tile(np.zeros((128, 128), F32))
        nisa.nc_matmul(blank((128, 128), place="psum"), x, x)

    with trace() as t:
        on_core(body)
    assert t.array_utilization() == 1
    assert t.array_utilization(transposes=True) == 0.5


def test_roofline_divides_work_by_documented_rates():
    t = traced(128, 128, 512)
    row = {r["engine"]: r["at least µs"] for r in t.roofline()}
    assert row["tensor"] == round(4 * 512 / 2.4e9 * 1e6, 2)
    assert row["vector"] == round(512 * 128 / 256 / 0.96e9 * 1e6, 2)
    assert row["HBM"] == round(t.hbm_bytes() / 362e9 * 1e6, 2)
    assert "not a prediction" in str(t.roofline())


def test_cycles_follow_the_engine_that_runs():
    def body():
        wide, narrow = tile(np.zeros((128, 512), F32)), tile(np.zeros((128, 512), np.int16))
        for engine in (nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd):
            nisa.tensor_copy(wide, wide, engine=engine)
        nisa.tensor_copy(narrow, narrow)

    with trace() as t:
        on_core(body)
    # 512 · 128 elements over 256, 128 or 512 lanes; GpSimd has no documented rate.
    assert [r.cycles for r in t.records] == [256, 512, 0, 128]
    assert [r.engine for r in t.records] == ["vector", "scalar", "gpsimd", "vector"]


def test_registers_are_instructions_too():
    def body():
        r, cell = nisa.register_alloc(), blank((1, 1), "int32")
        source, target = tile(np.ones((1, 1), np.int32), "hbm"), blank((1, 1), "int16", "hbm")
        nisa.register_move(r, 3)
        nisa.register_load(r, source)
        nisa.register_store(cell, r)
        nisa.register_store(target, r)

    with trace() as t:
        on_core(body)
    names = ["register_move", "register_load", "register_store", "register_store"]
    assert [(r.instruction, r.engine) for r in t.records] == [(n, "sync") for n in names]
    assert t.hbm_read() == {"source": 4}
    assert t.hbm_write() == {"target": 2}
    assert t.records[2].sbuf == 4  # the cell is live while it is written
    assert t.pieces() == {}  # no DMA
    with trace(shapes_only=True) as t:
        on_core(body)
    assert t.hbm_write() == {"target": 2}


def test_a_register_does_not_hide_what_a_trace_does_not_compute():
    def body():
        cell = blank((1, 1), "int32")
        nisa.tensor_copy(cell, tile(np.ones((1, 1), F32)))
        nisa.register_load(nisa.register_alloc(), cell)

    on_core(body)
    with trace(shapes_only=True), pytest.raises(KernelError, match="does not compute"):
        on_core(body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_a_vec_does_not_slow_a_tile_down(dtype):
    """The bound is that of the tiles: tensor_scalar's operand is float32 whatever they are."""

    def body():
        x, dst = tile(np.ones((128, 512)), dtype=dtype), blank((128, 512), dtype)
        vec, rows = tile(np.ones((128, 1), F32)), blank((128, 1))
        nisa.tensor_scalar(dst, x, nl.multiply, 2.0)
        nisa.tensor_scalar(dst, x, nl.multiply, vec)
        nisa.tensor_reduce(rows, nl.add, x, 1)
        nisa.tensor_copy(blank((128, 512)), x)  # here float32 is as long as the tile

    with trace() as t:
        on_core(body)
    narrow = 256 if dtype == "float32" else 128
    assert [r.cycles for r in t.records] == [narrow, narrow, narrow, 256]
    work = next(r for r in t.roofline() if r["engine"] == "vector")
    assert work["work of the busiest core"] == 3 * narrow + 256


def test_roofline_of_each_engine():
    """One instruction an engine, each against the documented peak rate worked out by hand."""

    def body():
        wide = tile(np.zeros((128, 4096), F32))
        nisa.tensor_copy(wide, wide, engine=nisa.engine.scalar)
        nisa.tensor_copy(wide, wide, engine=nisa.engine.vector)
        nisa.dma_copy(wide, tile(np.zeros((128, 4096), F32), "hbm"))
        nisa.dma_copy(wide, wide)
        x = tile(np.zeros((128, 128), F32))
        nisa.nc_matmul(blank((128, 128), place="psum"), x, x)

    with trace() as t:
        on_core(body)
    row = {r["engine"]: r["at least µs"] for r in t.roofline()}
    size = 128 * 4096 * 4
    assert row == {
        "tensor": round(4 * 128 / 2.4e3, 2),
        "vector": round(4096 / 2 / 0.96e3, 2),
        "scalar": round(4096 / 1.2e3, 2),
        "dma": round(2 * size / 368e3, 2),
        "HBM": round(size / 362e3, 2),
    }
    assert "dma needs at least" in t.roofline().note


def test_a_transpose_moves_single_elements():
    def body():
        nisa.dma_transpose(blank((128, 16), "int16"), tile(np.ones((16, 128), np.int16), "hbm"))
        nisa.dma_transpose(blank((8, 4)), tile(np.ones((4, 8), F32)))

    with trace() as t:
        on_core(body)
    assert [(r.piece_bytes, r.pieces) for r in t.records] == [(2, 2048), (4, 32)]
    assert t.pieces() == {2: 4096}


def test_tensors_of_one_name_are_counted_apart():
    def fill(value):
        scratch = nl.ndarray((2, 4), nl.float32, buffer=nl.hbm)
        t = nl.ndarray((2, 4), nl.float32, buffer=nl.sbuf)
        nisa.memset(t, value)
        nisa.dma_copy(scratch, t)

    def kernel(scratch):
        fill(1.0)
        fill(2.0)
        nl.load(scratch)

    with trace() as t:
        simulate(kernel)(np.ones((2, 4), F32))
        simulate(kernel)(np.ones((2, 4), F32))  # the names of a second launch are the same
    assert t.hbm_read() == {"scratch": 2 * 32}  # the argument
    assert t.hbm_write() == {"scratch (2)": 2 * 32, "scratch (3)": 2 * 32}


def test_skipped_rows_move_no_bytes():
    def body():
        index = tile(np.array([[0], [-1], [-1], [2]], np.int32))
        source = tile(np.zeros((4, 8), F32), "hbm")
        nisa.dma_copy(blank((4, 8)), source.ap([[8, 4], [1, 8]], vector_offset=index),
                      oob_mode=nisa.oob_mode.skip)  # fmt: skip

    with trace() as t:
        on_core(body)
    assert t.hbm_read() == {"source": 2 * 8 * 4}
    assert t.records[0].piece_bytes == 32


def test_pieces_break_where_either_side_breaks():
    def body():
        source = tile(np.zeros((128, 64), F32), "hbm")
        nisa.dma_copy(blank((128, 32)), source[:, 0:32])
        nisa.dma_copy(blank((128, 64))[:, 0:16], source[:, ::4])
        nisa.dma_copy(blank((64, 128)), source)
        nisa.dma_copy(blank((128, 64), "bfloat16"), source)

    with trace() as t:
        on_core(body)
    assert [r.pieces for r in t.records] == [128, 128 * 16, 64, 128]
    assert t.descriptors() == 128 + 128 * 16 + 64 + 128
    # 64·4 bytes are contiguous in HBM and 128·4 in a partition: whole HBM is one run of 32 KiB.
    assert [r.piece_bytes for r in t.records] == [128, 4, 512, 128]


def test_shapes_only_records_the_same_without_data():
    shape = (128, 512)
    real = traced(128, 128, 512)
    with trace(shapes_only=True) as t:
        x = torch.empty(128, 128, device="meta")
        result = simulate(matmul)(x, np.broadcast_to(F32(0), shape))
    assert str(t.table()) == str(real.table())
    assert result.shape == shape
    assert result.dtype == torch.bfloat16
    assert result.device.type == "meta"


def test_shapes_only_checks_limits_and_keeps_integers_real():
    with trace(shapes_only=True), pytest.raises(KernelError, match="N = 600"):
        simulate(matmul)(*(np.broadcast_to(F32(0), (128, n)) for n in (64, 600)))

    def rows(x, ids):
        at = nl.ndarray((4, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=at, src=ids)
        nisa.tensor_scalar(dst=at, data=at, op0=nl.add, operand0=1)
        t = nl.ndarray((4, 8), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=t, src=x.ap([[8, 4], [1, 8]], vector_offset=at),
                      oob_mode=nisa.oob_mode.skip)  # fmt: skip

    huge = np.broadcast_to(F32(0), (10**9, 8))
    with trace(shapes_only=True) as t:
        simulate(rows)(huge, np.array([[1], [2], [10**9], [-2]], np.int32))
    assert t.hbm_read()["x"] == 2 * 8 * 4

    def from_floats(x):
        at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        f = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=f, src=x[0:1, 0:1])
        nisa.tensor_copy(dst=at, src=f)
        nisa.dma_copy(dst=f, src=x.ap([[8, 1], [1, 1]], scalar_offset=at))

    with trace(shapes_only=True), pytest.raises(KernelError, match="does not compute"):
        simulate(from_floats)(huge)


def test_two_cores_and_two_launches():
    def body():
        nisa.memset(blank((128, 256)), 0.0)

    with trace() as t:
        on_core(body, lnc=2)
        on_core(body)
    assert [(r.launch, r.core) for r in t.records] == [(0, 0), (0, 1), (1, 0)]
    # Cores work side by side, so the bound is that of the busier one: 2 of the 3 instructions.
    vector = next(r for r in t.roofline() if r["engine"] == "vector")
    assert vector["work of the busiest core"] == 2 * 128


def test_a_kernel_that_fails_is_one_launch_like_others():
    def fails():
        nisa.memset(blank((128, 16)), 0.0)
        nisa.memset(blank((128, 16)), "x")

    with trace() as t:
        with pytest.raises(KernelError, match="value 'x'"):
            simulate(fails)()
        simulate(lambda: None)()
    assert t.launches == 2
    assert [(r.launch, r.sbuf) for r in t.records] == [(0, 64)]


def test_nothing_is_recorded_outside():
    with trace() as t:
        pass
    traced(128, 64, 64)
    assert t.records == []
    assert str(t.table()).startswith("\n") or "0 instructions" in str(t.table())


def test_table_reads_in_text_and_in_a_notebook():
    t = traced(128, 64, 512)
    text = str(t.table())
    assert "tensor  nc_matmul" in text
    assert f"SBUF 2,304 of {arch.SBUF_BYTES:,} bytes" in text
    html = t.table()._repr_html_()
    assert html.count("<tr>") == 1 + len(t.table())
    assert t.table().rows[0]["array used"] == "50%"


def test_plot_draws_a_lane_for_each_engine():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = traced(128, 64, 512).plot()
    lanes, sbuf, psum = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == [
        "tensor (1)", "vector (1)", "dma (3)"]  # fmt: skip
    assert "KiB a partition" in sbuf.get_ylabel()
    assert psum.get_xlabel() == "instruction number"
