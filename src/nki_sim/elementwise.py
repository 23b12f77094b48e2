"""Element-wise instructions of the Vector, Scalar and GpSimd engines.

Operands are read, computed in float32, and rounded once to the destination's dtype; free shapes
may differ if the element counts match, because elements pair up in row-major order.
"""

import numpy as np

from .dtypes import ANY, INTEGERS, cast
from .enums import engine, reduce_cmd
from .errors import fail
from .machine import current_core
from .numeric import f32, free_size, like, per_partition, store
from .ops import OPS, Op
from .rules import engine_is, gpsimd_not_psum, not_both_psum, same_partitions, same_size
from .table import CHIP, SB, Rule, inp, instruction, mark_written, out, scalar_or_vec
from .tensors import NkiTensor

EXACT = ("int32", "uint32")


# ------------------------------------------------------------------ operators
def _absent(name):
    return f"{name}: no trn2 engine computes it; divide is reciprocal and multiply"


def check_binary(*names):
    """Each `op` argument is a binary ALU operator; bit operators see integers only."""

    def check(a):
        kinds = set()
        for name in names:
            op = a[name]
            if op is None:
                continue
            if not isinstance(op, Op):
                return f"{name} is {op!r}, not an operator of nki.language"
            unary_ok = op.name in ("rsqrt", "invert") and "operand0" in a
            if op.kind == "absent":
                return _absent(op.name)
            if op.binary is None and not unary_ok:
                return f"{name} is {op.name}, not a binary operator"
            kinds.add("bitvec" if op.kind == "bitvec" else "arithmetic")
        if len(kinds) > 1:
            return "a bit operator and an arithmetic operator in one instruction"
        if "bitvec" in kinds:
            for t in a.values():
                if t.__class__ is NkiTensor and t.dtype not in INTEGERS:
                    return f"bit operator on {t.describe()}"
                if isinstance(t, float):
                    return f"bit operator with the float {t}"
        return None

    return Rule(
        "operators are ALU operators; bit operators take integer operands and do not mix "
        "with arithmetic",
        check,
    )


def apply(op, x, y):
    """`x op y` in float32 (or integers, for bit operators)."""
    if op.binary is None:
        return op.unary(x)
    return op.binary(x, y)


# ------------------------------------------------------------------ two tiles
def _exact(*tiles):
    """True if all are 32-bit integers in SBUF, which GpSimd computes without float32."""
    return all(t.dtype in EXACT and t.storage.place == "sbuf" for t in tiles)


def _tensor_tensor_engine(a):
    integers = a["op"].kind == "arithmetic" and _exact(a["dst"], a["data1"], a["data2"])
    return "gpsimd" if integers or a["op"] is OPS["power"] else "vector"


def _check_power(a):
    if a["op"] is not OPS["power"]:
        return None
    for name in ("dst", "data1", "data2"):
        if a[name].storage.place == "psum":
            return f"power with {name} {a[name].describe()}"
    return "power on engine vector" if a["engine"] is engine.vector else None


@instruction(
    "vector gpsimd",
    dst=out(CHIP),
    data1=inp(CHIP),
    data2=inp(CHIP),
    rules=[
        same_size("dst", "data1", "data2"),
        check_binary("op"),
        not_both_psum("data1", "data2"),
        engine_is("vector", "gpsimd"),
        gpsimd_not_psum("dst", "data1", "data2"),
        Rule("power runs on GpSimd and takes no PSUM operand", _check_power),
    ],
    pick=_tensor_tensor_engine,
)
def tensor_tensor(dst, data1, data2, op, engine=engine.unknown, name=None):
    """dst = data1 op data2, element by element.

    int32/uint32 throughout, in SBUF, without engine=vector: exact integers on GpSimd.
    """
    x, y, target = data1.np, data2.np, dst.np
    if (
        op.ufunc
        and x.dtype == y.dtype == target.dtype == np.float32
        and (x.shape == y.shape == target.shape)
    ):
        op.binary(x, y, out=target)
    elif op.kind == "bitvec":
        target[...] = like(op.binary(like(x, dst), like(y, dst)).astype(target.dtype), dst)
    elif engine.name != "vector" and _exact(dst, data1, data2):
        wide = apply(op, like(x, dst).astype(np.int64), like(y, dst).astype(np.int64))
        target[...] = wide.astype(np.int64).astype(target.dtype)
    else:
        store(dst, apply(op, like(f32(data1), dst), like(f32(data2), dst)))


# ------------------------------------------------------------------ one tile and scalars
_TRN3_ONLY = ("square", "relu", "abs_max", "abs_min")


def _check_trn3_ops(a):
    name = getattr(a["op0"], "name", "")
    return f"op0 {name}" if name in _TRN3_ONLY else None


def _check_second(a):
    if (a["op1"] is None) != (a["operand1"] is None):
        return "op1 and operand1 are given together or not at all"
    return None


def _check_scalar_engine(a):
    name = a["engine"].name
    ops = (a["op0"].name, a["op1"].name if a["op1"] else None)
    if name == "scalar" and ops not in (("multiply", "add"), ("multiply", None), ("add", None)):
        return f"operators {ops} on engine scalar"
    if (name == "gpsimd") != ("rsqrt" in ops) and name != "unknown":
        return f"operators {ops} on engine {name}"
    return None


def _tensor_scalar_engine(a):
    return "gpsimd" if a["op0"].name == "rsqrt" else "vector"


def ordered(op, x, y, reverse):
    return apply(op, y, x) if reverse else apply(op, x, y)


@instruction(
    "vector scalar gpsimd",
    dst=out(CHIP),
    data=inp(CHIP),
    operand0=scalar_or_vec(),
    operand1=scalar_or_vec(none=True),
    rules=[
        same_size("dst", "data"),
        same_partitions("data", "operand0", "operand1"),
        Rule("square, relu, abs_max and abs_min as op0 are trn3 only", _check_trn3_ops),
        check_binary("op0", "op1"),
        Rule("op1 needs operand1 and operand1 needs op1", _check_second),
        Rule("Scalar: multiply+add, multiply or add; GpSimd: rsqrt only", _check_scalar_engine),
    ],
    pick=_tensor_scalar_engine,
)
def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=engine.unknown,
    name=None,
):
    """dst = (data op0 operand0) op1 operand1; `reverse` swaps the sides of its operator.

    Operands are numbers or float32 [P, 1]; integers are computed in float32, exact below 2^24.
    """
    if op0.kind == "bitvec":
        value = data.np
        for op, operand, reverse in ((op0, operand0, reverse0), (op1, operand1, reverse1)):
            if op is None:
                continue
            value = ordered(op, value, np.asarray(operand).astype(value.dtype), reverse)
        dst.np[...] = like(value.astype(dst.np.dtype), dst)
        return
    value = ordered(op0, f32(data), per_partition(operand0, data), reverse0)
    if op1 is not None:
        value = ordered(op1, value, per_partition(operand1, data), reverse1)
    store(dst, value)


@instruction(
    "vector",
    dst=out(CHIP),
    data=inp(CHIP),
    operand0=scalar_or_vec(ANY),
    operand1=inp(CHIP),
    rules=[
        same_size("dst", "data", "operand1"),
        same_partitions("data", "operand0"),
        check_binary("op0", "op1"),
        Rule(
            "arithmetic operators only",
            lambda a: "a bit operator" if "bitvec" in (a["op0"].kind, a["op1"].kind) else None,
        ),
        not_both_psum("data", "operand1"),
    ],
)
def scalar_tensor_tensor(
    dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None
):
    """dst = (data op0 operand0) op1 operand1 in one pass; operand1 is a tile."""
    value = ordered(op0, f32(data), per_partition(operand0, data), reverse0)
    store(dst, ordered(op1, like(value, dst), like(f32(operand1), dst), reverse1))


# ------------------------------------------------------------------ copies and constants
@instruction(
    "vector scalar gpsimd",
    dst=out(CHIP),
    src=inp(CHIP),
    rules=[
        same_size("dst", "src"),
        engine_is("vector", "scalar", "gpsimd"),
        gpsimd_not_psum("dst", "src"),
    ],
)
def tensor_copy(dst, src, engine=engine.unknown, name=None):
    """dst = src; bit-exact for equal dtypes, through float32 otherwise."""
    if dst.dtype == src.dtype:
        dst.np[...] = like(src.np, dst)
    else:
        store(dst, f32(src))


def _check_memset_kind(a):
    value, dst = a["value"], a["dst"]
    whole = isinstance(value, (int, np.integer))
    if not whole and (dst.dtype in INTEGERS or not isinstance(value, (float, np.floating))):
        return f"value {value!r} for dst {dst.describe()}"
    return None


@instruction(
    "vector gpsimd",
    dst=out(CHIP),
    rules=[
        Rule("value is a number, and an integer for an integer tensor", _check_memset_kind),
        engine_is("vector", "gpsimd"),
        gpsimd_not_psum("dst"),
    ],
)
def memset(dst, value, engine=engine.unknown, name=None):
    """dst = one constant."""
    if dst.dtype in INTEGERS:
        dst.np[...] = np.asarray(value).astype(dst.np.dtype)
    else:
        dst.np[...] = cast(np.float32(value).reshape(1), dst.np.dtype)[0]


@instruction("vector", dst=out(CHIP), data=inp(CHIP), rules=[same_size("dst", "data")])
def reciprocal(dst, data, name=None):
    """dst = 1 / data."""
    store(dst, np.float32(1) / f32(data))


def iota_values(dst, pattern, offset, channel_multiplier):
    value = np.full(dst.shape[0], offset, np.int64) + channel_multiplier * np.arange(dst.shape[0])
    value = value.reshape(-1, *[1] * len(pattern))
    for axis, (step, count) in enumerate(pattern):
        shape = [1] * (len(pattern) + 1)
        shape[axis + 1] = count
        value = value + (step * np.arange(count)).reshape(shape)
    return value.reshape(dst.shape)


def _check_pattern(a):
    pattern, dst = a["pattern"], a["dst"]
    if len(pattern) > 4 or int(np.prod([n for _, n in pattern])) != free_size(dst):
        return f"pattern {pattern} for dst {dst.describe()}"
    return None


PATTERN = Rule("pattern has at most 4 [step, count]; counts multiply to N", _check_pattern)


@instruction("gpsimd", dst=out(SB), rules=[PATTERN])
def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """dst[p, i...] = offset + p · channel_multiplier + Σ step · i, in int32, then cast."""
    value = iota_values(dst, pattern, offset, channel_multiplier).astype(np.int32)
    if dst.dtype in EXACT:
        dst.np[...] = value.astype(dst.np.dtype)
    else:
        store(dst, value.astype(np.float32))


# ------------------------------------------------------------------ activation functions
def _check_activation(a):
    op = a["op"]
    if not isinstance(op, Op) or op.unary is None or op.kind != "activation":
        return f"op is {op!r}"
    return None


def _check_reduce_add(a):
    op = a["reduce_op"]
    return None if op is None or op is OPS["add"] else f"reduce_op {op!r}"


def _check_reduce_res(a):
    res = a["reduce_res"]
    if res is not None and (res.shape[0] != a["data"].shape[0] or free_size(res) != 1):
        return f"reduce_res {res.describe()} for data {a['data'].describe()}"
    return None


ACTIVATION = Rule("op is an activation function of the Scalar engine", _check_activation)
REDUCE_ADD = Rule("reduce_op is add", _check_reduce_add)
REDUCE_RES = Rule("reduce_res is [P, 1]", _check_reduce_res)


def _activate(dst, op, data, bias, scale):
    value = f32(data) * per_partition(scale, data)
    if bias is not None:
        value = value + per_partition(bias, data)
    try:
        value = op.unary(value)
    except ValueError as error:
        fail(
            f"{op.name} of {data.describe()}: {error}",
            rule="the hardware's table covers this range and reduces no argument",
            instruction="activation",
        )
    store(dst, value)
    return value


@instruction(
    "scalar",
    dst=out(CHIP),
    data=inp(CHIP),
    bias=scalar_or_vec(ANY, none=True),
    scale=scalar_or_vec(),
    reduce_res=out(CHIP, none=True),
    rules=[
        same_size("dst", "data"),
        same_partitions("data", "bias", "scale"),
        ACTIVATION,
        REDUCE_ADD,
        REDUCE_RES,
    ],
)
def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    name=None,
):
    """dst = op(data · scale + bias).

    With a reduce_cmd, the results are also summed over the free axes into the Scalar engine's 128
    accumulators; reduce_res reads them out. They keep their value between instructions.
    """
    value = _activate(dst, op, data, bias, scale)
    core = current_core()
    if reduce_cmd.name in ("reset", "reset_reduce"):
        core.scalar_accumulator = np.zeros((data.shape[0], 1), np.float32)
    if reduce_cmd.name in ("reduce", "reset_reduce"):
        total = value.reshape(data.shape[0], -1).sum(axis=1, keepdims=True, dtype=np.float32)
        core.scalar_accumulator = started(core.scalar_accumulator, "Scalar") + total
    if reduce_res is not None:
        store(reduce_res, started(core.scalar_accumulator, "Scalar"))


def started(accumulator, which):
    if accumulator is None:
        fail(
            f"the {which} accumulators are used before any instruction set them",
            rule="begin with reduce_cmd.reset_reduce",
        )
    return accumulator


@instruction(
    "scalar",
    dst=out(CHIP),
    data=inp(CHIP),
    reduce_res=out(CHIP),
    bias=scalar_or_vec(ANY, none=True),
    scale=scalar_or_vec(),
    rules=[
        same_size("dst", "data"),
        same_partitions("data", "bias", "scale"),
        ACTIVATION,
        REDUCE_ADD,
        REDUCE_RES,
    ],
)
def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    """`activation` with reset_reduce: dst = op(data · scale + bias), reduce_res = its row sums."""
    value = _activate(dst, op, data, bias, scale)
    total = value.reshape(data.shape[0], -1).sum(axis=1, keepdims=True, dtype=np.float32)
    current_core().scalar_accumulator = total
    store(reduce_res, total)


# ------------------------------------------------------------------ predicated copies
def _check_predicate_src(a):
    src, dst = a["src"], a["dst"]
    if src.__class__ is NkiTensor and (src.size != dst.size or src.dtype != dst.dtype):
        return f"src {src.describe()}, dst {dst.describe()}"
    return None


@instruction(
    "vector",
    dst=out(CHIP),
    src=inp(CHIP, kind="tile|float"),
    predicate=inp(CHIP, ("uint8", "uint16", "uint32", "bool_")),
    rules=[
        same_size("dst", "predicate"),
        Rule("src has dst's dtype and N", _check_predicate_src),
        not_both_psum("src", "predicate"),
    ],
    marks=False,
)
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """dst = src where predicate is not zero (reverse_pred: where it is); the rest stays."""
    chosen = like(predicate.np != 0, dst)
    if reverse_pred:
        chosen = ~chosen
    value = like(src.np, dst) if src.__class__ is NkiTensor else np.asarray(src, dst.np.dtype)
    np.copyto(dst.np, value, where=chosen)
    mark_written(dst, chosen)


def _trn3_only(name, instead=""):
    def refuse(*args, **kwargs):
        fail(f"{name} does not exist on trn2", rule=f"{name} is trn3 only", hint=instead)

    return refuse


exponential = _trn3_only("exponential", "nisa.activation(op=nl.exp, bias=...)")
activate2 = _trn3_only("activate2", "nisa.activation")
nc_matmul_mx = _trn3_only("nc_matmul_mx", "nisa.nc_matmul")
quantize_mx = _trn3_only("quantize_mx")
