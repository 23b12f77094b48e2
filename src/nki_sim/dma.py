"""Instructions of the DMA engines: copies, transposes, sums, gather and scatter of rows.

DMA reaches HBM and SBUF, never PSUM. It is bound by neither start partitions nor equal shapes:
total element counts must match, and elements go in row-major order of each view.
"""

import math

import numpy as np

from .dtypes import BY_NAME, F32, INTEGERS, ITEMSIZE, TWO_BYTE, cast
from .enums import dge_mode, engine, oob_mode
from .errors import fail, kernel_line
from .machine import current_core
from .ops import OPS
from .table import (
    DMA,
    Rule,
    inp,
    instruction,
    integer_value,
    known_integers,
    mark_written,
    out,
    require_written,
)
from .tensors import NkiTensor, span


class Side:
    """One side of a transfer with its run-time address worked out.

    t       the view, static or by rows
    rows    None, or the element address at which each index of dimension 0 starts
    valid   None, or a bool for each row: False rows are out of bounds and skipped
    """

    def __init__(self, t, name, instruction, skip):
        self.t, self.name, self.instruction = t, name, instruction
        self.rows = self.valid = None
        if t.scalar is not None:
            self._resolve_scalar(skip)
        elif t.vector is not None:
            index, multiplier = t.vector
            values = known_integers(index, instruction, name)
            self.rows = t.offset + values * multiplier
            self._bound(values, skip)

    def _resolve_scalar(self, skip):
        t = self.t
        index, multiplier = t.scalar
        value = integer_value(index, self.instruction, self.name)
        offset = t.offset + value * multiplier
        self.t = NkiTensor(t.storage, t.dtype, t.shape, t.strides, offset)
        if not self.t.inside():
            self.rows = offset + np.arange(t.shape[0]) * t.strides[0]
            self._bound(np.full(t.shape[0], value), skip)

    def _bound(self, values, skip):
        t = self.t
        low, high = span(t.shape[1:], t.strides[1:])
        size = t.storage.nbytes // t.itemsize
        valid = (self.rows + low >= 0) & (self.rows + high < size)
        if t.on_chip():  # a row may not run over into the next partition either
            free = t.storage.partition_bytes // t.itemsize
            valid &= (self.rows % free + low >= 0) & (self.rows % free + high < free)
        if valid.all():
            return
        if not skip:
            row = int(np.argmin(valid))
            fail(
                f"run-time index {values[row]} (row {row}) of {self.name} {t.describe()} is out of "
                f"bounds of {t.storage.describe()}",
                rule="oob_mode.error stops the run at an index outside the tensor",
                instruction=self.instruction,
                hint="oob_mode.skip drops such rows and leaves the destination as it was",
            )
        self.valid = valid

    def _windows(self, data, dtype):
        """[addresses, inner...]: window k is the row that starts at element k."""
        t, item = self.t, self.t.itemsize
        _, high = span(t.shape[1:], t.strides[1:])
        count = t.storage.nbytes // item - high
        strides = (item, *[s * item for s in t.strides[1:]])
        return np.ndarray((count, *t.shape[1:]), dtype, data, 0, strides)

    def read(self):
        """The elements, in the view's shape; skipped rows hold zeros."""
        t = self.t
        if self.rows is None:
            if not t.storage.written.all:
                require_written(t, self.instruction, self.name)
            return t.np
        values = np.zeros(t.shape, BY_NAME[t.dtype])
        rows, valid = self._picked()
        if not t.storage.written.all:
            self._require_written(rows)
        values[valid] = self._windows(t.storage.data, values.dtype)[rows]
        return values

    def _require_written(self, rows):
        """Gathering an element that nothing wrote is an error that names the first one."""
        t, storage = self.t, self.t.storage
        flags = storage.written.bytes
        if flags is None:
            flags = np.zeros(storage.nbytes, np.uint8)
        ok = self._windows(flags, f"u{t.itemsize}")[rows] == (1 << 8 * t.itemsize) - 1
        if ok.all():
            return
        row, *inner = np.unravel_index(np.argmin(ok), ok.shape)
        address = rows[row] + sum(i * s for i, s in zip(inner, t.strides[1:], strict=True))
        first = address * t.itemsize // ITEMSIZE[storage.dtype]
        element = [int(i) for i in np.unravel_index(first, storage.shape)]
        fail(
            f"{self.name} {t.describe()} gathers element {element} of {storage.describe()}, which "
            "was never written",
            rule="a fresh tensor holds undefined bytes",
            instruction=self.instruction,
        )

    def write(self, values, where):
        """Write values of the view's shape, but only the elements (or rows) that `where` allows."""
        t = self.t
        if self.rows is None:
            if where is None:
                t.np[...] = values
            else:
                np.copyto(t.np, values, where=where)
            mark_written(t, where)
            return
        rows, valid = self._picked()
        if where is not None:
            whole = where.reshape(t.shape[0], -1)
            valid = valid & whole.all(axis=1)
            rows = self.rows[valid]
        self._windows(t.storage.data, values.dtype)[rows] = values[valid]
        written = t.storage.written
        if not written.all:
            if written.bytes is None:
                written.bytes = np.zeros(written.size, np.uint8)
            self._windows(written.bytes, f"u{t.itemsize}")[rows] = (1 << 8 * t.itemsize) - 1

    def _picked(self):
        valid = np.ones(len(self.rows), bool) if self.valid is None else self.valid
        return self.rows[valid], valid

    def element_mask(self):
        """None, or a bool for each element: False where a row is skipped."""
        if self.valid is None:
            return None
        shape = (-1,) + (1,) * (self.t.ndim - 1)
        return np.broadcast_to(self.valid.reshape(shape), self.t.shape)

    def run_length(self):
        """Contiguous elements of one piece: a piece never crosses a partition or a gathered row."""
        t = self.t
        first = 1 if t.storage.place != "hbm" or self.rows is not None else 0
        run = 1
        for n, s in zip(reversed(t.shape[first:]), reversed(t.strides[first:]), strict=True):
            if n > 1:
                if s != run:
                    break
                run *= n
        return run

    def note(self, core, write):
        """Remember the access for the race check, and the first write to a kernel input."""
        storage = self.t.storage
        if storage.place != "hbm":
            return
        if write and storage.is_input and storage.first_write is None:
            storage.first_write = kernel_line()
            if storage._data is not None and not storage._data.flags.writeable:
                fail(
                    f"{self.name} {self.t.describe()} is an input whose array is read-only",
                    rule="an input changed in place needs a writable array",
                    instruction=self.instruction,
                )
        if core.launch.lnc > 1:
            core.accesses.append((storage, write, self.t, self.rows, self.valid, kernel_line()))


def convert(values, dtype):
    """DMA's cast: the bytes if the dtypes are equal, else through float32."""
    return values if values.dtype == dtype else cast(values.astype(F32), dtype)


def transfer(name, dst, sources, combine, oob):
    """Read all sources, combine them, write dst; returns what the trace wants to know."""
    core = current_core()
    skip = oob is oob_mode.skip
    d = Side(dst, "dst", name, skip)
    sides = [
        Side(t, "src" if len(sources) == 1 else f"srcs[{i}]", name, skip)
        for i, t in enumerate(sources)
    ]
    where = None
    for s in sides:
        mask = s.element_mask()
        if mask is not None:
            mask = combine([mask], dst)
            where = mask if where is None else where & mask
        s.note(core, write=False)
    d.note(core, write=True)
    if not core.shapes_only:
        d.write(combine([s.read() for s in sides], dst), where)
    elif dst.dtype in INTEGERS:
        if any(s.t.dtype not in INTEGERS or s.t.storage.unknown for s in sides):
            dst.storage.unknown = True
        else:
            d.write(combine([s.read() for s in sides], dst), where)
    return None if core.trace is None else _traffic(d, sides, where)


def _traffic(d, sides, where):
    share = 1.0 if where is None else float(where.mean())
    if d.valid is not None:
        share = min(share, float(d.valid.mean()))
    reads, moved = {}, 0
    for s in sides:
        size = int(s.t.size * s.t.itemsize * share)
        moved += size
        if s.t.storage.place == "hbm":
            label = s.t.storage.label()
            reads[label] = reads.get(label, 0) + size
    size = int(d.t.size * d.t.itemsize * share)
    # A piece ends where either side stops being contiguous; with a cast, the narrower side counts.
    piece = math.gcd(d.run_length(), *(s.run_length() for s in sides))
    return {
        "hbm_read": reads,
        "hbm_write": {d.t.storage.label(): size} if d.t.storage.place == "hbm" else {},
        "dma_bytes": max(moved, size),
        "piece_bytes": piece * min(d.t.itemsize, *(s.t.itemsize for s in sides)),
        "pieces": int(d.t.size * share) // piece,
    }


# ------------------------------------------------------------------ rules
def _tiles(a):
    return [a["dst"], *(a["srcs"] if "srcs" in a else [a["src"]])]


def _check_counts(a):
    sizes = [t.size for t in _tiles(a)]
    if len(set(sizes)) > 1:
        return "element counts differ: " + ", ".join(
            f"{t.describe()} has {t.size}" for t in _tiles(a)
        )
    return None


def _check_hwdge_dtype(a):
    if a["dge_mode"] is dge_mode.hwdge and a["dst"].dtype != a["src"].dtype:
        return f"dst {a['dst'].describe()}, src {a['src'].describe()} with dge_mode hwdge"
    return None


def _check_gather_dge(a):
    if any(t.vector is not None for t in _tiles(a)) and a["dge_mode"] in (
        dge_mode.hwdge,
        dge_mode.none,
    ):
        return f"vector_offset with dge_mode {a['dge_mode'].name}"
    return None


def _check_engine(a):
    if a["engine"] is engine.unknown:
        return None
    if a["dge_mode"] is not dge_mode.hwdge or a["engine"] not in (engine.sync, engine.scalar):
        return f"engine {a['engine'].name} with dge_mode {a['dge_mode'].name}"
    return None


def _check_skip(a):
    if a["oob_mode"] is oob_mode.skip and not any(t.is_indirect() for t in _tiles(a)):
        return "oob_mode.skip on a transfer without run-time addresses"
    return None


def _check_priority(a):
    return None if a["priority"] is None else f"priority {a['priority']}"


COUNTS = Rule("total element counts match", _check_counts)
GATHER_DGE = Rule("gather and scatter need dge_mode swdge or unknown", _check_gather_dge)
SKIP = Rule("oob_mode.skip needs a run-time address", _check_skip)
PRIORITY = Rule("priority is not on trn2", _check_priority)


@instruction(
    "dma",
    dst=out(DMA),
    src=inp(DMA),
    rules=[
        COUNTS,
        Rule("dge_mode.hwdge needs equal dtypes", _check_hwdge_dtype),
        GATHER_DGE,
        Rule("engine sync or scalar only with dge_mode.hwdge", _check_engine),
        SKIP,
        PRIORITY,
    ],
    manual=True,
)
def dma_copy(
    dst,
    src,
    priority=None,
    oob_mode=oob_mode.error,
    dge_mode=dge_mode.unknown,
    engine=engine.unknown,
    name=None,
):
    """dst = src between HBM and SBUF, in row-major order of each view; other dtypes by float32.

    Either side may have a run-time address (`.ap` with scalar_offset or vector_offset). An index
    out of bounds is an error, or with `oob_mode.skip` its row is not transferred.
    """

    def copy(values, dst):
        values = values[0] if values[0].shape == dst.shape else values[0].reshape(dst.shape)
        return values if values.dtype == bool else convert(values, BY_NAME[dst.dtype])

    return transfer("dma_copy", dst, [src], copy, oob_mode)


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def _check_axes(a):
    axes, rank = a["axes"], a["src"].ndim
    if rank not in _AXES or (axes is not None and tuple(axes) != _AXES[rank]):
        return f"axes {axes} of src {a['src'].describe()}"
    return None


def _check_transposed(a):
    src, dst = a["src"], a["dst"]
    wanted = tuple(src.shape[i] for i in _AXES[src.ndim])
    strict = current_core().version >= "0.4"
    if dst.shape != wanted and (strict or dst.size != src.size or dst.shape[0] != wanted[0]):
        return f"dst {dst.describe()} for src {src.describe()}, transposed shape {wanted}"
    return None


def _check_equal_dtype(a):
    if a["dst"].dtype != a["src"].dtype:
        return f"dst {a['dst'].describe()}, src {a['src'].describe()}"
    return None


def _check_hwdge_transpose(a):
    src = a["src"]
    if a["dge_mode"] is not dge_mode.hwdge:
        return None
    rows_ok = (
        src.shape[0] == 16
        if src.ndim == 2
        else src.shape[0] in (1, 2, 4, 8, 16) and src.shape[0] * src.shape[-2] % 16 == 0
    )
    if current_core().version >= "0.6":
        rows_ok = True  # relaxed
    if not rows_ok or src.shape[-1] > 128 or src.dtype not in TWO_BYTE:
        return f"src {src.describe()} with dge_mode hwdge"
    return None


def _check_indirect_transpose(a):
    src = a["src"]
    if src.vector is None:
        return None
    index = src.vector[0]
    shape_ok = src.shape[0] % 16 == 0 and src.shape[-1] <= 128
    if not shape_ok or src.dtype not in TWO_BYTE or index.dtype != "uint32":
        return f"src {src.describe()} by row indices {index.describe()}"
    return None


@instruction(
    "dma",
    dst=out(("sbuf",)),
    src=inp(DMA),
    rules=[
        Rule("axes are fixed: 2-D (1,0), 3-D (2,1,0), 4-D (3,1,2,0)", _check_axes),
        Rule("equal dtype: dst, src", _check_equal_dtype),
        Rule(
            "hwdge: 2-byte dtype, last dimension ≤ 128, and before 0.6 a first dimension of 16 "
            "(2-D) or 1/2/4/8/16 with rows × columns a multiple of 16 (3-D, 4-D)",
            _check_hwdge_transpose,
        ),
        Rule(
            "by row indices: 2-byte dtype, last dimension ≤ 128, rows a multiple of 16, uint32",
            _check_indirect_transpose,
        ),
        Rule("dst has the transposed shape (exact rank since 0.4)", _check_transposed),
        GATHER_DGE,
        SKIP,
        PRIORITY,
    ],
    manual=True,
)
def dma_transpose(
    dst,
    src,
    axes=None,
    priority=None,
    dge_mode=dge_mode.unknown,
    oob_mode=oob_mode.error,
    name=None,
):
    """dst = src with the outermost and innermost dimensions swapped."""

    def transpose(values, dst):
        return values[0].transpose(_AXES[values[0].ndim]).reshape(dst.shape)

    fields = transfer("dma_transpose", dst, [src], transpose, oob_mode)
    if fields is not None:  # neighbours on one side are never neighbours on the other
        fields["piece_bytes"] = src.itemsize
        fields["pieces"] = fields["dma_bytes"] // src.itemsize
    return fields


def _check_add(a):
    return None if a["reduce_op"] is OPS["add"] else f"reduce_op {a['reduce_op']!r}"


def _check_scales(a):
    if a["scales"] is not None and list(a["scales"]) != [1.0] * len(a["srcs"]):
        return f"scales {a['scales']} for {len(a['srcs'])} sources"
    return None


def _check_sources(a):
    if len(a["srcs"]) > 16:
        return f"{len(a['srcs'])} sources"
    if any(t.vector is not None for t in _tiles(a)) and len(a["srcs"]) != 2:
        return f"{len(a['srcs'])} sources with a vector of indices"
    return None


def _check_static(a):
    t = next((t for t in _tiles(a) if t.scalar is not None), None)
    return None if t is None else f"{t.describe()} with a scalar_offset"


def _same_view(x, y):
    """True if both address the same elements in the same order, row indices included."""
    layouts = [(id(t.storage), t.dtype, t.shape, t.strides, t.offset) for t in (x, y)]
    if layouts[0] != layouts[1] or (x.vector is None) != (y.vector is None):
        return False
    return x.vector is None or (x.vector[1] == y.vector[1] and _same_view(x.vector[0], y.vector[0]))


def _check_in_place(a):
    """Of the forms with row indices: dst[rows] += tile, or tile += src[rows]."""
    if all(t.vector is None for t in _tiles(a)):
        return None
    dst = a["dst"]
    others = [s for s in a["srcs"] if not _same_view(s, dst)]
    if len(others) != 1 or (dst.vector is None) == (others[0].vector is None):
        return f"dst {dst.describe()}, sources " + ", ".join(s.describe() for s in a["srcs"])
    return None


def _check_unique(a):
    for t in _tiles(a):
        if t.vector is None:
            continue
        values = known_integers(t.vector[0], "dma_compute", "dst")
        seen, counts = np.unique(values, return_counts=True)
        size = t.storage.nbytes // ITEMSIZE[t.dtype] // max(t.vector[1], 1)
        repeated = seen[(counts > 1) & (seen >= 0) & (seen < size)]
        if len(repeated):
            return f"row index {repeated[0]} occurs more than once for {t.describe()}"
    return None


@instruction(
    "dma",
    dst=out(DMA),
    srcs=inp(DMA, kind="tiles"),
    rules=[
        COUNTS,
        Rule("reduce_op is add", _check_add),
        Rule("scales, if given, are 1.0 for each source", _check_scales),
        Rule("at most 16 sources, exactly 2 with row indices", _check_sources),
        Rule("addresses are static or by row indices", _check_static),
        Rule(
            "with row indices, dst is one source by the same view, and either it or the other "
            "source has the indices",
            _check_in_place,
        ),
        Rule("row indices are unique (others race)", _check_unique),
        SKIP,
    ],
    manual=True,
)
def dma_compute(
    dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_mode.error, name=None
):
    """dst = the sum of srcs, in float32, rounded once.

    Scatter-add: dst and one source carry the same vector of row indices. Gather-add: one source.
    """

    def total(values, dst):
        if values[0].dtype == bool:
            return values[0].reshape(dst.shape)
        result = values[0].astype(F32).reshape(dst.shape)
        for v in values[1:]:
            result = result + v.astype(F32).reshape(dst.shape)
        return cast(result, BY_NAME[dst.dtype])

    return transfer("dma_compute", dst, list(srcs), total, oob_mode)
