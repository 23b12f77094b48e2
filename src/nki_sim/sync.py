"""Registers, dynamic loops, and what two cores of one launch say to each other."""

import contextlib
import linecache
import re

import numpy as np

from . import enums
from .dma import Side
from .dtypes import BY_NAME, INTEGERS, ITEMSIZE
from .errors import fail, kernel_line
from .machine import current_core, running
from .table import DMA, SB, Rule, inp, instruction, known_integers, out


class VirtualRegister:
    """A 32-bit register. Its value exists at run time only, so Python must not look at it."""

    def __init__(self, value=None, frozen=False):
        self.value, self.frozen = value, frozen

    def _refuse(self, *_):
        old = running() and current_core().version < "0.6"
        loops = "nl.dynamic_range or `while register:`" if old else "nl.fori_loop or nl.while_loop"
        raise TypeError(
            f"a register has no value at compile time: use {loops}, pass it as scalar_offset, or "
            "store it into an SBUF tensor and compute there"
        )

    def __bool__(self):
        """`while register:` is a dynamic loop before NKI 0.7; any other question is refused."""
        if running() and current_core().version < "0.7" and _asked_by_while():
            return _value(self) != 0
        return self._refuse()

    def __eq__(self, other):
        return False if other is None else self._refuse()

    def __ne__(self, other):
        return not self == other

    __hash__ = object.__hash__
    __int__ = __index__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = _refuse


def _asked_by_while():
    """True if the kernel's running line is `while NAME:`."""
    return bool(re.match(r"\s*while\s+\w+\s*:", linecache.getline(*kernel_line())))


class NkiScalar(VirtualRegister):
    """The register of NKI 0.7, which takes + - * as traced arithmetic."""

    def __add__(self, other):
        return NkiScalar(_wrap(self.value + _value(other)))

    def __sub__(self, other):
        return NkiScalar(_wrap(self.value - _value(other)))

    def __rsub__(self, other):
        return NkiScalar(_wrap(_value(other) - self.value))

    def __mul__(self, other):
        return NkiScalar(_wrap(self.value * _value(other)))

    __radd__, __rmul__ = __add__, __mul__


def _wrap(value):
    return (value + 2**31) % 2**32 - 2**31


def _value(x):
    if isinstance(x, VirtualRegister):
        if x.value is None:
            fail("a register is read before anything was written to it")
        return x.value
    return int(x)


def _new_register(value=None, frozen=False):
    kind = NkiScalar if current_core().version >= "0.7" else VirtualRegister
    return kind(value, frozen)


def register_alloc(x=None):
    """A fresh register, uninitialised or holding the integer x."""
    return _new_register(None if x is None else _wrap(int(x)))


def _check_writable(a):
    dst = a["dst"]
    if not isinstance(dst, VirtualRegister):
        return f"dst is {dst!r}"
    return "dst is the induction register of a loop" if dst.frozen else None


def _check_source(a):
    src = a["src"]
    if isinstance(src, (VirtualRegister, int, np.integer)):
        return None
    return f"src is {src!r}"


def _check_one_element(name):
    def check(a):
        t = a[name]
        return None if t.size == 1 and t.vector is None else f"{name} {t.describe()}"

    return Rule(f"{name} is a tensor of one element, not selected by a vector of indices", check)


WRITABLE = Rule("dst is a register, and not the induction register of a loop", _check_writable)
SOURCE = Rule("src is a register or an integer", _check_source)


@instruction("sync", rules=[WRITABLE, SOURCE], manual=True)
def register_move(dst, src):
    """dst = src, an integer or another register."""
    dst.value = _wrap(_value(src))
    return {}


@instruction(
    "sync",
    src=inp(DMA, INTEGERS),
    rules=[WRITABLE, _check_one_element("src")],
    manual=True,
)
def register_load(dst, src):
    """dst = the one integer element of a tensor in HBM or SBUF."""
    side = Side(src, "src", "register_load", skip=False)
    side.note(current_core(), write=False)
    (value,) = known_integers(side.t, "register_load", "src")
    dst.value = _wrap(int(value))
    return _moved(side, "hbm_read")


@instruction(
    "sync",
    dst=out(DMA, INTEGERS),
    rules=[SOURCE, _check_one_element("dst")],
    manual=True,
)
def register_store(dst, src):
    """The one element of tensor dst = the register (or integer) src.

    A 32-bit element takes the register's bits; the value must fit a narrower one.
    """
    kind, value = BY_NAME[dst.dtype], _wrap(_value(src))
    limits = np.iinfo(kind)
    if kind.itemsize == 4:
        value %= 2**32
    elif not limits.min <= value <= limits.max:
        fail(
            f"value {value} does not fit {dst.describe()}",
            rule=f"an element of {dst.dtype} is {limits.min} to {limits.max}",
            instruction="register_store",
            hint="store into an int32 tensor",
        )
    side = Side(dst, "dst", "register_store", skip=False)
    side.note(current_core(), write=True)
    bits = np.array(value, f"u{kind.itemsize}" if kind.itemsize == 4 else kind).view(kind)
    side.write(bits.reshape(side.t.shape), None)
    return _moved(side, "hbm_write")


def _moved(side, way):
    """What a trace records: the bytes of HBM that a sequencer reads or writes."""
    t = side.t
    return {way: {t.storage.label(): t.itemsize}} if t.storage.place == "hbm" else {}


def scalar_load(src):
    """NKI 0.7: the one integer element of a tensor as a scalar that takes + - *."""
    _needs_07("scalar_load")
    register = _new_register()
    register_load(register, src)
    return register


def scalar_store(dst, src):
    """NKI 0.7: the one element of tensor dst = the scalar src."""
    _needs_07("scalar_store")
    return register_store(dst, src)


def _needs_07(name):
    if current_core().version < "0.7":
        fail(f"{name} does not exist in NKI {current_core().version}", rule="added in NKI 0.7")


# ------------------------------------------------------------------ dynamic loops
def fori_loop(lower, upper, body_fun, step=1):
    """body_fun(i) for i in [lower, upper) with step; bounds may be registers, i is a register."""
    _loop_since()
    if not isinstance(step, int) or step < 1:
        fail(f"fori_loop step {step!r}", rule="step is a positive compile-time integer")
    for i in range(_value(lower), _value(upper), step):
        with _iteration():
            returned = body_fun(_new_register(i, frozen=True))
        if returned is not None:
            fail(
                f"fori_loop body returned {returned!r}",
                rule="the body returns nothing; state crosses iterations in SBUF or HBM tensors",
            )


def while_loop(init, body_fun):
    """Test, run body_fun(condition), which returns the next condition register; 0 ends."""
    _loop_since()
    condition = init
    while _value(condition) != 0:
        with _iteration():
            condition = body_fun(condition)
        if not isinstance(condition, VirtualRegister):
            fail(
                f"while_loop body returned {condition!r}",
                rule="the body returns the next condition register",
            )


@contextlib.contextmanager
def _iteration():
    """One run of a loop's body: on-chip tiles that are allocated in it end with it."""
    lives = current_core().lives
    first = len(lives)
    try:
        yield
    finally:  # also where `break` leaves a dynamic_range
        for life in lives[first:]:
            life.over = True


def _loop_since():
    if current_core().version < "0.6":
        fail(
            f"fori_loop and while_loop do not exist in NKI {current_core().version}",
            rule="added in NKI 0.6",
        )


def dynamic_range(start, stop=None, step=1):
    """The loop of NKI 0.3 to 0.6; gone in 0.7."""
    if current_core().version >= "0.7":
        fail(
            "dynamic_range does not exist in NKI 0.7",
            rule="removed in NKI 0.7",
            hint="use nl.fori_loop",
        )
    first, last = (0, start) if stop is None else (start, stop)
    for i in range(_value(first), _value(last), step):
        with _iteration():
            yield _new_register(i, frozen=True)


# ------------------------------------------------------------------ two cores
def _check_shared(a):
    from .machine import MemoryRegion

    region = a["data"].storage.region
    if current_core().launch.lnc > 1 and region is not MemoryRegion.shared_hbm:
        return f"data {a['data'].describe()}"
    return None


@instruction(
    "gpsimd",
    data=inp(("hbm",), reads=False),
    rules=[Rule("data lies in shared HBM (kernel inputs do)", _check_shared)],
    manual=True,
)
def core_barrier(data, cores, engine=enums.engine.gpsimd, name=None):
    """Neither core goes on before both are here; HBM written before it may be read after it.

    On a launch with one core it does nothing, as kernels of the NKI library expect.
    """
    core = current_core()
    if core.launch.lnc > 1:
        if cores not in ((0, 1), [0, 1]):
            fail(f"cores {cores!r}", rule="cores is (0, 1)", instruction="core_barrier")
        core.launch.barrier(core)
    return {}


def _check_two_cores(a):
    lnc = current_core().launch.lnc
    return None if lnc == 2 else f"a launch with LNC {lnc}"


def _check_exchange(a):
    src, dst = a["src"], a["dst"]
    if src.shape != dst.shape or src.dtype != dst.dtype:
        return f"src {src.describe()}, dst {dst.describe()}"
    return None


_SWAP_BYTES = {4: 1024, 2: 512, 1: 256}


def _check_gpsimd_dma(a):
    if a["dma_engine"] is not enums.dma_engine.gpsimd_dma:
        return None
    size = a["src"].size // a["src"].shape[0] * a["src"].itemsize
    limit = _SWAP_BYTES[ITEMSIZE[a["src"].dtype]]
    return f"{size} bytes a partition, limit {limit}" if size > limit else None


def _check_ranks(a):
    mine = current_core().index
    ranks = (a["send_to_rank"], a["recv_from_rank"])
    return None if ranks == (1 - mine, 1 - mine) else f"ranks {ranks} on core {mine}"


@instruction(
    "dma",
    src=inp(SB),
    dst=out(SB),
    rules=[
        Rule("LNC is 2", _check_two_cores),
        Rule("equal shape and dtype: src, dst", _check_exchange),
        Rule("each core sends to and receives from the other", _check_ranks),
        Rule(
            "gpsimd_dma: at most 1024/512/256 bytes a partition of 4/2/1-byte types",
            _check_gpsimd_dma,
        ),
    ],
    cost=lambda a: {"dma_bytes": a["src"].size * a["src"].itemsize},
)
def sendrecv(
    src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=enums.dma_engine.dma, name=None
):
    """This core's src goes to the other core's dst, and the other's src comes to this dst."""
    core = current_core()
    dst.np[...] = core.launch.exchange(core, np.array(src.np))
