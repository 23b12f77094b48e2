"""Registers and dynamic loops, and where NKI versions disagree."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, tile

from nki_sim import KernelError

F32 = np.float32


def refuses(text, body, version="0.6"):
    with pytest.raises(KernelError, match=text):
        on_core(body, version=version)


def test_registers_move_load_and_store():
    def body():
        r, s = nisa.register_alloc(5), nisa.register_alloc()
        nisa.register_move(s, r)
        cell = blank((1, 1), "int32")
        nisa.register_store(cell, s)
        assert cell.np[0, 0] == 5
        nisa.register_load(r, tile(np.array([[-3]], np.int32), "hbm"))
        assert r.value == -3
        nisa.register_move(r, 2**31)
        assert r.value == -(2**31)  # 32 bits

    on_core(body)
    refuses("read before anything was written",
            lambda: nisa.register_move(nisa.register_alloc(), nisa.register_alloc()))  # fmt: skip
    refuses("one-element tensor", lambda: nisa.register_store(blank((1, 2)), 1))


@pytest.mark.parametrize(
    "use", [bool, int, range, lambda r: r + 1, lambda r: r < 3, lambda r: [0, 1][r]]
)
def test_python_must_not_look_at_a_register(use):
    with pytest.raises(TypeError, match="no value at compile time"):
        on_core(lambda: use(nisa.register_alloc(1)))


def test_scalars_of_0_7_take_arithmetic():
    def body():
        r = nisa.scalar_load(tile(np.array([[3]], np.int32)))
        cell = blank((1, 1), "int32")
        nisa.scalar_store(cell, 2 * r + 1 - r)
        assert cell.np[0, 0] == 4
        with pytest.raises(TypeError):
            bool(r)

    on_core(body, version="0.7")
    refuses("added in NKI 0.7", lambda: nisa.scalar_load(tile(np.zeros((1, 1), np.int32))))
    refuses("added in NKI 0.7", lambda: nisa.scalar_store(blank((1, 1), "int32"), 1))


def copy_rows(loop):
    """Copies 4 rows, one an iteration, by a loop over run-time indices."""
    source, target = (
        tile(np.arange(24).reshape(4, 6).astype(F32), "hbm"),
        blank((4, 6), place="hbm"),
    )

    def step(i):
        row = blank((1, 6))
        nisa.dma_copy(row, source.ap([[6, 1], [1, 6]], scalar_offset=i))
        nisa.dma_copy(target.ap([[6, 1], [1, 6]], scalar_offset=i), row)

    loop(step)
    assert (target.np == source.np).all()


def test_fori_loop():
    on_core(lambda: copy_rows(lambda step: nl.fori_loop(0, 4, step)))
    on_core(lambda: copy_rows(lambda step: nl.fori_loop(0, nisa.register_alloc(4), step)))
    seen = []
    on_core(lambda: nl.fori_loop(1, 9, lambda i: seen.append(i.value), step=3))
    assert seen == [1, 4, 7]
    refuses("positive compile-time integer", lambda: nl.fori_loop(0, 4, print, step=0))
    refuses("read-only", lambda: nl.fori_loop(0, 1, lambda i: nisa.register_move(i, 0)))
    refuses("added in NKI 0.6", lambda: nl.fori_loop(0, 1, print), version="0.5")


def test_while_loop_tests_first():
    def body():
        count = tile(np.array([[3]], np.int32))
        seen = []

        def step(r):
            seen.append(r.value)
            nisa.tensor_scalar(count, count, nl.subtract, 1.0)
            nisa.register_load(r, count)
            return r

        start = nisa.register_alloc()
        nisa.register_load(start, count)
        nl.while_loop(start, step)
        assert seen == [3, 2, 1]
        nl.while_loop(nisa.register_alloc(0), step)
        assert len(seen) == 3

    on_core(body)
    refuses("returns the next condition",
            lambda: nl.while_loop(nisa.register_alloc(1), lambda r: None))  # fmt: skip
    refuses("added in NKI 0.6", lambda: nl.while_loop(nisa.register_alloc(0), print), version="0.5")


def test_dynamic_range_until_0_6():
    def loop(step):
        for i in nl.dynamic_range(4):
            step(i)

    on_core(lambda: copy_rows(loop))
    refuses("removed in NKI 0.7", lambda: copy_rows(loop), version="0.7")


def test_sizes_that_came_later():
    assert on_core(lambda: nl.tile_size.psum_num_banks) == 8
    refuses(r"added in NKI 0\.5", lambda: nl.tile_size.psum_num_banks, version="0.4")
    refuses(r"added in NKI 0\.4", lambda: nl.tile_size.sbuf_fmax_bytes, version="0.3")
    with pytest.raises(AttributeError, match="no speed"):
        on_core(lambda: nl.tile_size.speed)


def test_removed_names_say_what_replaced_them():
    with pytest.raises(AttributeError, match=r"nl.mgrid was removed in NKI 0\.3; index with"):
        nl.mgrid  # noqa: B018
