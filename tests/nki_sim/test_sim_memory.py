"""Memories: what is live, what fits, what was written, and who may change an input."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, refuses, tile

from nki_sim import KernelError, arch, simulate, trace

F32 = np.float32


# ------------------------------------------------------------------ capacity
def held(*tiles):
    """All tiles are live at one time: each is written, then each is read."""
    for t in tiles:
        nisa.memset(t, 1)
    for t in tiles:
        nisa.tensor_copy(t, t)


def test_sbuf_holds_exactly_its_bytes():
    on_core(lambda: held(blank((1, arch.SBUF_BYTES), "uint8")))
    refuses("needs 212,985 bytes", lambda: blank((1, arch.SBUF_BYTES + 1), "uint8"))

    def three(last):
        held(blank((128, 150_000), "uint8"), blank((1, 62_980), "uint8"), blank((2, last), "uint8"))

    on_core(lambda: three(4))
    with pytest.raises(KernelError) as error:
        on_core(lambda: three(5))
    text = str(error.value)
    assert "SBUF overrun at instruction 3 of core 0: 212,985 bytes a partition are live" in text
    assert "live: '(unnamed)' uint8[128, 150000], 150,000 bytes, from " in text
    assert text.count("sim_helpers.py:") == 4  # the line that allocates: at, and three live


def test_psum_holds_eight_banks():
    on_core(lambda: held(*[blank((128, 512), place="psum") for _ in range(8)]))
    refuses("PSUM overrun", lambda: held(*[blank((128, 512), place="psum") for _ in range(9)]))
    refuses("needs 16,388 bytes", lambda: blank((1, 4097), place="psum"))


def test_psum_tiles_share_a_bank_but_do_not_straddle():
    """Eight tiles of 1,028 bytes need a bank each, so a ninth does not fit; of 1,024 it does."""
    on_core(lambda: held(*[blank((1, 256), place="psum") for _ in range(16)]))
    refuses("PSUM overrun", lambda: held(*[blank((1, 257), place="psum") for _ in range(9)]))
    refuses("PSUM overrun",
            lambda: held(blank((1, 1), place="psum"), blank((1, 4096), place="psum")))  # fmt: skip
    # Small ones go to the fullest bank that takes them, so that whole banks stay free.
    sizes = [256, 256, 1024, 256, 256, 1536]
    on_core(lambda: held(*[blank((1, n), place="psum") for n in sizes]))


def test_a_tile_is_live_from_its_first_access_to_its_last():
    def body():
        tiles = [blank((128, 10_000)) for _ in range(100)]  # 100 names, never two in use
        for t in tiles:
            nisa.memset(t, 0.0)
            nisa.tensor_copy(t[:, 0:1], t[:, 1:2])
        nisa.tensor_copy(tiles[3][:, 0:1], tiles[99][:, 0:1])

    with trace() as t:
        on_core(body)
    assert t.peak_sbuf == 80_000  # number 3, held to the end, and one other
    assert [r.sbuf for r in t.records[:9]] == [40_000] * 6 + [40_000] * 2 + [80_000]


def test_run_time_indices_are_accesses_too():
    def body():
        index = tile(np.zeros((16, 1), np.int32))
        nisa.tensor_copy(index, index)
        nisa.memset(blank((128, 100)), 0.0)
        nisa.memset(blank((128, 100)), 0.0)
        source = tile(np.zeros((4, 2), F32), "hbm").ap([[2, 16], [1, 2]], vector_offset=index)
        nisa.dma_copy(blank((16, 2)), source)

    with trace() as t:
        on_core(body)
    assert [r.sbuf for r in t.records] == [4, 404, 404, 12]


def test_each_core_has_its_own_memories():
    on_core(lambda: held(*[blank((128, 512), place="psum") for _ in range(8)]), lnc=2)


# ------------------------------------------------------------------ written elements
def test_reading_names_the_tensor_and_the_first_unwritten_index():
    def body():
        half = blank((4, 6))
        nisa.memset(half[:, 0:4], 1.0)
        nisa.tensor_copy(blank((4, 4)), half[:, 0:4])
        nisa.tensor_copy(blank((4, 6)), half)

    refuses(r"tensor_copy: operand src 'half' float32\[4, 6\] .* element \[0, 4\]", body)


def test_not_a_number_is_a_value_like_any_other():
    on_core(lambda: nisa.tensor_copy(blank((1, 1)), tile(np.array([[np.nan]], F32))))


def test_two_halves_make_a_whole():
    def body():
        t = blank((4, 6))
        nisa.memset(t[:, 0:3], 1.0)
        nisa.memset(t[:, 3:6], 2.0)
        nisa.tensor_copy(blank((4, 6)), t)
        assert t.storage.written.all

    on_core(body)


def test_written_bytes_follow_a_reinterpreted_view():
    def body():
        t = blank((1, 4))
        nisa.memset(t.view(nl.int16)[:, 0:5], 1)
        nisa.tensor_copy(blank((1, 2)), t[:, 0:2])
        nisa.tensor_copy(blank((1, 3)), t[:, 0:3])

    refuses(r"element \[0, 2\] was never written", body)


def test_output_must_be_written_completely():
    @nki.jit
    def half(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        t = nl.ndarray((4, 8), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=t, src=x)
        nisa.dma_copy(dst=out[:, 0:7], src=t[:, 0:7])
        return out

    with pytest.raises(KernelError, match=r"output 0 'out' .*element \[0, 7\] was never written"):
        half(np.ones((4, 8), F32))


# ------------------------------------------------------------------ inputs and outputs
def test_writing_an_input_must_be_declared_by_returning_it():
    def write(x, give):
        t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(t, 3.0)
        nisa.dma_copy(dst=x, src=t)
        return x if give else None

    x = np.zeros((4, 4), F32)
    assert simulate(write)(x, True) is x
    assert (x == 3).all()
    with pytest.raises(KernelError, match="writes to its input 'x' but does not return it"):
        simulate(write)(x, False)
    turned = np.zeros((4, 8), F32).T[::2]
    assert simulate(write)(turned, True) is turned
    assert (turned == 3).all()  # a copy goes in, the change comes back
    with pytest.raises(KernelError, match="read-only"):
        simulate(write)(np.broadcast_to(F32(0), (4, 4)), True)


def test_a_register_writes_an_input_like_any_instruction():
    def write(x, give):
        nisa.register_store(x[0:1, 0:1], nisa.register_alloc(7))
        return x if give else None

    x = np.zeros((2, 2), np.int32)
    assert simulate(write)(x, True)[0, 0] == 7
    with pytest.raises(KernelError, match="writes to its input 'x' but does not return it"):
        simulate(write)(np.zeros((2, 2), np.int32), False)
    frozen = np.zeros((2, 2), np.int32)
    frozen.flags.writeable = False
    with pytest.raises(KernelError, match="an input whose array is read-only"):
        simulate(write)(frozen, True)
    assert not frozen.any()


def test_outputs_lie_in_shared_hbm():
    def private(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(dst=out, src=x)
        return out

    with pytest.raises(KernelError, match="buffer=nl"):
        simulate(private)(np.zeros((4, 4), F32))


# ------------------------------------------------------------------ PSUM accumulation
def matmul(dst, value=1.0, **kwargs):
    x = tile(np.full((2, 4), value, F32))
    nisa.nc_matmul(dst, x, tile(np.ones((2, 8), F32)), **kwargs)


def test_accumulation_starts_with_a_matmul():
    def fresh():
        matmul(blank((4, 8), place="psum"), accumulate=True)

    def after_memset():
        dst = blank((4, 8), place="psum")
        nisa.memset(dst, 0.0)
        matmul(dst, accumulate=True)

    refuses("element \\[0, 0\\] was never written", fresh)
    refuses("was last written by another instruction", after_memset)


def test_accumulation_in_three_steps_and_none_decides_for_each_element():
    def body():
        dst = blank((4, 8), place="psum")
        for k in range(3):
            matmul(dst, k + 1.0, accumulate=(k > 0))
        assert (dst.np == 2 * 6).all()
        auto = blank((4, 16), place="psum")
        matmul(auto[:, 0:8])
        matmul(auto[:, 4:12])  # first half adds, second half overwrites
        assert auto.np[0, 0:12].tolist() == [2] * 4 + [4] * 4 + [2] * 4
        nisa.memset(auto[:, 0:8], 9.0)
        matmul(auto[:, 0:8])  # memset ended the group: overwritten
        assert (auto.np[:, 0:8] == 2).all()

    on_core(body)


def test_error_reads_like_a_compilers():
    def body():
        x_KM, y_KN = tile(np.ones((128, 130), F32)), tile(np.ones((128, 8), F32))
        nisa.nc_matmul(blank((130, 8), place="psum"), x_KM, y_KN)

    refuses("130 partitions", body)

    def wide():
        x_KM, y_KN = tile(np.ones((128, 64), F32)), tile(np.ones((128, 600), F32))
        nisa.nc_matmul(blank((64, 600), place="psum"), x_KM, y_KN)

    with pytest.raises(KernelError) as error:
        on_core(wide)
    lines = str(error.value).split("\n")
    assert lines[0] == "nc_matmul: moving 'y_KN' float32[128, 600] in sbuf has N = 600"
    assert lines[1] == "  rule: N (free size of moving) ≤ 512, one float32 PSUM bank"
    assert lines[2].endswith('nisa.nc_matmul(blank((64, 600), place="psum"), x_KM, y_KN)')


def test_sine_outside_its_table():
    def body():
        nisa.activation(blank((1, 1)), nl.sin, tile(np.array([[4.0]], F32)))

    refuses("outside \\[-3.14159, 3.14159\\]", body)


# ------------------------------------------------------------------ tiles placed by hand
def test_addresses_count_for_start_partition_and_bank():
    def starting(partition):
        t = nl.ndarray((32, 8), nl.float32, buffer=nl.sbuf, address=(partition, 0))
        nisa.memset(t, 0.0)

    on_core(lambda: starting(96))
    refuses("starts at partition 16", lambda: starting(16))

    def at(byte):
        dst = nl.ndarray((4, 8), nl.float32, buffer=nl.psum, address=(0, byte))
        matmul(dst)

    on_core(lambda: at(2048 - 32))
    refuses("lies in one PSUM bank", lambda: at(2048 - 28))
