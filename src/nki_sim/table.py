"""The one table: what every instruction takes, on which engine, under which documented rules.

`@instruction(...)` stands directly above the function that computes, so that all there is to
know about an instruction is on one screen. The rows drive the checks, the error texts, the
README's table (`markdown`), and the tests that break each limit and just meet it.
"""

import functools
import inspect
from enum import Enum

import numpy as np

from . import arch
from .dtypes import ANY, FLOATS, INTEGERS
from .errors import fail, kernel_line
from .machine import current_core
from .tensors import NkiTensor

TABLE = {}  # name -> Instruction, in the order of the source

# What numpy and Python raise about values that no rule foresaw; users get a KernelError instead.
_RAW_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

SB = ("sbuf",)
PS = ("psum",)
CHIP = ("sbuf", "psum")
DMA = ("hbm", "sbuf")

_DTYPE_GROUPS = {ANY: "any", FLOATS: "floats", INTEGERS: "integers"}


class Operand:
    """One operand's documented limits.

    places  memories it may lie in       dtypes  allowed dtypes
    max_n   elements a partition, None = no limit
    kind    "tile", "vec" ([P, 1]), "scalar|vec", "tile|float", or "tiles" (a list)
    """

    def __init__(
        self,
        places,
        dtypes=ANY,
        max_n=None,
        kind="tile",
        none=False,
        written=False,
        reads=True,
    ):
        self.places, self.dtypes, self.max_n = places, frozenset(dtypes), max_n
        self.kind, self.none = kind, none
        self.written = written  # an output
        self.reads = reads  # contents must have been written before
        self.name = None  # filled in by the decorator

    def text(self):
        parts = ["/".join(self.places)]
        if self.dtypes != ANY:
            parts.append(_DTYPE_GROUPS.get(self.dtypes) or " ".join(sorted(self.dtypes)))
        if self.max_n is not None:
            parts.append(f"N ≤ {self.max_n}")
        if self.kind != "tile":
            parts.append(self.kind.replace("|", " or "))
        return f"`{self.name}` {', '.join(parts)}{', optional' if self.none else ''}"


def out(places, dtypes=ANY, **limits):
    """An operand that the instruction writes."""
    return Operand(places, dtypes, written=True, reads=False, **limits)


def inp(places, dtypes=ANY, **limits):
    """An operand that the instruction reads."""
    return Operand(places, dtypes, **limits)


def scalar_or_vec(dtypes=("float32",), **limits):
    """A compile-time number, or one value a partition, float32 unless the page allows others."""
    return Operand(CHIP, dtypes, kind="scalar|vec", **limits)


class Rule:
    """A documented rule; `check(arguments)` returns what was found against it, or None.

    kind and names   which shared rule of rules.py it is, over which operands: tests break it so
    """

    def __init__(self, text, check, kind=None, names=()):
        self.text, self.check, self.kind, self.names = text, check, kind, names


class Instruction:
    """One row of the table; calling it checks, records and computes."""

    def __init__(self, run, engines, operands, rules, pick, cost, manual, marks):
        self.run, self.name, self.doc = run, run.__name__, inspect.getdoc(run)
        self.engines, self.rules = engines, rules
        self.pick = pick  # arguments -> engine name, where it is not simply the first one
        self.cost = cost  # arguments -> dict of trace fields, where it is not element-wise
        self.manual = manual  # the function resolves, checks and marks elements itself (DMA)
        self.marks = marks  # False: the function itself marks what it wrote (matmul)
        self.operands = []
        signature = inspect.signature(run)
        self.names = tuple(signature.parameters)
        self.defaults = {
            n: p.default for n, p in signature.parameters.items() if p.default is not p.empty
        }
        self.enums = [(n, type(d)) for n, d in self.defaults.items() if isinstance(d, Enum)]
        self.required = tuple(n for n in self.names if n not in self.defaults)
        for name in self.names:
            if name in operands:
                operands[name].name = name
                self.operands.append(operands[name])
        self.tiles = [o.name for o in self.operands]
        self.outputs = [o.name for o in self.operands if o.written]

    # ------------------------------------------------------------------ call
    def __call__(self, args, kwargs):
        core = current_core()
        core.clock += 1
        a = self._bind(args, kwargs)
        self._check_operands(a)
        try:
            self._execute(core, a)
        except _RAW_ERRORS as error:
            self._explain(a, error)
        return HANDLE

    def _execute(self, core, a):
        for rule in self.rules:
            found = rule.check(a)
            if found:
                fail(found, rule=rule.text, instruction=self.name)
        fields = None
        if self.manual:
            fields = self.run(**a)
        elif core.shapes_only and not self._all_integers(a):
            self._mark_unknown(a)
        else:
            for operand in self.operands:
                if operand.reads:
                    value = a[operand.name]
                    if value.__class__ is NkiTensor and not value.storage.written.all:
                        require_written(value, self.name, operand.name)
            self.run(**a)
        if self.marks and not core.shapes_only:
            for name in self.outputs:
                if a[name] is not None:
                    mark_written(a[name])
        if core.trace is not None:
            self._record(core, a, fields)

    def _explain(self, a, error):
        """Turn an error of numpy or Python into one that names the instruction and operands."""
        given = [f"{n} {_text(a[n])}" for n in self.names if a[n] is not self.defaults.get(n)]
        fail(
            f"{type(error).__name__}: {error}",
            instruction=self.name,
            hint=f"check the arguments: {', '.join(given)}",
        )

    def _bind(self, args, kwargs):
        if len(args) > len(self.names):
            raise TypeError(f"{self.name} takes {len(self.names)} arguments, got {len(args)}")
        a = self.defaults.copy()
        a.update(zip(self.names, args, strict=False))
        for key in kwargs:
            if key not in self.names:
                raise TypeError(
                    f"{self.name} has no argument '{key}'; it takes {', '.join(self.names)}"
                )
        a.update(kwargs)
        if len(a) != len(self.names):
            missing = [n for n in self.required if n not in a]
            raise TypeError(f"{self.name} needs {', '.join(missing)}")
        for name, kind in self.enums:
            if a[name].__class__ is not kind:
                raise TypeError(
                    f"{self.name}: {name} must be a nisa.{kind.__name__}, got {a[name]!r}"
                )
        return a

    def _check_operands(self, a):
        for operand in self.operands:
            value = a[operand.name]
            if value.__class__ is not NkiTensor:
                self._check_other(operand, value)
                continue
            if value.scalar is not None and not self.manual:
                value = a[operand.name] = resolve_scalar(value, self.name, operand.name)
            self._check_tile(operand, value)

    def _check_tile(self, operand, t):
        place = t.storage.place
        if place not in operand.places:
            self._refuse(
                operand, t, f"lies in {place}", f"it may lie in {' or '.join(operand.places)}"
            )
        if t.dtype not in operand.dtypes:
            allowed = _DTYPE_GROUPS.get(operand.dtypes) or ", ".join(sorted(operand.dtypes))
            self._refuse(operand, t, f"has dtype {t.dtype}", f"allowed: {allowed}")
        if operand.kind != "tile" and "vec" in operand.kind and t.size != t.shape[0]:
            self._refuse(operand, t, f"has shape {t.shape}", "a vec operand is exactly [P, 1]")
        if t.vector is not None and not self.manual:
            self._refuse(operand, t, "is selected by a vector of indices", "only DMA gathers rows")
        if operand.written and not t.is_whole():
            first = 0 if t.vector is None else 1  # where rows go is known at run time only
            if self_overlaps(t.shape[first:], t.strides[first:]):
                self._refuse(
                    operand,
                    t,
                    f"with the pattern {t.get_pattern()} holds an element more than once",
                    "a destination element is written once",
                )
        if place == "hbm":
            return
        t.storage.touch()
        if len(t.shape) > arch.MAX_RANK:
            rule = f"a view has at most {arch.MAX_RANK} dimensions"
            self._refuse(operand, t, f"has {len(t.shape)} dimensions", rule)
        count = t.shape[0]
        if operand.max_n is not None and t.size > operand.max_n * count:
            self._refuse(
                operand,
                t,
                f"has {t.size // count} elements a partition",
                f"at most {operand.max_n}",
            )
        far = t.storage.partition_bytes > arch.MAX_STRIDE and not self.manual
        if far and any(
            s > arch.MAX_STRIDE for s, n in zip(t.strides[1:], t.shape[1:], strict=True) if n > 1
        ):
            rule = (
                f"a stride on chip is at most {arch.MAX_STRIDE:,} elements, a signed 16-bit number"
            )
            self._refuse(operand, t, f"has strides {t.strides}", rule)
        if t.offset or t.storage.base[0]:
            start = t.start_partition()
            if start and not self.manual and start not in arch.start_partitions(count):
                allowed = "/".join(map(str, arch.start_partitions(count)))
                self._refuse(
                    operand,
                    t,
                    f"starts at partition {start}",
                    f"an access of {count} partitions starts at {allowed}",
                )

    def _check_other(self, operand, value):
        if value is None and operand.none:
            return
        if operand.kind == "tiles":
            tensors = isinstance(value, (list, tuple)) and [isinstance(t, NkiTensor) for t in value]
            if not tensors or not all(tensors):
                raise TypeError(f"{self.name}: {operand.name} must be a list of tensors")
            for t in value:
                self._check_tile(operand, t)
            return
        number = isinstance(value, (int, float, np.integer, np.floating))
        if "scalar" in operand.kind or "float" in operand.kind:
            if number:
                return
            wanted = f"a number or a tensor, not {type(value).__name__}"
        else:
            wanted = f"a tensor, not {type(value).__name__}"
        raise TypeError(f"{self.name}: {operand.name} must be {wanted}")

    def _refuse(self, operand, t, problem, rule):
        fail(f"operand {operand.name} {t.describe()} {problem}", rule=rule, instruction=self.name)

    def _all_integers(self, a):
        for name in self.tiles:
            t = a[name]
            if t.__class__ is NkiTensor and (t.dtype not in INTEGERS or t.storage.unknown):
                return False
            if isinstance(t, float):
                return False
        return True

    def _mark_unknown(self, a):
        for name in self.outputs:
            if a[name] is not None:
                a[name].storage.unknown = True

    # ------------------------------------------------------------------ trace
    def engine(self, a):
        asked = a.get("engine")
        if self.engines == ["dma"]:  # an engine argument names the queue that starts the transfer
            return "dma"
        if asked is not None and asked.name != "unknown":
            return asked.name
        return self.pick(a) if self.pick else self.engines[0]

    def _record(self, core, a, fields):
        tiles = {n: a[n] for n in self.tiles if a[n].__class__ is NkiTensor}
        shapes = {n: (t.dtype, t.shape, t.storage.place) for n, t in tiles.items()}
        engine = self.engine(a)
        if fields is None:
            fields = self.cost and self.cost(a)
            fields = fields or _elementwise_cost(engine, tiles.values())
        core.trace.add(core, self.name, engine, shapes, kernel_line(), **fields)

    def row(self):
        """The cells of this instruction in the README's table."""
        return (
            f"`{self.name}`",
            ", ".join(self.engines),
            "; ".join(o.text() for o in self.operands),
            "; ".join(r.text for r in self.rules) or "–",
            self.doc.split("\n\n")[0].replace("\n", " "),
        )


def _elementwise_cost(engine, tiles):
    """Elements a partition of the longest operand, and the fewest cycles they can take.

    Operands of the full length set the rate: a vec or a row's result moves once a partition, and
    tensor_scalar's is float32 whatever the tile is.
    """
    elements = max(t.size // t.shape[0] for t in tiles)
    lanes = {"vector": arch.VECTOR_LANES, "scalar": arch.SCALAR_LANES}.get(engine)
    full = [t for t in tiles if t.size // t.shape[0] == elements]
    if engine == "vector" and all(t.itemsize <= 2 for t in full):
        lanes = arch.VECTOR_LANES_16BIT
    return {"elements": elements, "cycles": elements * arch.PMAX / lanes if lanes else 0.0}


def _text(value):
    return value.describe() if isinstance(value, NkiTensor) else repr(value)


class _Handle:
    """What an instruction returns: a label for ordering, which this simulator need not obey."""

    def depends_on(self, *producers):
        return self


HANDLE = _Handle()


def instruction(engines, rules=(), pick=None, cost=None, manual=False, marks=True, **operands):
    """Enter the decorated function into the table; its signature is the instruction's own."""

    def decorate(run):
        row = TABLE[run.__name__] = Instruction(
            run,
            engines.split(),
            operands,
            tuple(rules),
            pick,
            cost,
            manual,
            marks and not manual,
        )

        def call(*args, **kwargs):
            return row(args, kwargs)

        call.__name__, call.__doc__, call.row = run.__name__, run.__doc__, row
        call.__signature__ = inspect.signature(run)
        return call

    return decorate


def markdown():
    """The README's instruction table."""
    head = ("instruction", "engine", "operands", "rules", "what it does")
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for row in TABLE.values():
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in row.row()) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------------- written elements
def require_written(t, instruction, operand):
    """Reading an element that nothing wrote is an error that names the tensor and the index."""
    state = t.storage.written.read(t)
    if state is True:
        return
    first = (0,) * t.ndim
    if state is not False:
        first = tuple(int(i) for i in np.unravel_index(np.argmin(state), t.shape))
    fail(
        f"operand {operand} {t.describe()} is read, but element {list(first)} was never written",
        rule="a fresh tensor holds undefined bytes",
        instruction=instruction,
        hint="write every element first, for example with nisa.memset",
    )


def mark_written(t, where=None):
    storage = t.storage
    storage.written.set(t, where)
    if storage.by_matmul is not None and (
        storage.by_matmul.all or storage.by_matmul.bytes is not None
    ):
        storage.by_matmul.clear(t)


@functools.lru_cache(maxsize=4096)
def self_overlaps(shape, strides):
    """True if two different indices of a pattern address the same element."""
    reach = 0  # the highest address of the dimensions seen so far, from the smallest stride up
    for stride, count in sorted(zip(map(abs, strides), shape, strict=True)):
        if count > 1 and stride == 0:
            return True
        if count > 1 and stride <= reach:
            break
        reach += stride * (count - 1)
    else:
        return False
    # Strides that interleave, such as 3 × [2] with 2 × [3], may still be free of overlap.
    addresses = np.zeros(1, np.int64)
    for stride, count in zip(strides, shape, strict=True):
        addresses = np.add.outer(addresses, stride * np.arange(count)).reshape(-1)
    return len(np.unique(addresses)) < len(addresses)


# ---------------------------------------------------------------------- run-time addresses
SCALAR_OFFSET = "a register, or an int32 or uint32 SBUF tensor of one element"


def check_scalar_offset(index, t):
    """Refuse, where a view is made, what cannot be its run-time address."""
    tensor = isinstance(index, NkiTensor)
    if tensor:
        ok = index.size == 1 and index.storage.place == "sbuf"
        ok = ok and index.dtype in ("int32", "uint32")
    else:
        ok = hasattr(index, "frozen")  # a register: only those know a frozen induction variable
    if not ok:
        fail(
            f"scalar offset {_text(index)} of {t.describe()}",
            rule=SCALAR_OFFSET,
            hint="a compile-time integer belongs into offset=" if isinstance(index, int) else "",
        )


def integer_value(index, instruction, operand):
    """The integer in a register or a (1,1) tensor that holds a run-time address."""
    if not isinstance(index, NkiTensor):
        value = getattr(index, "value", None)
        if value is None:
            fail(
                f"scalar offset of {operand} is {index!r} without a value",
                rule="a register or an SBUF tensor of one integer",
                instruction=instruction,
            )
        return value
    if index.size != 1 or index.storage.place == "psum" or index.dtype not in INTEGERS:
        fail(
            f"scalar offset of {operand} is {index.describe()}",
            rule="a register or an SBUF tensor of one integer",
            instruction=instruction,
        )
    return int(known_integers(index, instruction, operand)[0])


def known_integers(index, instruction, operand):
    """An index tensor's values as int64, flat; they must be written and, in a trace, known."""
    if index.is_indirect():
        fail(
            f"offset {index.describe()} of {operand} has a run-time address itself",
            rule="the address of an offset is known at compile time",
            instruction=instruction,
        )
    if index.storage.unknown:
        fail(
            f"offset {index.describe()} of {operand} depends on values that a shapes-only trace "
            "does not compute",
            instruction=instruction,
            hint="compute addresses with integer tensors, or trace with real data",
        )
    if index.storage.place != "hbm":
        index.storage.touch()
    require_written(index, instruction, f"offset of {operand}")
    return index.np.reshape(-1).astype(np.int64)


def resolve_scalar(t, instruction, operand):
    """The static view behind a run-time scalar offset; out of bounds is an error."""
    index, multiplier = t.scalar
    value = integer_value(index, instruction, operand)
    view = NkiTensor(t.storage, t.dtype, t.shape, t.strides, t.offset + value * multiplier)
    if not view.inside():
        fail(
            f"operand {operand} {t.describe()} with run-time index {value} leaves "
            f"{t.storage.describe()}",
            rule="a dynamic access stays inside the tensor, on chip inside each partition",
            instruction=instruction,
        )
    return view
