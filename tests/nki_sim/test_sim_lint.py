"""Lint: each construct outside the documented subset is found at its line, and fair code is not."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_sim import KernelError, LintWarning, lint, simulate

STATE = [1, 2]
FIXED = (1, 2)


def helper(x):
    return [n for n in x]  # noqa: C416


@nki.jit
def jitted(x):
    return x


class Settings(nl.NKIObject):
    size = 3


# One construct a line; the comment is the construct that lint must name.
def bad(x, *, scale=1):
    if x is None:  # is / is not
        pass
    a = [n for n in range(3)]  # list comprehension  # noqa: C416
    b = lambda n: n  # lambda  # noqa: E731
    c = sum([1, 2])  # sum()
    d = {1: 2}  # dict key
    e = {1, 2}  # set literal
    try:  # try/except
        f = x[0 / 2]  # float index
    except KeyError:
        raise  # raise
    g = nl.ndarray((1, 1), nl.float32, buffer="sbuf")  # buffer as a string
    x[0:1, 0:1] = g  # assignment to tensor elements
    h = nl.arange(4)  # nl.arange
    nisa.tensor_copy(g, x, mask=h)  # mask=
    i = STATE[0]  # outside state 'STATE'
    jitted(x)  # call of @nki.jit jitted
    with open("f") as j:  # with
        pass
    del j  # del
    k = (n := 3)  # assignment expression (:=)
    for m, _ in enumerate(FIXED):  # enumerate()
        print(m)
    return a, b, c, d, e, f, i, k, n


def good(x, y=None, scale=2):
    assert x.shape[0] <= 128, f"{x.shape}"
    settings = Settings()
    sizes = {"a": 1}
    tiles = []
    for i in range(len(FIXED)):
        if y == None and i > 0:  # noqa: E711
            continue
        tiles.append(nl.ndarray((4, settings.size), dtype=x.dtype, buffer=nl.sbuf))
        sizes["a"] = max(i, 2) // 2
    with nl.no_reorder():
        nisa.memset(dst=tiles[0][:, 0 : sizes["a"]], value=float(scale))
    return tiles


def test_each_construct_is_found_at_its_line():
    import inspect

    lines, start = inspect.getsourcelines(bad)
    expected = {
        (start + i, line.split("  # ")[1].strip()) for i, line in enumerate(lines) if "  # " in line
    }
    expected.add((start, "keyword-only argument"))
    found = {(f.line, f.construct) for f in lint(bad)}
    missing = expected - found
    assert not missing
    extra = {(line, c) for line, c in found - expected if c != "open()"}
    assert not extra


def test_the_documented_subset_passes():
    assert lint(good) == []


def test_0_7_takes_all_of_python_but_not_what_is_gone():
    constructs = {f.construct for f in lint(bad, "0.7")}
    assert constructs == {
        "float index", "buffer as a string", "assignment to tensor elements", "nl.arange", "mask=",
        "outside state 'STATE'", "call of @nki.jit jitted",
    }  # fmt: skip


def test_helpers_are_followed():
    def kernel(x):
        return helper(x)

    assert [f.construct for f in lint(kernel)] == ["list comprehension"]


def test_closures_over_mutable_state():
    memory, fixed = {}, (1, 2)

    def kernel(x):
        return memory, fixed

    assert [f.construct for f in lint(kernel)] == ["outside state 'memory'"]


def test_version_decides_about_dynamic_range():
    def kernel(x):
        for _ in nl.dynamic_range(4):
            pass

    assert lint(kernel, "0.6") == []
    assert [f.construct for f in lint(kernel, "0.7")] == ["nl.dynamic_range"]


def test_simulate_warns_and_strict_python_raises():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        [nisa.dma_copy(dst=out, src=x) for _ in range(1)]
        return out

    x = np.ones((2, 2), np.float32)
    with pytest.warns(LintWarning, match="list comprehension"):
        simulate(kernel)(x)
    with pytest.raises(KernelError, match=r"test_sim_lint.py:\d+: list comprehension"):
        simulate(kernel, strict_python=True)(x)
