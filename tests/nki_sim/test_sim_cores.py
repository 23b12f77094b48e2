"""Two cores of one launch: barriers, shared HBM, exchanges, races, deterministic order."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, refuses, tile

from nki_sim import KernelError, simulate
from nki_sim.kernel import Kernel

F32 = np.float32


def two(fn):
    return simulate(Kernel(fn)[2])


def halves(x):
    """Each core adds its number + 1 to its half of the rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = x.shape[0] // nl.num_programs()
    mine = nl.ds(nl.program_id() * rows, rows)
    t = nl.ndarray((rows, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x[mine])
    nisa.tensor_scalar(dst=t, data=t, op0=nl.add, operand0=nl.program_id() + 1.0)
    nisa.dma_copy(dst=out[mine], src=t)
    return out


def test_cores_share_hbm_and_know_their_number():
    x = np.zeros((8, 4), F32)
    assert (two(halves)(x)[:, 0] == [1] * 4 + [2] * 4).all()
    assert (simulate(halves)(x) == 1).all()
    seen = []
    on_core(lambda: seen.append((nl.program_id(), nl.num_programs(), nl.program_ndim())), lnc=2)
    on_core(lambda: seen.append((nl.program_id(), nl.num_programs(), nl.program_ndim())))
    assert seen == [(0, 2, 1), (1, 2, 1), (0, 1, 0)]


def exchange_through_hbm(x, barrier):
    """Each core writes its own row and reads the other's."""
    me = nl.program_id()
    scratch = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray((1, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x[me : me + 1])
    nisa.dma_copy(dst=scratch[me : me + 1], src=t)
    if barrier:
        nisa.core_barrier(scratch, cores=(0, 1))
    nisa.dma_copy(dst=t, src=scratch[1 - me : 2 - me])
    nisa.dma_copy(dst=out[me : me + 1], src=t)
    return out


def test_barrier_orders_hbm_between_cores():
    x = np.arange(8, dtype=F32).reshape(2, 4)
    assert (two(exchange_through_hbm)(x, True) == x[::-1]).all()


def test_without_a_barrier_reading_the_other_cores_bytes_is_an_error():
    x = np.arange(8, dtype=F32).reshape(2, 4)
    with pytest.raises(KernelError, match="was never written"):
        two(exchange_through_hbm)(x, False)  # core 0 runs first and finds nothing


def race(x, same_row):
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray((1, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x[0:1])
    row = 0 if same_row else nl.program_id()
    nisa.dma_copy(dst=out[row : row + 1, 1:4], src=t[:, 1:4])
    nisa.dma_copy(dst=out[nl.program_id() : nl.program_id() + 1, 0:1], src=t[:, 0:1])
    return out


def test_two_writes_to_one_place_race():
    x = np.ones((2, 4), F32)
    two(race)(x, False)
    with pytest.raises(KernelError) as error:
        two(race)(x, True)
    text = str(error.value)
    assert "cores on 'out' float32[2, 4] in shared_hbm at element [0, 1]:" in text
    assert text.count("test_sim_cores.py:") == 2
    assert "the other writes it" in text


def late_write(x, row):
    """Core 0 reads row 0 of x; core 1 then writes a row of it."""
    t = nl.ndarray((1, 4), dtype=x.dtype, buffer=nl.sbuf)
    if nl.program_id() == 0:
        nisa.dma_copy(dst=t, src=x[0:1])
    else:
        nisa.memset(t, 1.0)
        nisa.dma_copy(dst=x[row : row + 1], src=t)
    return x


def test_a_read_and_a_later_write_race():
    two(late_write)(np.zeros((2, 4), F32), 1)
    with pytest.raises(KernelError, match="the other reads it"):
        two(late_write)(np.zeros((2, 4), F32), 0)


def scattered(x, ids):
    """Both cores scatter one row each, to the rows that ids name."""
    at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=at, src=ids[nl.program_id() : nl.program_id() + 1])
    t = nl.ndarray((1, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(t, nl.program_id() + 1.0)
    nisa.dma_copy(dst=x.ap([[4, 1], [1, 4]], vector_offset=at), src=t)
    return x


def test_scatters_race_by_the_rows_they_really_touch():
    ids = lambda *v: np.array(v, np.int32).reshape(2, 1)  # noqa: E731
    result = two(scattered)(np.zeros((3, 4), F32), ids(2, 0))
    assert result[:, 0].tolist() == [2, 0, 1]
    with pytest.raises(KernelError, match=r"at element \[2, 0\]"):
        two(scattered)(np.zeros((3, 4), F32), ids(2, 2))


@pytest.mark.parametrize(("rows", "races"), [((-1, 3), False), ((-1, 0), True), ((0, 3), True)])
def test_skipped_rows_do_not_race(rows, races):
    """Core 0 writes row 0; core 1 scatters to `rows` of 3, and what lies outside is skipped."""

    def body():
        x = nl.ndarray((3, 4), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id() == 0:
            nisa.dma_copy(x[0:1], tile(np.ones((1, 4), F32)))
        else:
            at = tile(np.array(rows, np.int32).reshape(2, 1))
            nisa.dma_copy(
                x.ap([[4, 2], [1, 4]], vector_offset=at),
                tile(np.ones((2, 4), F32)),
                oob_mode=nisa.oob_mode.skip,
            )

    if races:
        refuses(r"race .* at element .0, 0.", body, lnc=2)
    else:
        on_core(body, lnc=2)


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("way", ["load", "store"])
def test_registers_race_like_any_other_access(way, writer):
    """One core writes shared HBM by DMA; the other loads it into a register, or stores there."""

    def body(barrier):
        shared = nl.ndarray((2, 1), nl.int32, buffer=nl.shared_hbm)
        if nl.program_id() == 0:
            nisa.dma_copy(shared, tile(np.ones((2, 1), np.int32)))
        nisa.core_barrier(shared, cores=(0, 1))
        if nl.program_id() == writer:
            nisa.dma_copy(shared[0:1], tile(np.full((1, 1), 5, np.int32)))
        if barrier:
            nisa.core_barrier(shared, cores=(0, 1))
        if nl.program_id() != writer and way == "load":
            r = nisa.register_alloc()
            nisa.register_load(r, shared[0:1])
            assert r.value == 5 or not barrier
        elif nl.program_id() != writer:
            nisa.register_store(shared[0:1], 7)

    on_core(lambda: body(True), lnc=2)
    verb = "reads" if way == "load" else "writes"
    refuses(f"race .* on 'shared'.*element .0, 0.:\n.*\n.*{verb} it", lambda: body(False), lnc=2)


def test_sendrecv_swaps_tiles():
    def body():
        me = nl.program_id()
        mine, theirs = tile(np.full((4, 8), me, F32)), blank((4, 8))
        nisa.sendrecv(mine, theirs, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
        assert (theirs.np == 1 - me).all()

    on_core(body, lnc=2)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 4), "float32"), ((4, 8), "int32")])
def test_both_cores_swap_the_same_kind_of_tile(shape, dtype):
    def body():
        me = nl.program_id()
        mine = ((4, 8), "float32") if me == 0 else (shape, dtype)
        src = tile(np.ones(mine[0]), dtype=mine[1])
        nisa.sendrecv(src, blank(*mine), 1 - me, 1 - me, pipe_id=0)

    refuses("equal shape and dtype on both cores", body, lnc=2)


@pytest.mark.parametrize(("send", "receive"), [(0, 0), (1, 1), (1, 0), (0, 1)])
def test_each_core_swaps_with_the_other_one(send, receive):
    """Seen from core 0, where (1, 1) alone is right."""

    def body():
        me = nl.program_id()
        nisa.sendrecv(
            tile(np.ones((1, 1), F32)), blank((1, 1)), abs(send - me), abs(receive - me), pipe_id=0
        )

    if (send, receive) == (1, 1):
        on_core(body, lnc=2)
    else:
        refuses("sends to and receives from the other", body, lnc=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_how_much_gpsimd_swaps(dtype):
    """1024, 512 and 256 bytes a partition of 4-, 2- and 1-byte elements: 256 elements each."""

    def body(count, queue):
        me = nl.program_id()
        nisa.sendrecv(
            tile(np.ones((1, count)), dtype=dtype),
            blank((1, count), dtype),
            1 - me,
            1 - me,
            pipe_id=0,
            dma_engine=queue,
        )

    gpsimd, dma = nisa.dma_engine.gpsimd_dma, nisa.dma_engine.dma
    on_core(lambda: body(256, gpsimd), lnc=2)
    on_core(lambda: body(257, dma), lnc=2)
    refuses("bytes a partition, limit", lambda: body(257, gpsimd), lnc=2)


@pytest.mark.parametrize("core", [0, 1])
def test_a_core_that_misses_the_barrier_is_found(core):
    def body():
        t = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id() == core:
            nisa.core_barrier(t, cores=(0, 1))

    with pytest.raises(KernelError, match="which has finished"):
        on_core(body, lnc=2)


def test_barrier_against_sendrecv_is_found():
    def body():
        t = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        mine = tile(np.zeros((1, 1), F32))
        if nl.program_id() == 0:
            nisa.core_barrier(t, cores=(0, 1))
        else:
            nisa.sendrecv(mine, blank((1, 1)), 0, 0, 0)

    with pytest.raises(KernelError, match="the other at a sendrecv"):
        on_core(body, lnc=2)


@pytest.mark.parametrize("cores", [(0), 1, (0,), (1, 0), (0, 1, 2), "01", None])
def test_a_barrier_names_both_cores(cores):
    def body():
        shared = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        nisa.core_barrier(shared, cores)

    refuses(r"core_barrier: cores .*\n  rule: cores is \(0, 1\)", body, lnc=2)


def test_barrier_of_one_core_does_nothing():
    on_core(lambda: nisa.core_barrier(nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm), (0)))


def test_shared_tensors_pair_up_in_program_order():
    def body():
        nl.ndarray((1, 1 + nl.program_id()), nl.float32, buffer=nl.shared_hbm)

    with pytest.raises(KernelError, match="core 1 allocates shared HBM"):
        on_core(body, lnc=2)


def test_an_error_on_one_core_stops_the_other():
    def body():
        t = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id() == 1:
            raise ZeroDivisionError
        nisa.core_barrier(t, cores=(0, 1))

    with pytest.raises(ZeroDivisionError):
        on_core(body, lnc=2)


def test_order_is_core_zero_up_to_the_barrier_then_core_one():
    order = []

    def body():
        t = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        for step in range(2):
            order.append((step, nl.program_id()))
            nisa.core_barrier(t, cores=(0, 1))

    for _ in range(20):
        order.clear()
        on_core(body, lnc=2)
        assert order == [(0, 0), (0, 1), (1, 1), (1, 0)]
