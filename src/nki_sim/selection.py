"""Instructions that choose: by predicate tile, by index range, by affine expression, by value."""

import numpy as np

from .dtypes import BY_NAME, FLOATS
from .elementwise import NO_LOAD, PATTERN, iota_values, reduce_res_of, started
from .enums import reduce_cmd
from .numeric import f32, free_size, like, per_partition, rows, store
from .ops import OPS
from .reductions import accumulate
from .rules import not_both_psum, same_partitions, same_size
from .table import CHIP, SB, Rule, inp, instruction, mark_written, out, require_written

FP32_MIN = float(np.finfo(np.float32).min)
SMALL_INTEGERS = ("int8", "uint8", "int16", "uint16", "bool_")

MAX_ONLY = Rule(
    "reduce_op is maximum",
    lambda a: None if a["reduce_op"] is OPS["maximum"] else f"reduce_op {a['reduce_op']!r}",
)


def _reduce_into(reduce_res, command, values):
    total = accumulate(command, OPS["maximum"], values, None)
    if reduce_res is not None:
        store(reduce_res, started(total, "Vector", len(values)))


@instruction(
    "vector",
    dst=out(CHIP),
    predicate=inp(CHIP, SMALL_INTEGERS),
    on_true=inp(CHIP, set(BY_NAME) - {"int32", "uint32"}),
    on_false=inp(CHIP, ("float32",), kind="scalar|vec"),
    reduce_res=out(CHIP, FLOATS, none=True),
    rules=[
        same_size("dst", "predicate", "on_true"),
        same_partitions("dst", "on_false"),
        not_both_psum("predicate", "on_true"),
        reduce_res_of("on_true"),
        MAX_ONLY,
        NO_LOAD,
    ],
)
def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    reduce_op=OPS["maximum"],
    reverse_pred=False,
    name=None,
):
    """dst = on_true where predicate is not zero, else on_false; optionally the maximum of a row."""
    chosen = like(predicate.np != 0, on_true)
    if reverse_pred:
        chosen = ~chosen
    value = np.where(chosen, f32(on_true), per_partition(on_false, on_true))
    _reduce_into(reduce_res, reduce_cmd, value.reshape(len(value), -1))
    store(dst, value)


_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


def _check_comparisons(*names):
    def check(a):
        for name in names:
            if getattr(a[name], "name", None) not in _COMPARISONS:
                return f"{name} {a[name]!r}"
        return None

    return Rule("comparisons are equal, less, less_equal, greater, greater_equal", check)


@instruction(
    "vector",
    dst=out(CHIP),
    on_true_tile=inp(CHIP, FLOATS),
    bound0=inp(CHIP, ("float32",), kind="vec"),
    bound1=inp(CHIP, ("float32",), kind="vec"),
    reduce_res=out(CHIP, none=True),
    rules=[
        same_size("dst", "on_true_tile"),
        same_partitions("on_true_tile", "bound0", "bound1"),
        reduce_res_of("on_true_tile"),
        _check_comparisons("comp_op0", "comp_op1"),
        MAX_ONLY,
        NO_LOAD,
        Rule(
            "on_false_value is FP32_MIN",
            lambda a: (
                None if a["on_false_value"] == FP32_MIN else f"on_false_value {a['on_false_value']}"
            ),
        ),
    ],
)
def range_select(
    dst,
    on_true_tile,
    comp_op0,
    comp_op1,
    bound0,
    bound1,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_res=None,
    reduce_op=OPS["maximum"],
    range_start=0,
    on_false_value=FP32_MIN,
    name=None,
):
    """dst = x where cmp0(i, bound0) and cmp1(i, bound1), i = range_start + position; else FP32_MIN.

    The maximum of each row goes to the Vector accumulators and to reduce_res.
    """
    x = rows(on_true_tile)
    index = np.float32(range_start) + np.arange(x.shape[1], dtype=np.float32)[None, :]
    keep = (comp_op0.binary(index, rows(bound0)) != 0) & (comp_op1.binary(index, rows(bound1)) != 0)
    value = np.where(keep, x, np.float32(FP32_MIN))
    _reduce_into(reduce_res, reduce_cmd, value)
    store(dst, value)


@instruction(
    "gpsimd",
    dst=out(SB),
    on_true_tile=inp(SB),
    rules=[
        same_size("dst", "on_true_tile"),
        PATTERN,
        Rule(
            "on_false_value is a float",
            lambda a: (
                None
                if isinstance(a["on_false_value"], (float, int, np.floating))
                else f"on_false_value {a['on_false_value']!r}"
            ),
        ),
        _check_comparisons("cmp_op"),
    ],
)
def affine_select(
    dst,
    pattern,
    channel_multiplier,
    on_true_tile,
    on_false_value,
    cmp_op=OPS["equal"],
    offset=0,
    name=None,
):
    """dst = x where cmp(offset + p · channel_multiplier + Σ step · i, 0), else on_false_value."""
    value = iota_values(dst, pattern, offset, channel_multiplier)
    keep = cmp_op.binary(value, 0) != 0
    store(dst, np.where(keep, like(f32(on_true_tile), dst), np.float32(on_false_value)))


# ------------------------------------------------------------------ by value
def _eight(*names):
    def check(a):
        for name in names:
            if a[name] is not None and free_size(a[name]) != 8:
                return f"{name} {a[name].describe()}"
        return None

    return Rule("eight elements a partition: " + ", ".join(names), check)


def _long_enough(name):
    def check(a):
        n = free_size(a[name])
        return None if 8 <= n <= 16_384 else f"{name} {a[name].describe()}"

    return Rule(f"{name} has 8 to 16,384 elements a partition", check)


@instruction(
    "vector",
    dst=out(CHIP),
    src=inp(CHIP),
    rules=[
        same_partitions("dst", "src"),
        _long_enough("src"),
        _eight("dst"),
        Rule(
            "src has at most 3 free dimensions",
            lambda a: f"src {a['src'].describe()}" if a["src"].ndim > 4 else None,
        ),
    ],
)
def max8(dst, src, name=None):
    """dst = the eight largest values of each partition, descending."""
    store(dst, -np.sort(-rows(src), axis=1)[:, :8])


def _matches(data, vals, order):
    """[P, 8] positions: each value takes its first occurrence not yet taken; -1 if none."""
    found = np.full(vals.shape, -1, np.int64)
    for p in range(len(data)):
        free = np.ones(data.shape[1], bool)
        for j in order:
            hits = np.flatnonzero(free & (data[p] == vals[p, j]))
            if len(hits):
                found[p, j] = hits[0]
                free[hits[0]] = False
    return found


@instruction(
    "vector",
    dst=out(CHIP, ("uint16", "uint32")),
    data=inp(CHIP),
    vals=inp(CHIP),
    rules=[same_partitions("dst", "data", "vals"), _long_enough("data"), _eight("dst", "vals")],
)
def nc_find_index8(dst, data, vals, name=None):
    """dst = the first position of each of eight values; equal values take successive positions.

    An absent value gives all ones.
    """
    dst.np[...] = like(_matches(rows(data), rows(vals), range(8)).astype(dst.np.dtype), dst)


@instruction(
    "vector",
    dst=out(CHIP),
    data=inp(CHIP),
    vals=inp(CHIP),
    dst_idx=out(CHIP, ("uint16", "uint32"), none=True),
    rules=[
        same_size("dst", "data"),
        same_partitions("dst", "vals", "dst_idx"),
        _eight("vals", "dst_idx"),
        Rule(
            "imm is a number",
            lambda a: (
                None if isinstance(a["imm"], (int, float, np.number)) else f"imm {a['imm']!r}"
            ),
        ),
    ],
)
def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """dst = data with the first match of each of eight values replaced by imm.

    Equal values take successive positions, the last of them the first position.
    """
    x = rows(data).copy()
    found = _matches(x, rows(vals), range(7, -1, -1))
    part, column = np.nonzero(found >= 0)
    x[part, found[part, column]] = np.float32(imm)
    store(dst, x)
    if dst_idx is not None:
        dst_idx.np[...] = like(found.astype(dst_idx.np.dtype), dst_idx)


@instruction(
    "gpsimd",
    dst=out(SB, ("int32",)),
    src=inp(SB, ("float32", "int32"), reads=False),
    rules=[
        same_partitions("dst", "src"),
        Rule(
            "dst has one element a partition more than src",
            lambda a: (
                None
                if free_size(a["dst"]) == free_size(a["src"]) + 1
                else f"dst {a['dst'].describe()}, src {a['src'].describe()}"
            ),
        ),
    ],
    marks=False,
)
def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    """dst = positions of non-zeros + index_offset, then padding, then their count.

    Only partitions 0, 16, ..., 112 are read and written: one for each GpSimd core.
    """
    for p in range(0, src.shape[0], 16):
        row, target = src[p : p + 1], dst[p : p + 1]
        require_written(row, "nonzero_with_count", "src")
        found = np.flatnonzero(row.np.reshape(-1)) + index_offset
        values = np.full(free_size(dst), padding_val, np.int32)
        values[: len(found)], values[-1] = found, len(found)
        target.np[...] = like(values, target)
        mark_written(target)
