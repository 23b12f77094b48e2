"""Instructions that reduce along the free axes, or across partitions."""

import numpy as np

from .dtypes import ANY, INTEGERS
from .elementwise import apply, arithmetic, binary, ordered, reduce_res_of, started
from .enums import reduce_cmd
from .machine import current_core
from .numeric import f32, free_size, like, per_partition, rows, store
from .ops import Op
from .rules import not_both_psum, same_partitions, same_size
from .table import CHIP, SB, Rule, inp, instruction, out, scalar_or_vec

_UFUNCS = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}


def reduce_rows(op, values, axis):
    """Reduce an array along `axis`; subtract takes all later elements from the first."""
    if op.name == "subtract":
        moved = np.moveaxis(values, axis, -1) if isinstance(axis, int) else values
        if not isinstance(axis, int):
            lead = values.shape[: min(axis)]
            moved = values.reshape(*lead, -1)
        return np.subtract.reduce(moved, axis=-1)
    result = _UFUNCS[op.name].reduce(values, axis=axis)
    return result if op.kind == "bitvec" else result.astype(np.float32)


def _axes(a):
    axis = a["axis"]
    return tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def _check_axes(a):
    rank = a["data"].ndim
    inside = all(isinstance(n, int) and -rank <= n < rank for n in _axes(a))
    axes = sorted(n % rank for n in _axes(a)) if inside else []
    if not axes or 0 in axes or axes != list(range(axes[0], rank)):
        return f"axis {a['axis']} of data {a['data'].describe()}"
    return None


def _check_reduced_size(a):
    data, dst = a["data"], a["dst"]
    rank = data.ndim
    kept = [n for i, n in enumerate(data.shape) if i not in {x % rank for x in _axes(a)}]
    if dst.shape[0] != data.shape[0] or dst.size != int(np.prod(kept)):
        return f"dst {dst.describe()} for data {data.describe()} reduced over {a['axis']}"
    return None


def _check_reduces(a):
    op = a["op"]
    return None if isinstance(op, Op) and op.reduces else f"op is {op!r}"


def _check_bits(a):
    dst, data = a["dst"], a["data"]
    if getattr(a["op"], "kind", "") != "bitvec":
        return None
    if data.dtype not in INTEGERS or dst.dtype != data.dtype:
        return f"op {a['op'].name} on data {data.describe()}, dst {dst.describe()}"
    return "negate with a bit operator" if a.get("negate") else None


BITS = Rule("bit operators take integers, cast nothing and negate nothing", _check_bits)


@instruction(
    "vector",
    dst=out(CHIP),
    data=inp(CHIP),
    rules=[
        Rule(
            "op reduces: add, subtract, multiply, maximum, minimum, logical or bit and/or/xor",
            _check_reduces,
        ),
        BITS,
        Rule("axis: trailing free dimensions by their real numbers, never 0", _check_axes),
        Rule("dst holds one element for each kept one", _check_reduced_size),
    ],
)
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """dst = data reduced by op over trailing free axes, in float32; negate flips the sign."""
    axes = tuple(sorted(n % data.ndim for n in _axes({"axis": axis})))
    if op.kind == "bitvec":
        dst.np[...] = like(reduce_rows(op, data.np, axes), dst)
        return
    value = reduce_rows(op, f32(data), axes)
    store(dst, -value if negate else value)


def _check_partition_reduce(a):
    name = getattr(a["op"], "name", None)
    if name not in ("add", "average", "maximum", "bitwise_or", "bitwise_and"):
        return f"op {a['op']!r}"
    if a["dst"].shape[0] != 1 or free_size(a["dst"]) != free_size(a["data"]):
        return f"dst {a['dst'].describe()} for data {a['data'].describe()}"
    return None


@instruction(
    "gpsimd",
    dst=out(SB),
    data=inp(SB),
    rules=[
        Rule("op is add, average, maximum, bitwise or/and; dst is [1, N]", _check_partition_reduce),
        BITS,
    ],
)
def tensor_partition_reduce(dst, op, data, name=None):
    """dst[0, :] = data reduced by op over the partitions."""
    if op.kind == "bitvec":
        dst.np[...] = like(reduce_rows(op, data.np, 0), dst)
    elif op.name == "average":
        store(dst, rows(data).mean(axis=0, dtype=np.float32))
    else:
        store(dst, reduce_rows(op, rows(data), 0))


class _Average(Op):
    """`nl.average`, which only tensor_partition_reduce takes."""


_Average("average", "special")


def accumulate(command, op, values, initial):
    """Fold [P, N] values into the Vector engine's accumulators as `command` says; returns them."""
    core = current_core()
    if command.name == "idle":
        core.vector_accumulator = None  # such an instruction may clobber the registers
        return None
    neutral = _STARTS[op.name]
    if command.name in ("reset", "reset_reduce"):
        core.vector_accumulator = np.full((len(values), 1), neutral, np.float32)
    elif command.name == "load_reduce":
        core.vector_accumulator = np.broadcast_to(np.float32(initial), (len(values), 1)).copy()
    if command.name in ("reduce", "reset_reduce", "load_reduce"):
        folded = reduce_rows(op, values, 1).reshape(-1, 1)
        before = started(core.vector_accumulator, "Vector", len(values))
        core.vector_accumulator = apply(op, before, folded).astype(np.float32)
    return core.vector_accumulator


def _check_fold(a):
    name = getattr(a["reduce_op"], "name", None)
    return None if name in ("add", "multiply", "maximum", "minimum") else f"reduce_op {name}"


FOLD = Rule("reduce_op is add, multiply, maximum or minimum", _check_fold)


def _check_init(a):
    loads = a["reduce_cmd"].name == "load_reduce"
    if loads != isinstance(a["reduce_init"], (int, float)):
        return f"reduce_init {a['reduce_init']} with reduce_cmd {a['reduce_cmd'].name}"
    return None


def _check_res_given(a):
    if a["reduce_res"] is None and current_core().version < "0.6":
        return "no reduce_res"
    return None


@instruction(
    "vector",
    dst=out(CHIP),
    data=inp(CHIP),
    operand0=scalar_or_vec(ANY),
    reduce_res=out(CHIP, none=True),
    rules=[
        same_size("dst", "data"),
        same_partitions("data", "operand0"),
        binary("op0"),
        arithmetic("op0"),
        FOLD,
        reduce_res_of("data"),
        Rule("reduce_init is a number with load_reduce, and left out otherwise", _check_init),
        Rule("reduce_res may be left out since 0.6", _check_res_given),
        Rule("reverse0 is not supported", lambda a: "reverse0" if a["reverse0"] else None),
    ],
)
def tensor_scalar_reduce(
    dst,
    data,
    op0,
    operand0,
    reduce_op,
    reduce_res=None,
    reverse0=False,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_init=None,
    reduce_res_negate=False,
    name=None,
):
    """dst = data op0 operand0, and its rows folded by reduce_op into reduce_res [P, 1]."""
    value = ordered(op0, f32(data), per_partition(operand0, data), False)
    total = accumulate(reduce_cmd, reduce_op, value.reshape(data.shape[0], -1), reduce_init)
    store(dst, value)
    if reduce_res is not None:
        total = started(total, "Vector", data.shape[0])
        store(reduce_res, -total if reduce_res_negate else total)


@instruction(
    "vector",
    dst=out(CHIP),
    data0=inp(CHIP),
    data1=inp(CHIP),
    initial=scalar_or_vec(ANY),
    rules=[
        same_size("dst", "data0", "data1"),
        same_partitions("data0", "initial"),
        binary("op0", "op1"),
        arithmetic("op0", "op1"),
        not_both_psum("data0", "data1"),
    ],
)
def tensor_tensor_scan(
    dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None
):
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along the free axis, in float32; dst = r."""
    x, y = rows(data0), rows(data1)
    state = np.broadcast_to(per_partition(initial, data0).reshape(-1), len(x))
    result = np.empty_like(x)
    for i in range(x.shape[1]):
        state = ordered(op1, ordered(op0, x[:, i], state, reverse0), y[:, i], reverse1)
        result[:, i] = state
    store(dst, result)


# Where a running reduction starts.
_STARTS = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def _check_running(a):
    name = getattr(a["op1"], "name", None)
    return None if name in _STARTS else f"op1 {a['op1']!r}"


def _check_running_command(a):
    name = a["reduce_cmd"].name
    if name in ("idle", "reset") or (name == "load_reduce") != (a["imm1"] is not None):
        return f"reduce_cmd {name} with imm1 {a['imm1']!r}"
    return None


@instruction(
    "vector",
    dst=out(CHIP),
    src=inp(CHIP),
    imm0=scalar_or_vec(),
    imm1=scalar_or_vec(none=True),
    rules=[
        same_size("dst", "src"),
        same_partitions("src", "imm0", "imm1"),
        binary("op0"),
        arithmetic("op0"),
        Rule("op1 is add, subtract, multiply, maximum or minimum", _check_running),
        Rule(
            "reduce_cmd is reset_reduce, reduce, or load_reduce with imm1 (and only then imm1)",
            _check_running_command,
        ),
        Rule(
            "no 32-bit integers",
            lambda a: next(
                (f"{n} {a[n].describe()}" for n in ("dst", "src") if a[n].dtype.endswith("int32")),
                None,
            ),
        ),
    ],
)
def tensor_scalar_cumulative(
    dst, src, op0, op1, imm0, imm1=None, reduce_cmd=reduce_cmd.reset_reduce, name=None
):
    """acc = (src op0 imm0) op1 acc, running along the free axis; dst = every acc.

    reset_reduce starts at the operator's neutral value, load_reduce at imm1, reduce goes on.
    """
    core = current_core()
    value = rows(src)
    value = ordered(op0, value, np.float32(imm0) if np.isscalar(imm0) else rows(imm0), False)
    if reduce_cmd.name == "load_reduce":
        start = imm1 if np.isscalar(imm1) else rows(imm1)
        state = np.broadcast_to(np.float32(start), (len(value), 1)).reshape(-1)
    elif reduce_cmd.name == "reduce":
        state = started(core.vector_accumulator, "Vector", len(value)).reshape(-1)
    else:
        state = np.full(len(value), _STARTS[op1.name], np.float32)
    result = np.empty_like(value)
    for i in range(value.shape[1]):
        state = apply(op1, value[:, i], state)
        result[:, i] = state
    core.vector_accumulator = state.reshape(-1, 1).astype(np.float32)
    store(dst, result)


# ------------------------------------------------------------------ statistics
@instruction(
    "vector",
    dst=out(CHIP, ("float32",)),
    data=inp(CHIP, max_n=512),
    rules=[
        same_partitions("dst", "data"),
        Rule(
            "dst is [P, 6]",
            lambda a: a["dst"].describe() if free_size(a["dst"]) != 6 else None,
        ),
    ],
)
def bn_stats(dst, data, name=None):
    """dst = count, mean, count · variance of the even elements of a row, then of the odd ones."""
    value, parts = rows(data), []
    for half in (value[:, 0::2], value[:, 1::2]):
        n = half.shape[1]
        mean = half.mean(axis=1) if n else np.zeros(len(half), np.float32)
        spread = ((half - mean[:, None]) ** 2).sum(axis=1)
        parts += [np.full(len(half), n, np.float32), mean, spread]
    store(dst, np.stack(parts, axis=1).astype(np.float32))


@instruction(
    "vector",
    dst=out(CHIP, ("float32",)),
    data=inp(CHIP, ("float32",)),
    rules=[
        same_partitions("dst", "data"),
        Rule(
            "data is triples (N a multiple of 3) and dst is [P, 2]",
            lambda a: (
                f"data {a['data'].describe()}, dst {a['dst'].describe()}"
                if free_size(a["data"]) % 3 or free_size(a["dst"]) != 2
                else None
            ),
        ),
    ],
)
def bn_aggr(dst, data, name=None):
    """dst = mean and variance of all elements that the (count, mean, count · variance) describe."""
    part = rows(data).reshape(data.shape[0], -1, 3)
    count, mean, spread = part[..., 0], part[..., 1], part[..., 2]
    total = count.sum(axis=1)
    middle = (count * mean).sum(axis=1) / total
    spread = (spread + count * (mean - middle[:, None]) ** 2).sum(axis=1) / total
    store(dst, np.stack([middle, spread], axis=1).astype(np.float32))
