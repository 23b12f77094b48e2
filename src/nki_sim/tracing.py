"""What the hardware would be asked to do: instructions, bytes, multiply-adds, live memory.

    with nki_sim.trace() as trace:
        kernel[2](q, k, cache)
    print(trace.table())

Nothing here predicts time. `roofline` divides work by documented peak rates: a run takes at least
that long on each engine, and usually longer.
"""

import contextlib
from dataclasses import dataclass, field

from . import arch
from .capacity import live_bytes

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")

_active = []


def active():
    """The innermost open trace, or None."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def trace(shapes_only=False):
    """Record every instruction of the kernels that run inside the `with` block.

    shapes_only   check limits and record, but allocate no float data and compute nothing: for
                  shapes too large to run. Integer tensors stay real, because run-time addresses
                  come from them. Arguments may then be `np.broadcast_to` views of one element or
                  torch meta tensors, and results have a shape but no data.
    """
    recording = Trace(shapes_only)
    _active.append(recording)
    try:
        yield recording
    finally:
        _active.remove(recording)


@dataclass(slots=True)
class Record:
    """One executed instruction."""

    launch: int  # number of the kernel call inside this trace
    core: int
    instruction: str
    engine: str
    shapes: dict  # operand -> (dtype, shape, memory)
    line: tuple  # (file, line) in the kernel
    number: int  # instruction number on its core, from 1
    sbuf: int = 0  # live bytes a partition while it runs, known when the kernel has ended
    psum: int = 0
    elements: int = 0  # elements a partition
    cycles: float = 0.0  # lower bound in cycles of its engine
    macs: int = 0  # multiply-adds
    columns: int = 0  # cycles for which the multiplier array is occupied, at one pass
    array_used: float = 0.0  # fraction of the 128×128 array, over its columns
    hbm_read: dict = field(default_factory=dict)  # tensor -> bytes
    hbm_write: dict = field(default_factory=dict)
    dma_bytes: int = 0
    piece_bytes: int = 0  # contiguous on both sides: what one descriptor element moves
    pieces: int = 0  # how many of them


class Trace:
    """The records of one `with nki_sim.trace()` block and what follows from them.

    records     list of Record, each core's in program order
    tiles       list of (launch, core, life) of the on-chip tiles; a life has name, dtype, shape,
                place, bytes a partition, and the numbers of the first and last instruction on it
    peak_sbuf   most live SBUF bytes a partition, over cores and launches; peak_psum likewise
    """

    def __init__(self, shapes_only=False):
        self.shapes_only = shapes_only
        self.records = []
        self.tiles = []
        self.launches = 0
        self.peak_sbuf = self.peak_psum = 0

    def add(self, core, instruction, engine, shapes, line, **fields):
        self.records.append(
            Record(
                self.launches,
                core.index,
                instruction,
                engine,
                shapes,
                line,
                core.clock,
                **fields,
            )
        )

    def finish(self, launch):
        """The kernel has ended: what was live at each instruction is known now."""
        sbuf = [live_bytes(core, "sbuf") for core in launch.cores]
        psum = [live_bytes(core, "psum") for core in launch.cores]
        for r in self.records:
            if r.launch == self.launches:
                r.sbuf, r.psum = int(sbuf[r.core][r.number]), int(psum[r.core][r.number])
        for core in launch.cores:
            self.tiles += [
                (self.launches, core.index, v) for v in core.lives if v.first is not None
            ]
        self.launches += 1
        self.peak_sbuf = max(self.peak_sbuf, *(int(live.max()) for live in sbuf))
        self.peak_psum = max(self.peak_psum, *(int(live.max()) for live in psum))

    # ------------------------------------------------------------------ numbers for checks
    def hbm_read(self):
        """HBM bytes read, by tensor."""
        return _sum_by_tensor(r.hbm_read for r in self.records)

    def hbm_write(self):
        """HBM bytes written, by tensor."""
        return _sum_by_tensor(r.hbm_write for r in self.records)

    def hbm_bytes(self):
        """All HBM traffic in bytes, reads and writes."""
        return sum(self.hbm_read().values()) + sum(self.hbm_write().values())

    def count(self, engine=None, instruction=None):
        """How many instructions, of one engine or of one name if given."""
        return sum(
            (engine is None or r.engine == engine)
            and (instruction is None or r.instruction == instruction)
            for r in self.records
        )

    def macs(self):
        """Multiply-adds of all matmuls."""
        return sum(r.macs for r in self.records)

    def array_utilization(self, transposes=False):
        """Multiply-adds over what the 128×128 array could do in the cycles that it is occupied.

        transposes   count the cycles of transposes on the Tensor engine too; they do no useful work
        """
        columns = sum(r.columns for r in self.records if transposes or r.macs)
        return self.macs() / (columns * arch.PMAX * arch.STATIONARY_FMAX) if columns else 0.0

    def pieces(self, tensor=None):
        """Contiguous bytes of HBM transfers: {piece bytes: bytes moved in such pieces}.

        tensor   only transfers from or to this HBM tensor
        """
        result = {}
        for r in self.records:
            touched = {**r.hbm_read, **r.hbm_write}
            if r.piece_bytes and (tensor in touched if tensor else touched):
                result[r.piece_bytes] = result.get(r.piece_bytes, 0) + r.dma_bytes
        return dict(sorted(result.items()))

    def descriptors(self):
        """How many contiguous pieces all DMA transfers move."""
        return sum(r.pieces for r in self.records)

    # ------------------------------------------------------------------ views for people
    def table(self):
        """One row for each engine and instruction."""
        groups = {}
        for r in self.records:
            groups.setdefault((ENGINES.index(r.engine), r.instruction), []).append(r)
        rows = []
        for (engine, name), group in sorted(groups.items()):
            moved = sum(r.dma_bytes for r in group)
            macs = sum(r.macs for r in group)
            columns = sum(r.columns for r in group)
            pieces = [r.piece_bytes for r in group if r.piece_bytes]
            used = macs / (columns * arch.PMAX * arch.STATIONARY_FMAX) if macs else None
            rows.append(
                {
                    "engine": ENGINES[engine],
                    "instruction": name,
                    "count": len(group),
                    "elements a partition": sum(r.elements for r in group) or None,
                    "DMA MiB": round(moved / 2**20, 3) if moved else None,
                    "piece bytes, least": min(pieces) if pieces else None,
                    "GMAC": round(macs / 1e9, 4) if macs else None,
                    "array used": f"{used:.0%}" if used else None,
                }
            )
        note = (
            f"{len(self.records)} instructions; peak a partition: SBUF {self.peak_sbuf:,} of "
            f"{arch.SBUF_BYTES:,} bytes, PSUM {self.peak_psum:,} of "
            f"{arch.PSUM_BANKS * arch.PSUM_BANK_BYTES:,}"
        )
        return Table(rows, note)

    def roofline(self):
        """Least time of each engine at its documented peak rate: a bound, not a prediction."""
        works = {
            "tensor": (lambda r: r.cycles, arch.PE_HZ, "cycles at 2.4 GHz"),
            "vector": (lambda r: r.cycles, arch.VECTOR_HZ, "cycles at 0.96 GHz, widest mode"),
            "scalar": (lambda r: r.cycles, arch.SCALAR_HZ, "cycles at 1.2 GHz"),
            "dma": (lambda r: r.dma_bytes, arch.DMA_BYTES_PER_S, "bytes at 368 GB/s"),
            "HBM": (
                lambda r: sum(r.hbm_read.values()) + sum(r.hbm_write.values()),
                arch.HBM_BYTES_PER_S,
                "bytes at 362 GB/s, a core's share",
            ),
        }
        rows = []
        for engine, (work, rate, unit) in works.items():
            by_core = {}
            for r in self.records:
                if r.engine == engine or engine == "HBM":
                    by_core[r.core] = by_core.get(r.core, 0) + work(r)
            amount = max(by_core.values(), default=0)
            rows.append(
                {
                    "engine": engine,
                    "work of the busiest core": round(amount),
                    "unit": unit,
                    "at least µs": round(amount / rate * 1e6, 2),
                }
            )
        if self.count("gpsimd"):
            rows.append(
                {
                    "engine": "gpsimd",
                    "work of the busiest core": self.count("gpsimd"),
                    "unit": "instructions; no documented rate",
                    "at least µs": None,
                }
            )
        slowest = max(rows, key=lambda row: row["at least µs"] or 0)
        note = (
            f"bound from documented peak rates, not a prediction: {slowest['engine']} needs at "
            f"least {slowest['at least µs']} µs"
        )
        return Table(rows, note)

    def plot(self, core=0, launch=None):
        """A lane for each engine, and live SBUF and PSUM, over one core's instructions.

        launch   which kernel call of the trace, the last one if None
        Returns a matplotlib figure.
        """
        from .figure import draw

        launch = self.launches - 1 if launch is None else launch
        return draw([r for r in self.records if r.core == core and r.launch == launch], core)


def _sum_by_tensor(dicts):
    total = {}
    for one in dicts:
        for name, size in one.items():
            total[name] = total.get(name, 0) + size
    return total


class Table:
    """Rows of named values that read well as text and in a notebook. `rows` is a list of dicts."""

    def __init__(self, rows, note=""):
        self.rows, self.note = rows, note

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)

    def _cells(self):
        heads = list(self.rows[0]) if self.rows else []
        heads = [h for h in heads if any(row.get(h) is not None for row in self.rows)]
        body = [[_text(row.get(h)) for h in heads] for row in self.rows]
        numeric = [
            all(isinstance(row.get(h), (int, float, type(None))) for row in self.rows)
            for h in heads
        ]
        return heads, body, numeric

    def __str__(self):
        heads, body, numeric = self._cells()
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        lines = []
        for cells in (heads, ["-" * w for w in widths], *body):
            padded = [
                c.rjust(w) if n else c.ljust(w)
                for c, w, n in zip(cells, widths, numeric, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join([*lines, self.note] if self.note else lines)

    __repr__ = __str__

    def _repr_html_(self):
        import html

        heads, body, numeric = self._cells()
        align = ["right" if n else "left" for n in numeric]

        def line(tag, cells):
            return (
                "<tr>"
                + "".join(
                    f'<{tag} style="text-align:{a}">{html.escape(c)}</{tag}>'
                    for c, a in zip(cells, align, strict=True)
                )
                + "</tr>"
            )

        rows = line("th", heads) + "".join(line("td", cells) for cells in body)
        return f"<table>{rows}</table><p>{html.escape(self.note)}</p>"


def _text(value):
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
