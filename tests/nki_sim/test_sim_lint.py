"""Lint: each construct outside the documented subset is found at its line, and fair code is not."""

import importlib.util
import inspect
import textwrap

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_sim import KernelError, LintWarning, arch, lint, simulate

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
    lines, start = inspect.getsourcelines(bad)
    expected = {
        (start + i, line.split("  # ")[1].strip()) for i, line in enumerate(lines) if "  # " in line
    }
    expected.add((start, "keyword-only argument"))
    found = {(f.line, f.construct) for f in lint(bad, "0.6")}
    missing = expected - found
    assert not missing
    extra = {(line, c) for line, c in found - expected if c != "open()"}
    assert not extra


def test_the_documented_subset_passes():
    for version in arch.VERSIONS:
        assert lint(good, version) == []


# A kernel's body with x as argument -> what NKI before 0.7 refuses in it, and what 0.7 does.
TABLE = [
    ("return [n for n in x]", {"list comprehension"}, set()),
    ("return {n for n in x}", {"set comprehension"}, set()),
    ("return {n: n for n in x}", {"dict comprehension"}, set()),
    ("return tuple(n for n in x)", {"generator expression"}, set()),
    ("return lambda n: n", {"lambda"}, set()),
    ("try:\n  pass\nfinally:\n  pass", {"try/except"}, set()),
    ("try:\n  pass\nexcept* ValueError:\n  pass", {"try/except"}, set()),
    ("raise ValueError", {"raise"}, set()),
    ("global SOME\nSOME = 1", {"global"}, set()),
    ("n = 1\ndef inner():\n  nonlocal n\n  n = 2", {"nonlocal"}, set()),
    ("yield x", {"generator (yield)"}, set()),
    ("yield from x", {"generator (yield from)"}, set()),
    ("async def inner():\n  await x", {"async function", "await"}, set()),
    ("async def inner():\n  async for n in x:\n    pass", {"async function", "async for"}, set()),
    ("async def inner():\n  async with x:\n    pass", {"async function", "async with"}, set()),
    ("return {1, 2}", {"set literal"}, set()),
    ("n = 1\ndel n", {"del"}, set()),
    ("match x:\n  case 1:\n    pass", {"match"}, set()),
    ("return (n := 3)", {"assignment expression (:=)"}, set()),
    ("a, *b = x", {"star expression"}, set()),
    ("print(*x)", {"star expression"}, set()),
    ("class Inner:\n  pass", {"class"}, set()),
    ("class Inner(Settings):\n  pass", {"class"}, set()),
    ("class Inner(nl.NKIObject):\n  pass", set(), set()),
    ("class Inner(NKIObject):\n  pass", set(), set()),
    ("with nl.no_reorder():\n  pass", set(), set()),
    ("with x:\n  pass", {"with"}, set()),
    ("return x is None", {"is / is not"}, set()),
    ("return x == None", set(), set()),
    ("return {1: x}", {"dict key"}, set()),
    ("return {**x}", {"dict key"}, set()),
    ("d = {}\nd[3] = x", {"dict key"}, set()),
    ("d = {}\nd['a'] = x", set(), set()),
    *[(f"return {name}(x)", {f"{name}()"}, set()) for name in (
        "enumerate", "zip", "sum", "any", "all", "abs", "sorted", "map", "filter", "reversed",
        "set", "eval", "exec", "open", "getattr", "setattr", "vars", "globals", "iter", "next")],
    *[(f"return {name}(x)", set(), set()) for name in (
        "len", "min", "max", "int", "float", "str", "isinstance", "divmod", "range", "print",
        "tuple", "list")],
    ("def sum(y):\n  return y\nreturn sum(x)", set(), set()),  # their own function of that name
    # What no version takes.
    *[(code, {found}, {found}) for code, found in [
        ("return x[0 / 2]", "float index"), ("return x[0:1.5]", "float index"),
        ("return x[nl.ds(0, 3 / 2)]", "float index"),
        ("x[0:1, 0:1] = 1", "assignment to tensor elements"),
        ("x[0:1] += 1", "assignment to tensor elements"),
        ("x[0] = 1", "assignment to tensor elements"),
        ("x[0] += 1", "assignment to tensor elements"),
        ("x[...] = 1", "assignment to tensor elements"),
        ("a, x[0] = 1, 2", "assignment to tensor elements"),
        ("t = nl.zeros((1, 1), nl.float32)\nt[0] = 1", "assignment to tensor elements"),
        ("nl.ndarray((1, 1), nl.float32, 'sbuf')", "buffer as a string"),
        ("nl.ndarray((1, 1), nl.float32, buffer='psum')", "buffer as a string"),
        ("nl.zeros((1, 1), nl.float32, 'shared_hbm')", "buffer as a string"),
        ("return nl.arange(4)", "nl.arange"), ("return nl.mgrid[0:4]", "nl.mgrid"),
        ("return nl.par_dim(4)", "nl.par_dim"), ("return nl.spmd_dim(2)", "nl.spmd_dim"),
        ("return nl.nc(2)", "nl.nc"),
        ("return nl.load_transpose2d(x)", "nl.load_transpose2d"),
        ("return nki.simulate_kernel(x)", "nki.simulate_kernel"),
        ("return nl.precise_schedule()", "nl.precise_schedule"),
        ("return nisa.tensor_copy_dynamic_src(x, x)", "nisa.tensor_copy_dynamic_src"),
        ("return nisa.tensor_copy_dynamic_dst(x, x)", "nisa.tensor_copy_dynamic_dst"),
        ("nisa.tensor_copy(x, x, mask=1)", "mask="),
        ("nisa.dma_copy(x, x, dst_rmw_op=1)", "dst_rmw_op="),
        ("nisa.register_move(x, imm=1)", "imm="),
        ("nki.jit(platform_target='trn2')", "platform_target="),
        ("return neuronxcc.nki.jit(x)", "neuronxcc.nki"),
        ("jitted(x)", "call of @nki.jit jitted"),
        ("@nki.jit\ndef inner(y):\n  return y", "call of @nki.jit inner"),
        ("@nki.jit()\ndef inner(y):\n  return y", "call of @nki.jit inner"),
        # Outside state: a compiled kernel may keep the value of its first run.
        *[(f"return {name}", f"outside state '{name.split('.')[0]}'") for name in (
            "LIST", "DICT", "SET", "BYTES", "ARRAY", "TORCH", "SPACE.n", "BOX.val.n")],
        ("return sys.path", "outside state 'sys.path'"),
        ("return Box.val", "outside state 'Box.val'"),
        ("return LIST\ndef inner(LIST):\n  return LIST", "outside state 'LIST'"),
    ]],
    ("nisa.nc_match_replace8(x, x, x, imm=0.0)", set(), set()),
    ("@nl.no_reorder\ndef inner(y):\n  return y", set(), set()),
    *[(f"return {name}", set(), set()) for name in (
        "NUMBER", "TUPLE", "TEXT", "SCALAR", "FROZEN.n", "COLOUR.red", "nl.tile_size.pmax",
        "nisa.engine.vector", "math.pi", "Box.number", "nl.add")],
    ("tiles = [x]\ntiles[0] = x", set(), set()),
    ("sizes = {}\nfor n in range(2):\n  sizes['a'] = n", set(), set()),
    ("def inner(LIST):\n  return LIST", set(), set()),
    ("LIST = [1]\nreturn LIST", set(), set()),
    ("while x:\n  pass", set(), {"while register"}),
    ("n = 0\nwhile n < 3:\n  n += 1", set(), set()),
    ("for n in nl.dynamic_range(4):\n  pass", set(), {"nl.dynamic_range"}),
]  # fmt: skip
HEAD = """
import dataclasses, enum, math, sys, types
import numpy as np
import torch
import nki, nki.isa as nisa, nki.language as nl
from nki.language import NKIObject
LIST, DICT, SET, BYTES = [1], {}, {1}, bytearray(1)
ARRAY, TORCH, SPACE = np.zeros(1), torch.zeros(1), types.SimpleNamespace(n=1)
NUMBER, TUPLE, TEXT, SCALAR = 1, (1, 2), "a", np.float32(1)
class Settings(NKIObject): pass
class Box:
    val, number = [1], 2
    def __init__(self): self.val = types.SimpleNamespace(n=1)
BOX = Box()
@dataclasses.dataclass(frozen=True)
class Frozen: n: int = 1
FROZEN = Frozen()
class COLOUR(enum.Enum): red = 1
@nki.jit
def jitted(x): return x
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The bodies of TABLE as functions k0, k1, ... of a real module."""
    text = HEAD
    for i, (body, _, _) in enumerate(TABLE):
        text += f"def k{i}(x):\n" + textwrap.indent(body, "  ") + "\n"
    path = tmp_path_factory.mktemp("lint") / "sim_lint_table.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[body for body, _, _ in TABLE])
def test_each_construct_alone(kernels, number):
    _, before, since = TABLE[number]
    kernel = getattr(kernels, f"k{number}")
    for version, expected in (("0.3", before), ("0.6", before), ("0.7", since)):
        found = {f.construct for f in lint(kernel, version)}
        # The attribute of a state is state as well, found under its longer name.
        found = {
            c for c in found if not c.startswith(("outside state 'SPACE.", "outside state 'BOX."))
        }
        if version < "0.4":  # names that went away later
            expected = expected - {f"nisa.tensor_copy_dynamic_{way}" for way in ("src", "dst")}
        assert found == expected, version


def test_signatures():
    def star(*args):
        pass

    def stars(**kwargs):
        pass

    def keyword(x, *, y=1):
        pass

    def helpers(x):
        def inner(*args, y=1, **kwargs):
            pass

    assert [f.construct for f in lint(star, "0.6")] == ["*args or **kwargs"]
    assert [f.construct for f in lint(stars, "0.6")] == ["*args or **kwargs"]
    assert [f.construct for f in lint(keyword, "0.6")] == ["keyword-only argument"]
    assert lint(helpers, "0.6") == []
    for fn in (star, stars, keyword):
        assert lint(fn, "0.7") == []


def test_code_of_installed_packages_is_not_read():
    def kernel(x):
        return inspect.unwrap(x), pytest.importorskip(x), np.pad(x)

    assert lint(kernel, "0.6") == []


@pytest.mark.parametrize("version", ["0.6", "0.7"])
def test_a_function_without_source_is_a_finding(version):
    names = {"nl": nl}
    exec("def written(x):\n    return [n for n in x]\n", names)
    anonymous = lambda x: x  # noqa: E731

    def kernel(x):
        return names_written(x)

    names_written = names["written"]
    for fn in (names["written"], anonymous, kernel):
        (finding,) = lint(fn, version)
        assert finding.construct.startswith("source not available of ")
    with pytest.raises(KernelError, match="source not available of written"):
        simulate(names["written"], version=version, strict_python=True)(np.ones((2, 2), np.float32))
    assert lint(good, version) == []


def test_0_7_takes_all_of_python_but_not_what_is_gone():
    constructs = {f.construct for f in lint(bad, "0.7")}
    assert constructs == {
        "float index", "buffer as a string", "assignment to tensor elements", "nl.arange", "mask=",
        "outside state 'STATE'", "call of @nki.jit jitted",
    }  # fmt: skip


def test_helpers_are_followed():
    def kernel(x):
        return helper(x)

    assert [f.construct for f in lint(kernel, "0.6")] == ["list comprehension"]


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
        simulate(kernel, version="0.6")(x)
    with pytest.raises(KernelError, match=r"test_sim_lint.py:\d+: list comprehension"):
        simulate(kernel, version="0.6", strict_python=True)(x)
    simulate(kernel, strict_python=True)(x)  # 0.7 takes all of Python
