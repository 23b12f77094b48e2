"""`NkiTensor`: a typed, strided view of a storage. Every view aliases; none copies.

Element (i0, i1, ...) lives at `offset + sum(strides[k] * i_k)`, counted in elements of `dtype`.
On chip, dimension 0 is the partition and no view may move, split or broadcast it.
Rules: NKI language guide (indexing), nki-aps (`.ap`), and the method texts of `NkiTensor`.
"""

import math

import numpy as np

from .dtypes import BY_NAME, ITEMSIZE, name_of
from .errors import fail
from .machine import MemoryRegion, allocate, current_core


class NkiTensor:
    """A view of HBM, SBUF or PSUM: `shape`, `strides`, `offset`, `dtype`, `buffer`, `name`."""

    __slots__ = (
        "_np",
        "_whole",
        "dtype",
        "offset",
        "scalar",
        "shape",
        "size",
        "storage",
        "strides",
        "vector",
    )

    def __init__(self, storage, dtype, shape, strides, offset=0, scalar=None, vector=None):
        self.storage, self.dtype = storage, dtype
        self.shape, self.strides, self.offset = shape, strides, offset
        self.size = math.prod(shape)
        self.scalar = scalar  # (index, multiplier): one address added at run time
        self.vector = vector  # (index tensor, multiplier): one address for each row
        self._np = self._whole = None

    # ------------------------------------------------------------------ queries
    @property
    def buffer(self):
        return self.storage.region

    @property
    def name(self):
        return self.storage.name

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def itemsize(self):
        return ITEMSIZE[self.dtype]

    def on_chip(self):
        return self.storage.place != "hbm"

    def is_indirect(self):
        return self.scalar is not None or self.vector is not None

    def is_contiguous(self):
        """Row-major without gaps; on chip the partition dimension is not part of the question."""
        first = 1 if self.on_chip() else 0
        return self.strides[first:] == row_major(self.shape[first:]) or all(
            n == 1 or s == want
            for n, s, want in zip(
                self.shape[first:], self.strides[first:], row_major(self.shape[first:]), strict=True
            )
        )

    def is_whole(self):
        """True if this view is every byte of the storage, each once, in order."""
        if self._whole is None:
            self._whole = (
                self.size * ITEMSIZE[self.dtype] == self.storage.nbytes
                and self.strides == row_major(self.shape)
                and not self.is_indirect()
            )
        return self._whole

    def get_pattern(self):
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def start_partition(self):
        return self.storage.base[0] + self.offset * self.itemsize // self.storage.partition_bytes

    @property
    def np(self):
        """The view as a numpy array that shares the storage."""
        if self._np is None:
            item = ITEMSIZE[self.dtype]
            strides = tuple([s * item for s in self.strides])
            self._np = np.ndarray(
                self.shape, BY_NAME[self.dtype], self.storage.data, self.offset * item, strides
            )
        return self._np

    def describe(self):
        return f"'{self.storage.label()}' {self.dtype}{list(self.shape)} in {self.buffer.name}"

    __repr__ = describe

    def __bool__(self):
        raise TypeError("a tensor has no value at compile time: use a dynamic loop or a select")

    def __eq__(self, other):
        """Only `== None` has an answer at compile time; `in` asks the same question."""
        if other is None:
            return False
        raise TypeError(
            "a tensor has no value at compile time, so == and != compare it with None only: use "
            "nl.equal, or `is` for the same view"
        )

    def __ne__(self, other):
        return not self == other

    __hash__ = object.__hash__

    def __setitem__(self, key, value):
        fail(
            f"assignment to elements of {self.describe()}",
            hint="write with an instruction: nisa.tensor_copy, nisa.memset or nisa.dma_copy",
        )

    def inside(self):
        """True if every address lies in the storage and, on chip, in the partition it starts in."""
        low, high = span(self.shape, self.strides)
        if self.offset + low < 0 or (self.offset + high + 1) * self.itemsize > self.storage.nbytes:
            return False
        if not self.on_chip():
            return True
        free = self.storage.partition_bytes // self.itemsize
        low, high = span(self.shape[1:], self.strides[1:])
        return self.offset % free + low >= 0 and self.offset % free + high < free

    # ------------------------------------------------------------------ indexing
    def __getitem__(self, key):
        """Basic indexing: on chip an integer on dimension 0 keeps size 1 and two dims remain."""
        keys = self._full_key(key)
        chip = self.on_chip()
        offset, shape, strides = self.offset, [], []
        for dim, k in enumerate(keys):
            n, stride = self.shape[dim], self.strides[dim]
            if k.__class__ is slice:
                if k.start is None and k.stop is None and k.step is None:
                    shape.append(n)
                    strides.append(stride)
                    continue
                start, stop, step = self._bounds(dim, k)
                self._not_indirect(dim)
                offset += start * stride
                shape.append(-(-(stop - start) // step))
                strides.append(stride * step)
            else:
                self._not_indirect(dim)
                offset += self._index(dim, k) * stride
                if chip and dim == 0:
                    shape.append(1)
                    strides.append(stride)
        if len(shape) < (2 if chip else 1):
            shape.append(1)
            strides.append(1)
        return self._derive(tuple(shape), tuple(strides), offset)

    def _full_key(self, key):
        keys = key if key.__class__ is tuple else (key,)
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            missing = len(self.shape) - len(keys) + 1
            keys = keys[:at] + (slice(None),) * missing + keys[at + 1 :]
        if len(keys) > len(self.shape):
            fail(f"{len(keys)} indices for {self.describe()}")
        return keys + (slice(None),) * (len(self.shape) - len(keys))

    def _bounds(self, dim, k):
        n = self.shape[dim]
        start = 0 if k.start is None else self._static(dim, k.start)
        stop = n if k.stop is None else self._static(dim, k.stop)
        step = 1 if k.step is None else self._static(dim, k.step)
        start, stop = start + n * (start < 0), stop + n * (stop < 0)
        if not (0 <= start < stop <= n and step >= 1):
            fail(
                f"slice {k.start}:{k.stop}:{step} on dimension {dim} of {self.describe()}",
                rule=f"0 <= start < end <= {n} and step >= 1; slices are not clipped as in Python",
            )
        return start, stop, step

    def _index(self, dim, k, lowest=None):
        k, n = self._static(dim, k), self.shape[dim]
        lowest = -n if lowest is None else lowest
        if not lowest <= k < n:
            fail(
                f"index {k} is out of bounds on dimension {dim} of {self.describe()}",
                rule=f"{lowest} <= index < {n}",
            )
        return k + n * (k < 0)

    def _static(self, dim, k):
        if _is_int(k):
            return int(k)
        fail(
            f"index {k!r} on dimension {dim} of {self.describe()} is not a compile-time integer",
            hint="integer division is //; a run-time index goes through .ap(scalar_offset=...)",
        )

    def _not_indirect(self, dim):
        if self.vector is not None and dim == 0:
            fail(
                f"dimension 0 of {self.describe()} is selected by a vector of indices",
                rule="the indirect dimension cannot be sliced or selected again",
            )

    def _derive(self, shape, strides, offset, dtype=None):
        return self._two_dims(
            NkiTensor(
                self.storage, dtype or self.dtype, shape, strides, offset, self.scalar, self.vector
            )
        )

    def _two_dims(self, view):
        if len(view.shape) < 2 and view.on_chip():
            fail(
                f"view of {self.describe()} with shape {view.shape}",
                rule="an on-chip view has a partition and at least one free dimension",
                hint="t[:, i] keeps a free dimension of size 1",
            )
        return view

    def _dim(self, dim, what, room=0):
        """A dimension counted from the front; `room` is 1 where a new one may come last."""
        count = self.ndim + room
        if not _is_int(dim) or not -count <= dim < count:
            fail(
                f"{what} of dimension {dim!r} of {self.describe()}",
                rule=f"a dimension is 0 to {count - 1}, or -1 to -{count} from the end",
            )
        return int(dim) % count

    def _free_dim(self, dim, what, room=0):
        """`_dim` for methods that may not touch the partition."""
        dim = self._dim(dim, what, room)
        if dim == 0 and self._keeps_dim0():
            fail(
                f"{what} on dimension 0 of {self.describe()}",
                rule="the partition dimension cannot be moved, split, merged or broadcast by a "
                "view; data crosses partitions by DMA, transpose, matmul or shuffle",
            )
        return dim

    def _sizes(self, shape, what, infer=False):
        """The sizes of new dimensions; with infer one of them may be -1."""
        shape = tuple(shape)
        given = [n for n in shape if not (infer and _is_int(n) and n == -1)]
        if len(given) < len(shape) - 1 or any(not _is_int(n) or n < 1 for n in given):
            fail(
                f"{what} of {self.describe()} to sizes {shape}",
                rule="sizes are integers ≥ 1" + (", one of them may be -1" if infer else ""),
            )
        return tuple(int(n) for n in shape)

    def _direct(self, what):
        if self.is_indirect():
            fail(
                f"{what} on {self.describe()}, whose address is known at run time only",
                rule=f"{what} is not supported after select, vector_select or .ap with a run-time "
                "index",
                hint=f"call {what} first and give the index last",
            )

    # ------------------------------------------------------------------ view methods
    def reshape(self, shape):
        shape = self._sizes(shape, "reshape")
        if math.prod(shape) != self.size:
            fail(
                f"reshape of {self.describe()} to {shape}",
                rule="the number of elements must stay the same",
            )
        if self._keeps_dim0() and shape[0] != self.shape[0]:
            fail(
                f"reshape of {self.describe()} to {shape}",
                rule="the partition dimension (0) must stay as it is",
            )
        if self._keeps_dim0():
            inner = regroup(self.shape[1:], self.strides[1:], shape[1:])
            strides = None if inner is None else (self.strides[0], *inner)
        else:
            strides = regroup(self.shape, self.strides, shape)
        if strides is None:
            fail(
                f"reshape of {self.describe()} with strides {self.strides} to {shape}",
                rule="a view cannot copy: the dimensions merged must be contiguous",
            )
        return self._derive(shape, strides, self.offset)

    def _keeps_dim0(self):
        return self.on_chip() or self.vector is not None

    def reshape_dim(self, dim, shape):
        _since("0.5", "reshape_dim()")
        dim = self._free_dim(dim, "reshape_dim")
        shape = self._sizes(shape, "reshape_dim", infer=True)
        known = math.prod(n for n in shape if n != -1)
        parts = tuple(self.shape[dim] // known if n == -1 else n for n in shape)
        if math.prod(parts) != self.shape[dim]:
            fail(
                f"reshape_dim of dimension {dim} of {self.describe()} into {shape}",
                rule="the product must equal the dimension",
            )
        strides = tuple(s * self.strides[dim] for s in row_major(parts))
        return self._derive(
            self.shape[:dim] + parts + self.shape[dim + 1 :],
            self.strides[:dim] + strides + self.strides[dim + 1 :],
            self.offset,
        )

    def flatten_dims(self, start_dim, end_dim):
        _since("0.5", "flatten_dims()")
        start_dim = self._free_dim(start_dim, "flatten_dims")
        end_dim = self._dim(end_dim, "flatten_dims")
        if end_dim < start_dim:
            fail(
                f"flatten_dims {start_dim}..{end_dim} of {self.describe()}",
                rule="the first dimension comes before the last one",
            )
        group = slice(start_dim, end_dim + 1)
        count = math.prod(self.shape[group])
        merged = regroup(self.shape[group], self.strides[group], (count,))
        if merged is None:
            fail(
                f"flatten_dims {start_dim}..{end_dim} of {self.describe()} with strides "
                f"{self.strides}",
                rule="the dimensions must be contiguous in memory",
            )
        return self._derive(
            (*self.shape[:start_dim], count, *self.shape[end_dim + 1 :]),
            (*self.strides[:start_dim], *merged, *self.strides[end_dim + 1 :]),
            self.offset,
        )

    def permute(self, dims):
        _since("0.5", "permute()")
        if sorted(dims) != list(range(self.ndim)):
            fail(
                f"permute {tuple(dims)} of {self.describe()}",
                rule="dims must name every dimension once",
            )
        if dims[0] != 0:
            self._free_dim(0, "permute")
        return self._derive(
            tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims), self.offset
        )

    def broadcast(self, dim, size):
        _since("0.5", "broadcast()")
        dim = self._free_dim(dim, "broadcast")
        (size,) = self._sizes((size,), "broadcast")
        if self.shape[dim] != 1:
            fail(
                f"broadcast of dimension {dim} of {self.describe()}",
                rule="the dimension must have size 1",
            )
        return self._derive(
            (*self.shape[:dim], size, *self.shape[dim + 1 :]),
            (*self.strides[:dim], 0, *self.strides[dim + 1 :]),
            self.offset,
        )

    def expand_dim(self, dim):
        _since("0.5", "expand_dim()")
        dim = self._free_dim(dim, "expand_dim", room=1)
        return self._derive(
            (*self.shape[:dim], 1, *self.shape[dim:]),
            (*self.strides[:dim], 1, *self.strides[dim:]),
            self.offset,
        )

    def squeeze_dim(self, dim):
        _since("0.5", "squeeze_dim()")
        dim = self._free_dim(dim, "squeeze_dim")
        if self.shape[dim] != 1:
            fail(
                f"squeeze_dim of dimension {dim} of {self.describe()}",
                rule="the dimension must have size 1",
            )
        return self._derive(
            self.shape[:dim] + self.shape[dim + 1 :],
            self.strides[:dim] + self.strides[dim + 1 :],
            self.offset,
        )

    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None):
        """Split, reorder and merge named dimensions, as einops does, with tuples for groups."""
        _since("0.5", "rearrange()")
        sizes, view, names = dict(fixed_sizes or {}), self, []
        self._sizes(sizes.values(), "rearrange")
        if len(src_pattern) != self.ndim:
            fail(
                f"rearrange of {self.describe()} from {src_pattern}",
                rule="the first pattern names every dimension",
            )
        for dim, group in enumerate(src_pattern):
            group = (group,) if isinstance(group, str) else tuple(group)
            unknown = [g for g in group if g not in sizes]
            if len(unknown) > 1:
                fail(f"rearrange cannot infer the sizes of {unknown} in {src_pattern}")
            known = math.prod(sizes[g] for g in group if g in sizes)
            for g in unknown:
                sizes[g] = self.shape[dim] // known
            if len(group) > 1:
                view = view.reshape_dim(len(names), tuple(sizes[g] for g in group))
            names += group
        flat = [g for group in dst_pattern for g in ((group,) if isinstance(group, str) else group)]
        if sorted(flat) != sorted(names):
            fail(f"rearrange from {src_pattern} to {dst_pattern}: the names differ")
        view = view.permute(tuple(names.index(g) for g in flat))
        for dim, group in enumerate(dst_pattern):
            if not isinstance(group, str):
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    def slice(self, dim, start, end, step=1):
        _since("0.5", "slice()")
        keys = [slice(None)] * self.ndim
        dim = self._dim(dim, "slice")
        if self._static(dim, start) < 0 or self._static(dim, end) < 0:
            fail(
                f"slice {start}:{end} on dimension {dim} of {self.describe()}",
                rule=f"0 <= start < end <= {self.shape[dim]}; slice() counts from the front",
            )
        keys[dim] = slice(start, end, step)
        return self[tuple(keys)]

    def select(self, dim, index):
        """Drop `dim` by taking one index of it: an integer, or a register or (1,1) tensor."""
        _since("0.5", "select()")
        dim = self._free_dim(dim, "select")
        self._not_indirect(dim)
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        if isinstance(index, (int, float, np.number)):
            index = self._index(dim, index, lowest=0)
            return self._derive(shape, strides, self.offset + index * self.strides[dim])
        self._not_twice()
        view = self._derive(shape, strides, self.offset)
        view.scalar = (_run_time_index(index, self), self.strides[dim])
        return view

    def vector_select(self, dim, vector_offset):
        _since("0.5", "vector_select()")
        self._vector_rules(dim, vector_offset)
        return NkiTensor(
            self.storage,
            self.dtype,
            (vector_offset.shape[0], *self.shape[1:]),
            (0, *self.strides[1:]),
            self.offset,
            vector=(vector_offset, self.strides[0]),
        )

    def indirect(self, index, num_elem=None):
        fail(f".indirect() on {self.describe()}", rule="indirect views are trn3 only")

    def _not_twice(self):
        if self.is_indirect():
            fail(f"second run-time index on {self.describe()}", rule="one dynamic index a tensor")

    def _vector_rules(self, dim, index):
        self._not_twice()
        if dim != 0 or self.on_chip():
            fail(
                f"vector of indices on dimension {dim} of {self.describe()}",
                rule="a vector of indices selects rows (dimension 0) of an HBM tensor",
            )
        ok = isinstance(index, NkiTensor) and index.storage.place == "sbuf" and index.ndim == 2
        if not ok or index.shape[1] != 1 or index.dtype not in ("int32", "uint32"):
            found = index.describe() if isinstance(index, NkiTensor) else repr(index)
            fail(
                f"vector_offset {found}",
                rule="an int32 or uint32 SBUF tensor [P, 1], one row index a partition",
            )

    def view(self, dtype):
        """The same bytes as another dtype; the last dimension is rescaled by the size ratio."""
        self._direct("view")
        dtype = name_of(dtype)
        old, new = self.itemsize, ITEMSIZE[dtype]
        if old == new:
            return self._derive(self.shape, self.strides, self.offset, dtype)
        if self.strides[-1] != 1:
            fail(
                f"view of {self.describe()} as {dtype}",
                rule="the last dimension must be contiguous",
            )
        bytes_of = [self.shape[-1] * old, self.offset * old, *[s * old for s in self.strides[:-1]]]
        if any(b % new for b in bytes_of):
            fail(
                f"view of {self.describe()} as {dtype}",
                rule="sizes and strides in bytes must be multiples of the new item size",
            )
        last, offset, *strides = [b // new for b in bytes_of]
        return self._derive((*self.shape[:-1], last), (*strides, 1), offset, dtype)

    reinterpret_cast = view

    # ------------------------------------------------------------------ access patterns
    def ap(
        self,
        pattern,
        offset=None,
        scalar_offset=None,
        vector_offset=None,
        indirect_dim=0,
        dtype=None,
    ):
        """A view of the *storage* given by `[[stride, count], ...]` and an element offset.

        It ignores the shape and strides of the receiver, as the documentation says. The pages
        disagree on what happens to the offset of a sliced receiver, so such a receiver is refused.
        A run-time index is multiplied by the product of the receiver's shape after `indirect_dim`.
        """
        self._direct(".ap")
        if self.offset != 0:
            fail(
                f".ap on a view of {self.describe()} that starts at element {self.offset}",
                rule=".ap addresses the storage; NKI's pages disagree on a sliced receiver",
                hint="call .ap on the whole tensor and put the start into offset=",
            )
        dtype = self.dtype if dtype is None else name_of(dtype)
        for pair in pattern:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                fail(
                    f".ap pattern {pattern} on {self.describe()}",
                    rule="a pattern is [[stride, count], ...], one pair a dimension",
                )
            self._static(0, pair[0])
            if self._static(0, pair[1]) < 1:
                fail(f".ap pattern {pattern} on {self.describe()} has a count below 1")
        offset = self._static(0, offset or 0)
        shape = tuple(int(count) for _, count in pattern)
        strides = tuple(int(stride) for stride, _ in pattern)
        scalar = vector = None
        if scalar_offset is not None and vector_offset is not None:
            fail(
                f".ap on {self.describe()} with scalar_offset and vector_offset",
                rule="the two are exclusive",
            )
        indirect_dim = self._dim(indirect_dim, ".ap(indirect_dim=)")
        multiplier = math.prod(self.shape[indirect_dim + 1 :]) * self.itemsize // ITEMSIZE[dtype]
        if scalar_offset is not None:
            scalar = (_run_time_index(scalar_offset, self), multiplier)
        if vector_offset is not None:
            self._vector_rules(indirect_dim, vector_offset)
            if vector_offset.shape[0] != shape[0]:
                fail(
                    f".ap pattern {pattern} on {self.describe()} with {vector_offset.shape[0]} "
                    "row indices",
                    rule="the first count is the number of row indices",
                )
            vector, strides = (vector_offset, multiplier), (0, *strides[1:])
        view = self._two_dims(
            NkiTensor(self.storage, dtype, shape, strides, offset, scalar, vector)
        )
        view._check_pattern(pattern)
        return view

    def _check_pattern(self, pattern):
        storage, item = self.storage, self.itemsize
        inner_low, inner_high = span(self.shape[1:], self.strides[1:])
        if storage.place != "hbm":
            free = storage.partition_bytes // item
            if self.shape[0] > 1 and self.strides[0] != free:
                fail(
                    f".ap pattern {pattern} on {self.describe()}",
                    rule=f"on chip the leading stride is the element count of a partition, here "
                    f"{free}: partitions cannot be skipped",
                )
            column = self.offset % free
            if self.scalar is None and not 0 <= column + inner_low <= column + inner_high < free:
                fail(
                    f".ap pattern {pattern} with offset {self.offset} on {self.describe()} "
                    f"leaves its partition of {free} elements",
                    rule="every partition sees the same free pattern, inside the tile",
                )
        if not self.is_indirect():
            low, high = span(self.shape, self.strides)
            if self.offset + low < 0 or (self.offset + high + 1) * item > storage.nbytes:
                fail(
                    f".ap pattern {pattern} with offset {self.offset} reaches elements "
                    f"{self.offset + low}..{self.offset + high} of {storage.describe()}",
                    rule=f"a static pattern must stay inside the storage, "
                    f"0..{storage.nbytes // item - 1}",
                )


def _is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _run_time_index(index, t):
    from .table import check_scalar_offset  # table.py builds on this module

    check_scalar_offset(index, t)
    return index


def row_major(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def span(shape, strides):
    """Lowest and highest element address of a pattern, relative to its offset."""
    reach = [s * (n - 1) for n, s in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


def regroup(shape, strides, new_shape):
    """Strides that show the same elements in `new_shape`, or None if that needs a copy."""
    runs = []  # innermost last: [count, stride] of dimensions that merge into one
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == s * n:
            runs[-1] = [runs[-1][0] * n, s]
        else:
            runs.append([n, s])
    result, left, step = [], 1, 1
    for n in reversed(new_shape):
        if left == 1 and runs and n > 1:
            left, step = runs.pop()
        if left % n:
            return None
        result.append(step)
        left, step = left // n, step * n
    return tuple(reversed(result))


def _since(version, what):
    if current_core().version < version:
        fail(
            f"{what} does not exist in NKI {current_core().version}",
            rule=f"added in NKI {version}",
            hint="use indexing, reshape and .ap, which all versions have",
        )


def ndarray(shape, dtype, buffer=MemoryRegion.sbuf, name="", address=None):
    """A tensor whose contents are undefined until written (`nl.ndarray`).

    shape    [partition, free...] on chip, any rank in HBM
    address  (partition, byte) of a tile placed by hand
    """
    storage = allocate(shape, dtype, buffer, name, address)
    return NkiTensor(storage, storage.dtype, storage.shape, row_major(storage.shape))
