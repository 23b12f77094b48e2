"""Element-wise instructions of the Vector, Scalar and GpSimd engines.

Operands are read, computed in float32, and rounded once to the destination's dtype; free shapes
may differ if the element counts match, because elements pair up in row-major order.
"""

import numpy as np

from .dtypes import ANY, INTEGERS, cast, holds
from .enums import engine, reduce_cmd
from .errors import fail
from .machine import current_core
from .numeric import f32, free_size, like, per_partition, store
from .ops import OPS, Op
from .rules import (
    engine_is,
    gpsimd_not_psum,
    not_both_psum,
    resolved_engine,
    same_partitions,
    same_size,
)
from .table import CHIP, SB, Rule, inp, instruction, mark_written, out, scalar_or_vec
from .tensors import NkiTensor

EXACT = ("int32", "uint32")
POWER, RSQRT = OPS["power"], OPS["rsqrt"]


# ------------------------------------------------------------------ operators
def _absent(name):
    return f"{name}: no trn2 engine computes it; divide is reciprocal and multiply"


def binary(*names, also=()):
    """Each argument is a binary ALU operator, or one of `also` where the page allows more."""

    def check(a):
        for name in names:
            op = a[name]
            if any(op is other for other in also):
                continue
            if not isinstance(op, Op):
                return f"{name} is {op!r}, not an operator of nki.language"
            if op.kind == "absent":
                return _absent(op.name)
            if op.binary is None:
                return f"{name} is {op.name}, not a binary operator"
            if op is POWER:
                return f"{name} is power, which only tensor_tensor computes"
        return None

    others = [getattr(op, "name", "left out") for op in also]
    return Rule(" or ".join([f"{', '.join(names)}: binary ALU operators", *others]), check)


def arithmetic(*names):
    def check(a):
        return next((f"{n} {a[n].name}" for n in names if a[n].kind == "bitvec"), None)

    return Rule("arithmetic operators only", check)


def bits(*names):
    def check(a):
        kinds = {a[name].kind == "bitvec" for name in names if a[name] is not None}
        if True not in kinds:
            return None
        if False in kinds:
            return "a bit operator and an arithmetic operator in one instruction"
        dst = a["dst"]
        width = 8 * dst.itemsize
        for name, value in a.items():
            if value.__class__ is NkiTensor:
                if value.dtype not in INTEGERS or value.itemsize != dst.itemsize:
                    return f"bit operator on {name} {value.describe()}, dst {dst.describe()}"
            elif name.startswith("operand") and value is not None:
                whole = isinstance(value, (int, np.integer))
                if not whole or not -(2 ** (width - 1)) <= value < 2**width:
                    return f"bit operator with {name} {value!r}, dst {dst.describe()}"
        return None

    return Rule(
        "bit operators take integers of one width, cast nothing, and do not mix with arithmetic",
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
    return "gpsimd" if integers or a["op"] is POWER else "vector"


def _check_power(a):
    on_vector = a["op"] is POWER and a["engine"] is engine.vector
    return "power on engine vector" if on_vector else None


@instruction(
    "vector gpsimd",
    dst=out(CHIP),
    data1=inp(CHIP),
    data2=inp(CHIP),
    rules=[
        same_size("dst", "data1", "data2"),
        binary("op", also=[POWER]),
        bits("op"),
        not_both_psum("data1", "data2"),
        engine_is("vector", "gpsimd"),
        gpsimd_not_psum("dst", "data1", "data2", pick=_tensor_tensor_engine),
        Rule("power runs on GpSimd", _check_power),
    ],
    pick=_tensor_tensor_engine,
)
def tensor_tensor(dst, data1, data2, op, engine=engine.unknown, name=None):
    """dst = data1 op data2, element by element.

    int32/uint32 throughout, in SBUF, without engine=vector: exact integers on GpSimd, modulo 2^32.
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
        if op is POWER and y.min() < 0:
            fail(
                f"power with the exponent {y.min()} in {data2.describe()}",
                rule="integers have no negative powers",
                instruction="tensor_tensor",
            )
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


def _tensor_scalar_engine(a):
    return "gpsimd" if a["op0"] is RSQRT else "vector"


def _check_scalar_engine(a):
    name = resolved_engine(a, _tensor_scalar_engine)
    ops = (a["op0"].name, a["op1"].name if a["op1"] else None)
    on_scalar = ops in (("multiply", "add"), ("multiply", None), ("add", None))
    on_gpsimd = ops == ("rsqrt", None)
    if (name == "scalar" and not on_scalar) or (name == "gpsimd") != on_gpsimd:
        return f"operators {ops} on engine {name}"
    return None


def _check_rsqrt(a):
    zero = a["operand0"].__class__ is not NkiTensor and a["operand0"] == 0
    if a["op0"] is RSQRT and (not zero or a["reverse0"]):
        return f"rsqrt with operand0 {a['operand0']!r}, reverse0 {a['reverse0']}"
    return None


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
        binary("op0", also=[RSQRT, OPS["invert"]]),
        binary("op1", also=[None]),
        bits("op0", "op1"),
        Rule("op1 needs operand1 and operand1 needs op1", _check_second),
        engine_is("vector", "scalar", "gpsimd"),
        Rule(
            "Scalar: multiply+add, multiply or add; GpSimd: rsqrt and nothing else; Vector: the "
            "others",
            _check_scalar_engine,
        ),
        Rule("rsqrt has one operand: operand0 is the number 0", _check_rsqrt),
        gpsimd_not_psum("dst", "data", pick=_tensor_scalar_engine),
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
        binary("op0", "op1"),
        arithmetic("op0", "op1"),
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


def _check_memset_value(a):
    value, dst = a["value"], a["dst"]
    return None if holds(dst.dtype, value) else f"value {value!r} for dst {dst.describe()}"


@instruction(
    "vector gpsimd",
    dst=out(CHIP),
    rules=[
        Rule(
            "value is a number in the range of dst's dtype, and an integer for an integer tensor",
            _check_memset_value,
        ),
        engine_is("vector", "gpsimd"),
        gpsimd_not_psum("dst"),
    ],
)
def memset(dst, value, engine=engine.unknown, name=None):
    """dst = one constant."""
    dst.np[...] = _constant(value, dst)


def _constant(value, dst):
    """A number that the dtype of `dst` holds, rounded to it through float32."""
    if dst.dtype in INTEGERS:
        return dst.np.dtype.type(value)
    return cast(np.float32(value).reshape(1), dst.np.dtype)[0]


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


def _check_iota_range(a):
    last = [(a["channel_multiplier"], a["dst"].shape[0]), *a["pattern"]]
    reach = [step * (count - 1) for step, count in last]
    low = a["offset"] + sum(r for r in reach if r < 0)
    high = a["offset"] + sum(r for r in reach if r > 0)
    if low < -(2**31) or high >= 2**31:
        return f"values from {low} to {high}"
    return None


@instruction(
    "gpsimd", dst=out(SB), rules=[PATTERN, Rule("all values fit int32", _check_iota_range)]
)
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


def reduce_res_of(source):
    def check(a):
        res = a["reduce_res"]
        if res is not None and (res.shape[0] != a[source].shape[0] or free_size(res) != 1):
            return f"reduce_res {res.describe()} for {source} {a[source].describe()}"
        return None

    return Rule("reduce_res is [P, 1]", check)


def _check_load(a):
    return "reduce_cmd load_reduce" if a["reduce_cmd"].name == "load_reduce" else None


ACTIVATION = Rule("op is an activation function of the Scalar engine", _check_activation)
REDUCE_ADD = Rule("reduce_op is add", _check_reduce_add)
NO_LOAD = Rule("reduce_cmd loads nothing: no argument holds a value to load", _check_load)


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
        reduce_res_of("data"),
        NO_LOAD,
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
    core, count = current_core(), data.shape[0]
    if reduce_cmd.name in ("reset", "reset_reduce"):
        core.scalar_accumulator = np.zeros((count, 1), np.float32)
    if reduce_cmd.name in ("reduce", "reset_reduce"):
        total = value.reshape(count, -1).sum(axis=1, keepdims=True, dtype=np.float32)
        core.scalar_accumulator = started(core.scalar_accumulator, "Scalar", count) + total
    if reduce_res is not None:
        store(reduce_res, started(core.scalar_accumulator, "Scalar", count))


def started(accumulator, which, count):
    """The accumulators of an engine, [P, 1]; an error if they were set for no or another P."""
    if accumulator is None:
        fail(
            f"the {which} accumulators are used before any instruction set them",
            rule="begin with reduce_cmd.reset_reduce",
        )
    if len(accumulator) != count:
        fail(
            f"the {which} accumulators hold {len(accumulator)} partitions, this instruction has "
            f"{count}",
            rule="instructions that share accumulators have equal P",
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
        reduce_res_of("data"),
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
    if src.__class__ is not NkiTensor:
        return None if holds(dst.dtype, src) else f"src {src!r}, dst {dst.describe()}"
    if src.shape[0] != dst.shape[0] or src.size != dst.size or src.dtype != dst.dtype:
        return f"src {src.describe()}, dst {dst.describe()}"
    return None


@instruction(
    "vector",
    dst=out(CHIP),
    src=inp(CHIP, kind="tile|float"),
    predicate=inp(CHIP, ("uint8", "uint16", "uint32", "bool_")),
    rules=[
        same_size("dst", "predicate"),
        Rule(
            "src has dst's dtype, P and N, or is a number that dst's dtype holds",
            _check_predicate_src,
        ),
        not_both_psum("src", "predicate"),
    ],
    marks=False,
)
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """dst = src where predicate is not zero (reverse_pred: where it is); the rest stays."""
    chosen = like(predicate.np != 0, dst)
    if reverse_pred:
        chosen = ~chosen
    value = like(src.np, dst) if src.__class__ is NkiTensor else _constant(src, dst)
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
