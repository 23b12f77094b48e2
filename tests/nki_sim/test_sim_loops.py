"""Registers and dynamic loops, and where NKI versions disagree."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, refuses, tile

F32 = np.float32


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
    refuses("tensor of one element", lambda: nisa.register_store(blank((1, 2), "int32"), 1))
    refuses(
        "tensor of one element",
        lambda: nisa.register_load(nisa.register_alloc(), tile(np.ones((1, 2), np.int32))),
    )
    refuses(
        "was never written",
        lambda: nisa.register_load(nisa.register_alloc(), blank((1, 1), "int32")),
    )
    refuses("dst is 5", lambda: nisa.register_load(5, tile(np.ones((1, 1), np.int32))))
    refuses("src is 'x'", lambda: nisa.register_store(blank((1, 1), "int32"), "x"))


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [("uint8", 255, 255), ("int8", -128, -128), ("int16", 2**15 - 1, 2**15 - 1),
     ("int32", -1, -1), ("uint32", -1, 2**32 - 1), ("uint32", 2**31, 2**31)],
)  # fmt: skip
def test_what_a_register_stores(dtype, value, stored):
    def body():
        cell = blank((1, 1), dtype)
        nisa.register_store(cell, nisa.register_alloc(value))
        assert int(cell.np[0, 0]) == stored
        back = nisa.register_alloc()
        nisa.register_load(back, cell)
        assert back.value == (value + 2**31) % 2**32 - 2**31

    on_core(body)


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 256), ("uint8", -1), ("int16", 2**15)])
def test_a_register_does_not_fit_every_element(dtype, value):
    refuses(
        f"value {value} does not fit .* {dtype}",
        lambda: nisa.register_store(blank((1, 1), dtype), value),
    )


def test_registers_follow_run_time_addresses():
    def body():
        table = tile(np.array([[3, 1, 2]], np.int32))
        r = nisa.register_alloc(1)
        # table[1], then table[1 + 1]
        nisa.register_load(r, table.ap([[3, 1], [1, 1]], scalar_offset=r, indirect_dim=1))
        nisa.register_store(
            table.ap([[3, 1], [1, 1]], offset=1, scalar_offset=r, indirect_dim=1), 7
        )
        assert table.np.tolist() == [[3, 1, 7]]

    on_core(body)
    out = nisa.register_alloc  # one past the end
    refuses(
        "out of bounds",
        lambda: nisa.register_load(
            out(), tile(np.ones((1, 3), np.int32)).ap([[3, 1], [1, 1]], scalar_offset=out(3))
        ),
    )


@pytest.mark.parametrize("version", ["0.5", "0.6", "0.7"])
@pytest.mark.parametrize(
    "use",
    [bool, int, range, lambda r: r < 3, lambda r: [0, 1][r], lambda r: r == 0, lambda r: r != 0,
     lambda r: r in (0, 1), lambda r: 1 if r else 0, lambda r: not r],
)  # fmt: skip
def test_python_must_not_look_at_a_register(use, version):
    loops = "nl.dynamic_range or `while" if version < "0.6" else "nl.fori_loop or nl.while_loop"
    with pytest.raises(TypeError, match=f"no value at compile time: use {loops}"):
        on_core(lambda: use(nisa.register_alloc(1)), version=version)


def test_registers_are_compared_with_none_only():
    def body():
        r = nisa.register_alloc(1)
        assert (r == None) is False  # noqa: E711
        assert r != None  # noqa: E711
        assert {r: 2}[r] == 2

    on_core(body)


@pytest.mark.parametrize("use", [lambda r: r + 1, lambda r: 2 * r, lambda r: 1 - r])
def test_arithmetic_came_with_0_7(use):
    with pytest.raises(TypeError, match="no value at compile time"):
        on_core(lambda: use(nisa.register_alloc(1)), version="0.6")
    on_core(lambda: use(nisa.register_alloc(1)), version="0.7")


def count_down(r):
    """AWS's form of a dynamic loop in NKI 0.3 to 0.6."""
    count, turns = tile(np.array([[3]], np.int32)), 0
    nisa.register_load(r, count)
    while r:
        nisa.tensor_scalar(count, count, nl.subtract, 1.0)
        nisa.register_load(r, count)
        turns += 1
    return turns


@pytest.mark.parametrize("version", ["0.3", "0.6"])
def test_while_register_until_0_6(version):
    assert on_core(lambda: count_down(nisa.register_alloc()), version=version) == 3
    with pytest.raises(TypeError, match=r"use nl\.fori_loop or nl\.while_loop"):
        on_core(lambda: count_down(nisa.register_alloc()), version="0.7")


def test_scalars_of_0_7_take_arithmetic():
    def body():
        r = nisa.scalar_load(tile(np.array([[3]], np.int32)))
        cell = blank((1, 1), "int32")
        nisa.scalar_store(cell, 2 * r + 1 - r)
        assert cell.np[0, 0] == 4
        with pytest.raises(TypeError):
            bool(r)

    on_core(body, version="0.7")
    refuses("added in NKI 0.7", lambda: nisa.scalar_load(tile(np.zeros((1, 1), np.int32))),
            version="0.6")  # fmt: skip
    refuses("added in NKI 0.7", lambda: nisa.scalar_store(blank((1, 1), "int32"), 1),
            version="0.6")  # fmt: skip


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
    for write in (lambda i: nisa.register_move(i, 0),
                  lambda i: nisa.register_load(i, tile(np.ones((1, 1), np.int32)))):  # fmt: skip
        refuses("dst is the induction register", lambda w=write: nl.fori_loop(0, 1, w))
    refuses("body returned 5", lambda: nl.fori_loop(0, 1, lambda i: 5))
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

    on_core(lambda: copy_rows(loop), version="0.6")
    refuses("removed in NKI 0.7", lambda: copy_rows(loop), version="0.7")


@pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "dynamic_range", "break"])
def test_a_body_s_tiles_end_with_the_iteration(loop):
    def body(before, after):
        kept = [blank((1, 4))] if before else []

        def step(i):
            if not before:
                kept.append(blank((1, 4)))
            inner = blank((1, 4))
            nisa.memset(kept[-1], 1.0)
            nisa.tensor_copy(inner, kept[-1])
            nl.fori_loop(0, 2, lambda j: nisa.memset(inner, 1.0) and None)

        if loop == "fori_loop":
            nl.fori_loop(0, 2, step)
        elif loop == "while_loop":
            nl.while_loop(nisa.register_alloc(1), lambda r: (step(r), nisa.register_alloc(0))[1])
        else:
            for i in nl.dynamic_range(2):
                step(i)
                if loop == "break":
                    break
        if after:
            nisa.tensor_copy(blank((1, 4)), kept[0])

    run = {"version": "0.6"}
    on_core(lambda: body(before=True, after=True), **run)
    on_core(lambda: body(before=False, after=False), **run)
    refuses("used after the iteration that allocated it",
            lambda: body(before=False, after=True), **run)  # fmt: skip


def test_an_iteration_s_tile_is_not_there_in_the_next_one():
    kept = []

    def step(i):
        kept.append(blank((1, 4)))
        nisa.memset(kept[0], 1.0)

    on_core(lambda: nl.fori_loop(0, 1, step))
    kept.clear()
    refuses("used after the iteration", lambda: nl.fori_loop(0, 2, step))


def test_sizes_that_came_later():
    assert on_core(lambda: nl.tile_size.psum_num_banks) == 8
    refuses(r"added in NKI 0\.5", lambda: nl.tile_size.psum_num_banks, version="0.4")
    refuses(r"added in NKI 0\.4", lambda: nl.tile_size.sbuf_fmax_bytes, version="0.3")
    with pytest.raises(AttributeError, match="no speed"):
        on_core(lambda: nl.tile_size.speed)


def test_removed_names_say_what_replaced_them():
    with pytest.raises(AttributeError, match=r"nl.mgrid was removed in NKI 0\.3; index with"):
        nl.mgrid  # noqa: B018
