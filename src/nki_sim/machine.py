"""One NeuronCore while a kernel runs: its memories, what is live in them, what was written.

A `Storage` is one allocation. It knows which of its bytes were ever written, so that reading
garbage is an error and not a plausible number, and it gives its place back when Python drops it.
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
        self.sbuf_live = self.sbuf_peak = 0
        self.psum_live = self.psum_peak = 0
        self.bank_free = [arch.PSUM_BANK_BYTES] * arch.PSUM_BANKS
        self.shared_allocations = 0  # position in the launch's list of shared HBM tensors
        self.scalar_accumulator = None  # 128 registers of the Scalar engine, shape [P, 1]
        self.vector_accumulator = None  # 128 registers of the Vector engine, shape [P, 1]
        self.accesses = []  # HBM accesses since the last barrier, for the race check (LNC 2)

    def take(self, storage):
        """Book an on-chip allocation; capacity overrun is an error (the compiler would spill)."""
        need = storage.partition_bytes
        if storage.place == "sbuf":
            if self.sbuf_live + need > arch.SBUF_BYTES:
                fail(
                    f"SBUF overrun: tile {storage.describe()} needs {need:,} bytes a partition, "
                    f"{self.sbuf_live:,} are in use by live tiles",
                    rule=f"trn2 has {arch.SBUF_BYTES:,} usable SBUF bytes a partition",
                    hint="smaller tiles, or drop tiles that are no longer needed",
                )
            self.sbuf_live += need
            self.sbuf_peak = max(self.sbuf_peak, self.sbuf_live)
        else:
            storage.banks = self._find_banks(storage, need)
            self.psum_live += need
            self.psum_peak = max(self.psum_peak, self.psum_live)

    def _find_banks(self, storage, need):
        """Small tiles share a bank, larger ones take whole banks. Returns [(bank, bytes)]."""
        if need <= arch.PSUM_BANK_BYTES:
            found = [b for b, free in enumerate(self.bank_free) if free >= need][:1]
            taken = [(b, need) for b in found]
            enough = bool(found)
        else:
            count = math.ceil(need / arch.PSUM_BANK_BYTES)
            empty = [b for b, free in enumerate(self.bank_free) if free == arch.PSUM_BANK_BYTES]
            taken = [(b, arch.PSUM_BANK_BYTES) for b in empty[:count]]
            enough = len(taken) == count
        if not enough:
            fail(
                f"PSUM overrun: tile {storage.describe()} needs {need:,} bytes a partition, "
                f"{self.psum_live:,} are in use, free bytes by bank: {self.bank_free}",
                rule=f"trn2 has {arch.PSUM_BANKS} PSUM banks of {arch.PSUM_BANK_BYTES:,} bytes "
                "a partition",
                hint="copy finished results to SBUF and drop their PSUM tiles",
            )
        for bank, size in taken:
            self.bank_free[bank] -= size
        return taken

    def give_back(self, storage):
        if storage.place == "sbuf":
            self.sbuf_live -= storage.partition_bytes
        else:
            self.psum_live -= storage.partition_bytes
            for bank, size in storage.banks:
                self.bank_free[bank] += size


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

    On chip the layout is [partitions, bytes]: `free` is the element count of one partition, which
    is also the partition stride of every view.
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "banks",
        "base",
        "by_matmul",
        "core",
        "dtype",
        "first_write",
        "free",
        "is_input",
        "name",
        "nbytes",
        "partition_bytes",
        "partitions",
        "place",
        "region",
        "shape",
        "size",
        "unknown",
        "written",
    )

    def __init__(self, shape, dtype, region, name="", core=None, data=None, base=(0, 0)):
        self.shape, self.dtype, self.region, self.name = shape, dtype, region, name
        self.place = PLACE[region]
        self.core = None  # set once booked, so that a failed booking is not given back
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
            self.partitions = shape[0]
            self.free = self.size // shape[0]
            self.partition_bytes = self.free * ITEMSIZE[dtype]
            if shape[0] > arch.PMAX:
                fail(
                    f"tile {self.describe()} has {shape[0]} partitions",
                    rule=f"SBUF and PSUM have {arch.PMAX} partitions (dimension 0)",
                )
            core.take(self)
            self.core = core

    @property
    def data(self):
        """The bytes, allocated at first use."""
        if self._data is None:
            self._data = np.empty(self.nbytes, np.uint8)
        return self._data

    def label(self):
        return self.name or variable_name(self) or "(unnamed)"

    def describe(self):
        return f"'{self.label()}' {self.dtype}{list(self.shape)} in {self.region.name}"

    def __del__(self):
        if getattr(self, "core", None) is not None:
            self.core.give_back(self)


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
    name = name or _assigned_name()
    if region is MemoryRegion.shared_hbm:
        return core.launch.shared_storage(core, shape, dtype, name)
    return Storage(shape, dtype, region, name)


def _assigned_name():
    """The variable that the kernel's source line assigns to: `out` in `out = nl.ndarray(...)`."""
    where = kernel_line()
    match = where and re.match(r"\s*(\w+)\s*=[^=]", linecache.getline(*where))
    return match.group(1) if match else ""
