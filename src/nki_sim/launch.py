"""One launch of a kernel: arguments in, one or two cores run, results out.

Two cores run as two threads of which only one moves at a time: a core runs until it waits for
the other, so a simulation is deterministic and races do not change its numbers. They are found
at the next barrier, by comparing which HBM bytes each core read and wrote since the last one.
"""

import ctypes
import threading

import numpy as np

from . import capacity, machine
from .dtypes import BY_NAME, INTEGERS, name_of
from .errors import KernelError, fail, place
from .machine import ByteFlags, Core, MemoryRegion, Storage
from .tensors import NkiTensor, row_major, span


class Launch:
    """What the cores of one kernel call share."""

    def __init__(self, lnc, version, trace):
        self.lnc, self.version, self.trace = lnc, version, trace
        self.shapes_only = trace is not None and trace.shapes_only
        self.shared = []  # shared HBM tensors in program order
        self.cores = [Core(i, self) for i in range(lnc)]
        self.turns = [threading.Semaphore(0) for _ in range(lnc)]
        self.waiting = [None] * lnc  # "barrier", an array to send, or None
        self.received = [None] * lnc
        self.finished = [False] * lnc
        self.failure = None
        self.names = {}  # name -> how many HBM tensors were given it

    def unique_name(self, name):
        """`name` for the first HBM tensor that asks for it, then "name (2)" and so on."""
        count = self.names[name] = self.names.get(name, 0) + 1
        return name if count == 1 else f"{name} ({count})"

    # ------------------------------------------------------------------ shared HBM
    def shared_storage(self, core, shape, dtype, name):
        """The n-th shared allocation of the program is one tensor for both cores."""
        at = core.shared_allocations
        core.shared_allocations += 1
        if at == len(self.shared):
            self.shared.append(Storage(shape, dtype, MemoryRegion.shared_hbm, name))
        storage = self.shared[at]
        if (storage.shape, storage.dtype) != (shape, dtype):
            fail(
                f"core {core.index} allocates shared HBM {dtype}{list(shape)} where the other core "
                f"allocated {storage.describe()}",
                rule="both cores run the same program, so shared tensors pair up in order",
            )
        return storage

    # ------------------------------------------------------------------ running
    def run(self, body):
        """body() on every core; returns core 0's result."""
        if self.lnc == 1:
            result = self._run_core(0, body)
            capacity.check(self.cores[0])
            return result
        results = [None] * self.lnc

        def work(index):
            self.turns[index].acquire()
            try:
                if self.failure is None:
                    results[index] = self._run_core(index, body)
            except BaseException as error:
                if self.failure is None:
                    self.failure = error
            self.finished[index] = True
            self.turns[1 - index].release()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.lnc)]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        self.check_races()
        for core in self.cores:
            capacity.check(core)
        return results[0]

    def _run_core(self, index, body):
        before = getattr(machine._local, "core", None)
        machine.set_current_core(self.cores[index])
        try:
            with np.errstate(all="ignore"):  # engines raise no flags: inf and NaN are values
                return body()
        finally:
            machine.set_current_core(before)

    def barrier(self, core):
        self._meet(core, "barrier")

    def exchange(self, core, array):
        """Give `array` to the other core and return the one it gives."""
        self._meet(core, array)
        return self.received[core.index]

    def _meet(self, core, what):
        """Wait until the other core waits for the same thing, then settle it once."""
        me, other = core.index, 1 - core.index
        self.waiting[me] = what
        theirs = self.waiting[other]
        if theirs is None:
            if self.finished[other]:
                fail(
                    f"core {me} waits for core {other}, which has finished",
                    rule="both cores reach every barrier and sendrecv",
                )
            self.turns[other].release()
            self.turns[me].acquire()
            if self.failure is not None:
                raise KernelError("stopped: the other core failed")
            if self.waiting[me] is not None:
                fail(
                    f"core {me} waits for core {other}, which has finished",
                    rule="both cores reach every barrier and sendrecv",
                )
            return
        if isinstance(theirs, str) != isinstance(what, str):
            fail(
                "one core waits at a barrier, the other at a sendrecv",
                rule="both cores run the same program",
            )
        if isinstance(what, str):
            self.check_races()
        else:
            if theirs.shape != what.shape or theirs.dtype != what.dtype:
                fail(
                    f"sendrecv of {what.dtype}{list(what.shape)} against "
                    f"{theirs.dtype}{list(theirs.shape)}",
                    rule="equal shape and dtype on both cores",
                )
            self.received[me], self.received[other] = theirs, what
        self.waiting[me] = self.waiting[other] = None

    # ------------------------------------------------------------------ races
    def check_races(self):
        """HBM bytes written by one core and touched by the other since the last barrier."""
        by_storage = {}
        for core in self.cores:
            for access in core.accesses:
                both = by_storage.setdefault(id(access[0]), ([], []))
                both[core.index].append(access)
            core.accesses = []
        for zero, one in by_storage.values():
            for writer, other in ((zero, one), (one, zero)):
                self._compare([a for a in writer if a[1]], other)

    def _compare(self, writes, others):
        if not writes or not others:
            return
        storage = writes[0][0]
        writes, others = _overlapping(writes, others), _overlapping(others, writes)
        if not writes or not others:
            return
        touched, flags = _flags(storage, writes), _flags(storage, others)
        common = touched & flags
        if not common.any():
            return
        at = int(np.argmax(common))
        element = at // np.dtype("u1").itemsize // max(1, storage.nbytes // storage.size)
        index = [int(i) for i in np.unravel_index(element, storage.shape)]
        first, second = _toucher(writes, at), _toucher(others, at)
        verb = "writes" if second[1] else "reads"
        raise KernelError(
            f"race between the two cores on {storage.describe()} at element {index}:\n"
            f"  one core writes it at {place(first[5])}\n"
            f"  the other {verb} it at {place(second[5])}, with no barrier between\n"
            "  rule: HBM that one core wrote is read by the other only after core_barrier"
        )


def _interval(access):
    """First and last element address that an access may touch."""
    _, _, t, rows, valid, _ = access
    first = 1 if rows is not None else 0
    low, high = span(t.shape[first:], t.strides[first:])
    if rows is None:
        return t.offset + low, t.offset + high
    keep = rows if valid is None else rows[valid]
    return (int(keep.min()) + low, int(keep.max()) + high) if len(keep) else (0, -1)


def _overlapping(accesses, others):
    """The accesses whose address interval meets one of the others': cheap, and drops most."""
    spans = np.array(sorted(_interval(a) for a in others))
    highest = np.maximum.accumulate(spans[:, 1])

    def meets(access):
        low, high = _interval(access)
        at = np.searchsorted(spans[:, 0], high, side="right")
        return at > 0 and highest[at - 1] >= low

    return [a for a in accesses if meets(a)]


def _mark(flags, access):
    storage, _, t, rows, valid, _ = access
    if rows is None:
        flags.set(t)
        return
    keep = rows if valid is None else rows[valid]
    for start in keep:
        flags.set(NkiTensor(storage, t.dtype, t.shape[1:], t.strides[1:], int(start)))


def _flags(storage, accesses):
    flags = ByteFlags(storage.nbytes)
    for access in accesses:
        _mark(flags, access)
    if flags.all:
        return np.ones(storage.nbytes, bool)
    return flags.bytes != 0 if flags.bytes is not None else np.zeros(storage.nbytes, bool)


def _toucher(accesses, at):
    return next(a for a in accesses if _flags(a[0], [a])[at])


# ---------------------------------------------------------------------- arguments and results
class Argument:
    """One array argument: the caller's object, and its bytes as a kernel input."""

    def __init__(self, name, value, lnc, shapes_only):
        self.name, self.value = name, value
        self.torch = type(value).__module__.split(".")[0] == "torch"
        self.dtype = name_of(value.dtype)
        self.copied = False
        data = None
        if not shapes_only or self.dtype in INTEGERS:
            array = _torch_bits(value) if self.torch else value
            self.contiguous = np.ascontiguousarray(array)
            self.copied = not np.shares_memory(self.contiguous, array)
            data = self.contiguous.reshape(-1).view(np.uint8)
            data.flags.writeable = array.flags.writeable
        region = MemoryRegion.shared_hbm if lnc > 1 else MemoryRegion.hbm
        shape = tuple(value.shape) or (1,)
        self.storage = Storage(shape, self.dtype, region, name, data=data)
        self.storage.is_input = True
        self.storage.written.all = True
        self.tensor = NkiTensor(self.storage, self.dtype, shape, row_major(shape))

    def write_back(self):
        """A non-contiguous array was copied on the way in, so a change is copied back."""
        if self.copied and self.storage.first_write is not None:
            target = _torch_bits(self.value) if self.torch else self.value
            target[...] = self.contiguous.reshape(target.shape)


def is_array(value):
    return isinstance(value, np.ndarray) or (
        type(value).__module__.split(".")[0] == "torch" and hasattr(value, "data_ptr")
    )


_TORCH_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}


def _torch_bits(tensor):
    """A torch CPU tensor's memory as numpy; dtypes that numpy lacks are viewed as integers."""
    if tensor.device.type != "cpu":
        raise TypeError(f"nki_sim takes CPU tensors, got one on {tensor.device}")
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(_TORCH_BITS.get(name, name))
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    # Not tensor.numpy(): from then on torch refuses to resize the tensor's storage, which is how
    # FSDP frees the parameters that it has gathered.
    strides = tensor.stride()
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as an array that looks into it
    return np.ndarray(tuple(tensor.shape), dtype, memory, 0, [s * dtype.itemsize for s in strides])


def to_caller(t, as_torch):
    """A result tensor as a numpy array or torch tensor that shares the simulated HBM."""
    array = t.np.view(np.bool_) if t.dtype == "bool_" else t.np
    if not as_torch:
        return array
    import torch

    name = t.dtype.rstrip("_")
    bits = _TORCH_BITS.get(name)
    tensor = torch.from_numpy(array.view(bits) if bits else array)
    return tensor.view(getattr(torch, name)) if bits else tensor


def shape_only(t, as_torch):
    """A result without data: a meta tensor, or a numpy view of one zero in the right shape."""
    if as_torch:
        import torch

        return torch.empty(t.shape, dtype=getattr(torch, t.dtype.rstrip("_")), device="meta")
    return np.broadcast_to(np.zeros((), BY_NAME[t.dtype]), t.shape)
