"""One NeuronCore while a kernel runs: its memories, what is live in them, what was written.

A `Storage` is one allocation. It knows which of its bytes were ever written, so that reading
garbage is an error and not a plausible number, and when it was first and last accessed, which is
what `capacity.py` needs to say whether everything fits.
"""

import linecache
import math
import re
import threading
from enum import Enum

import numpy as np

from . import arch
from .dtypes import ITEMSIZE, name_of
from .errors import fail, kernel_line, variable_name


class MemoryRegion(Enum):
    """Where a tensor lives; `private_hbm` is another name of `hbm`."""

    sbuf = "sbuf"
    psum = "psum"
    hbm = "hbm"
    private_hbm = "hbm"
    shared_hbm = "shared_hbm"


# Instructions ask for "hbm" without caring who shares it.
PLACE = {
    MemoryRegion.sbuf: "sbuf",
    MemoryRegion.psum: "psum",
    MemoryRegion.hbm: "hbm",
    MemoryRegion.shared_hbm: "hbm",
}

CAPACITY = {"sbuf": arch.SBUF_BYTES, "psum": arch.PSUM_BANKS * arch.PSUM_BANK_BYTES}

_local = threading.local()


def current_core():
    """The core on which the calling thread's kernel runs."""
    core = getattr(_local, "core", None)
    if core is None:
        fail(
            "no kernel is running, so there is no NeuronCore to do this on",
            hint="call it inside a function decorated with @nki.jit",
        )
    return core


def running():
    return getattr(_local, "core", None) is not None


def set_current_core(core):
    _local.core = core


class Core:
    """State of one physical core: live bytes, peaks, and the register files of its engines."""

    def __init__(self, index, launch):
        self.index = index
        self.launch = launch
        self.version = launch.version
        self.trace = launch.trace
        self.shapes_only = launch.shapes_only
        self.clock = 0  # number of the instruction that runs
        self.lives = []  # of all on-chip tiles so far
        self.shared_allocations = 0  # position in the launch's list of shared HBM tensors
        self.scalar_accumulator = None  # 128 registers of the Scalar engine, shape [P, 1]
        self.vector_accumulator = None  # 128 registers of the Vector engine, shape [P, 1]
        self.accesses = []  # HBM accesses since the last barrier, for the race check (LNC 2)


class Life:
    """From which instruction to which an on-chip tile holds something: first and last access."""

    __slots__ = ("bytes", "dtype", "first", "last", "line", "name", "over", "place", "shape")

    def __init__(self, storage):
        self.place, self.bytes = storage.place, storage.partition_bytes
        self.shape, self.dtype, self.name = storage.shape, storage.dtype, storage.name
        self.first = self.last = None  # instruction numbers; None while nothing touched it
        self.over = False  # the dynamic loop's iteration that allocated it has ended
        self.line = kernel_line()

    def describe(self):
        name = self.name or assigned_name(self.line) or "(unnamed)"
        return f"'{name}' {self.dtype}{list(self.shape)}"


_UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4")}
_SET = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}


class ByteFlags:
    """One flag for each byte of a storage, kept as "none", "all" or a byte array.

    Flags are read and set through the tensor's own shape, strides and item size, so any view,
    also one that reinterprets the dtype, addresses exactly its own bytes.
    """

    __slots__ = ("all", "bytes", "size")

    def __init__(self, size, everything=False):
        self.size = size
        self.all = everything
        self.bytes = None

    def _view(self, t):
        item = ITEMSIZE[t.dtype]
        if self.bytes is None:
            self.bytes = np.zeros(self.size, np.uint8)
        strides = tuple(s * item for s in t.strides)
        return np.ndarray(t.shape, _UNSIGNED[item], self.bytes, t.offset * item, strides)

    def read(self, t):
        """True, False, or a bool array of t's shape when some elements are set and some not."""
        if self.all:
            return True
        if self.bytes is None:
            return False
        item = ITEMSIZE[t.dtype]
        view = self._view(t)
        if view.min() == _SET[item]:
            if t.is_whole():
                self.all, self.bytes = True, None
            return True
        return view == _SET[item]

    def set(self, t, where=None):
        if self.all:
            return
        if where is None and t.is_whole():
            self.all, self.bytes = True, None
            return
        view = self._view(t)
        if where is None:
            view[...] = _SET[ITEMSIZE[t.dtype]]
        else:
            view[where] = _SET[ITEMSIZE[t.dtype]]

    def clear(self, t):
        if self.all:
            self.all, self.bytes = False, np.full(self.size, 0xFF, np.uint8)
        if self.bytes is not None:
            self._view(t)[...] = 0


class Storage:
    """One allocation: its place, layout, bytes, and which bytes were written by what.

    On chip the layout is [partitions, partition_bytes], so the partition stride of every view is
    what one partition holds.
    """

    __slots__ = (
        "_data",
        "base",
        "by_matmul",
        "core",
        "dtype",
        "first_write",
        "is_input",
        "life",
        "name",
        "nbytes",
        "partition_bytes",
        "place",
        "region",
        "shape",
        "shown",
        "size",
        "unknown",
        "written",
    )

    def __init__(self, shape, dtype, region, name="", core=None, data=None, base=(0, 0)):
        self.shape, self.dtype, self.region, self.name = shape, dtype, region, name
        self.shown = None  # an HBM tensor's name in errors and traces, once something asked for it
        self.place = PLACE[region]
        self.core = core
        self.size = math.prod(shape)
        self.nbytes = self.size * ITEMSIZE[dtype]
        self._data = data
        self.written = ByteFlags(self.nbytes, everything=data is not None)
        self.by_matmul = ByteFlags(self.nbytes) if self.place == "psum" else None
        self.is_input = data is not None
        self.first_write = None  # source line, kept for kernel inputs only
        self.unknown = False  # shapes only: holds integers that depend on values not computed
        self.base = base  # (partition, byte) of a hand-placed tile
        if self.place != "hbm":
            self.partition_bytes = self.size // shape[0] * ITEMSIZE[dtype]
            if shape[0] > arch.PMAX:
                fail(
                    f"tile {self.describe()} has {shape[0]} partitions",
                    rule=f"SBUF and PSUM have {arch.PMAX} partitions (dimension 0)",
                )
            capacity = CAPACITY[self.place]
            if self.partition_bytes > capacity:
                fail(
                    f"tile {self.describe()} needs {self.partition_bytes:,} bytes a partition",
                    rule=f"trn2 has {capacity:,} usable bytes a partition in {self.place}",
                )
            self.life = Life(self)
            core.lives.append(self.life)

    @property
    def data(self):
        """The bytes, allocated at first use."""
        if self._data is None:
            self._data = np.empty(self.nbytes, np.uint8)
        return self._data

    def label(self):
        """What errors and traces call it; two HBM tensors of one launch never share a name."""
        if self.shown is not None:
            return self.shown
        name = self.name or variable_name(self) or "(unnamed)"
        if self.place == "hbm" and running():
            name = self.shown = current_core().launch.unique_name(name)
        return name

    def describe(self):
        return f"'{self.label()}' {self.dtype}{list(self.shape)} in {self.region.name}"

    def touch(self):
        """An instruction accesses this on-chip tile."""
        life = self.life
        if life.over:
            fail(
                f"tile {self.describe()} is used after the iteration that allocated it",
                rule="what the body of a dynamic loop allocates is used in that iteration only",
                hint="allocate it before the loop",
            )
        life.last = self.core.clock
        if life.first is None:
            life.first = life.last


def allocate(shape, dtype, region, name="", address=None):
    """A fresh storage on the current core; `shared_hbm` is one allocation for both cores."""
    core = current_core()
    if not isinstance(region, MemoryRegion):
        raise TypeError(f"buffer must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm, got {region!r}")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for n in shape:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            fail(f"shape {shape} is not a tuple of positive integers")
    if len(shape) < 2 and PLACE[region] != "hbm":
        fail(f"an on-chip tile needs a partition and a free dimension, got shape {shape}")
    shape = tuple(int(n) for n in shape)
    dtype = name_of(dtype)
    if PLACE[region] != "hbm":
        return Storage(shape, dtype, region, name, core, base=address or (0, 0))
    name = name or assigned_name(kernel_line())
    if region is MemoryRegion.shared_hbm:
        return core.launch.shared_storage(core, shape, dtype, name)
    return Storage(shape, dtype, region, name)


def assigned_name(line):
    """The variable that a kernel's source line assigns to: `out` in `out = nl.ndarray(...)`."""
    match = line and re.match(r"\s*(\w+)\s*=[^=]", linecache.getline(*line))
    return match.group(1) if match else ""
