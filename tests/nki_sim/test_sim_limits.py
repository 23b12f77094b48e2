"""Every documented limit of the table: one call that breaks it, one that just meets it.

`GOOD` holds one call of each instruction that meets every rule, where it can at the very limit.
Limits of single operands and the shared rules are broken from the table itself; rules of one
instruction have their own entry in `CASES`. A rule without a case fails `test_no_rule_is_untested`.
"""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from sim_helpers import blank, on_core, tile

from nki_sim import KernelError
from nki_sim.dtypes import BY_NAME
from nki_sim.table import TABLE
from nki_sim.tensors import NkiTensor


def full(*shape, dtype="float32", place="sbuf"):
    """A written tile."""
    return tile(np.ones(shape).astype(BY_NAME[dtype]), place, dtype)


def bf16(*shape, place="sbuf"):
    return full(*shape, dtype="bfloat16", place=place)


def rows(*values, dtype="int32"):
    return tile(np.array(values).reshape(-1, 1), dtype=dtype)


def gather(place="hbm", dtype="float32", index=None, width=4):
    """A gather of 16 rows out of 20."""
    index = rows(*range(16)) if index is None else index
    base = full(20, width, dtype=dtype, place=place)
    return base.ap([[width, index.shape[0]], [1, width]], vector_offset=index)


V = (128, 8)
# Calls that meet every limit, where they can exactly.
GOOD = {
    "dma_copy": lambda: {"dst": blank((16, 4)), "src": full(4, 16, place="hbm")},
    "dma_transpose": lambda: {"dst": blank((128, 16), "bfloat16"), "src": bf16(16, 128)},
    "dma_compute": lambda: {"dst": blank(V), "srcs": [full(*V)] * 16, "reduce_op": nl.add},
    "tensor_tensor": lambda: {"dst": blank(V), "data1": full(*V), "data2": full(*V), "op": nl.add},
    "tensor_scalar": lambda: {"dst": blank(V), "data": full(*V), "op0": nl.add, "operand0": 1.0,
                              "op1": nl.multiply, "operand1": full(128, 1)},
    "scalar_tensor_tensor": lambda: {"dst": blank(V), "data": full(*V), "op0": nl.add,
                                     "operand0": full(128, 1), "op1": nl.add, "operand1": full(*V)},
    "tensor_copy": lambda: {"dst": blank(V), "src": full(*V)},
    "memset": lambda: {"dst": blank(V), "value": 1.0},
    "reciprocal": lambda: {"dst": blank(V), "data": full(*V)},
    "iota": lambda: {"dst": blank((128, 16), "int32"), "pattern": [[1, 2]] * 4},
    "activation": lambda: {"dst": blank(V), "op": nl.exp, "data": full(*V), "bias": full(128, 1),
                           "scale": full(128, 1), "reduce_op": nl.add,
                           "reduce_res": blank((128, 1)),
                           "reduce_cmd": nisa.reduce_cmd.reset_reduce},
    "activation_reduce": lambda: {"dst": blank(V), "op": nl.exp, "data": full(*V),
                                  "reduce_op": nl.add, "reduce_res": blank((128, 1))},
    "tensor_copy_predicated": lambda: {"dst": blank(V), "src": full(*V),
                                       "predicate": full(*V, dtype="uint8")},
    "tensor_reduce": lambda: {"dst": blank((128, 2)), "op": nl.add, "data": full(128, 2, 4),
                              "axis": 2},
    "tensor_partition_reduce": lambda: {"dst": blank((1, 8)), "op": nl.add, "data": full(*V)},
    "tensor_scalar_reduce": lambda: {"dst": blank(V), "data": full(*V), "op0": nl.add,
                                     "operand0": 1.0, "reduce_op": nl.add,
                                     "reduce_res": blank((128, 1))},
    "tensor_tensor_scan": lambda: {"dst": blank(V), "data0": full(*V), "data1": full(*V),
                                   "initial": 0.0, "op0": nl.multiply, "op1": nl.add},
    "tensor_scalar_cumulative": lambda: {"dst": blank(V), "src": full(*V), "op0": nl.add,
                                         "op1": nl.add, "imm0": 1.0},
    "bn_stats": lambda: {"dst": blank((128, 6)), "data": full(128, 512)},
    "bn_aggr": lambda: {"dst": blank((128, 2)), "data": full(128, 6)},
    "select_reduce": lambda: {"dst": blank(V), "predicate": full(*V, dtype="uint8"),
                              "on_true": full(*V), "on_false": 0.0, "reduce_res": blank((128, 1)),
                              "reduce_cmd": nisa.reduce_cmd.reset_reduce},
    "range_select": lambda: {"dst": blank(V), "on_true_tile": full(*V), "comp_op0": nl.less,
                             "comp_op1": nl.greater_equal, "bound0": full(128, 1),
                             "bound1": full(128, 1), "reduce_res": blank((128, 1))},
    "affine_select": lambda: {"dst": blank((128, 16)), "pattern": [[1, 2]] * 4,
                              "channel_multiplier": 1, "on_true_tile": full(128, 16),
                              "on_false_value": 0.0},
    "max8": lambda: {"dst": blank(V), "src": full(*V)},
    "nc_find_index8": lambda: {"dst": blank(V, "uint32"), "data": full(*V), "vals": full(*V)},
    "nc_match_replace8": lambda: {"dst": blank((128, 9)), "data": full(128, 9), "vals": full(*V),
                                  "imm": 0.0, "dst_idx": blank(V, "uint32")},
    "nonzero_with_count": lambda: {"dst": blank((128, 9), "int32"), "src": full(*V)},
    "nc_stream_shuffle": lambda: {"dst": blank(V), "src": full(*V), "shuffle_mask": [31] * 32},
    "nc_n_gather": lambda: {"dst": blank(V), "data": full(*V), "indices": full(*V, dtype="uint32")},
    "local_gather": lambda: {"dst": blank((128, 16)), "src_buffer": full(*V),
                             "index": full(128, 1, dtype="uint16")},
    "nc_matmul": lambda: {"dst": blank((128, 512), place="psum"), "stationary": bf16(128, 128),
                          "moving": bf16(128, 512)},
    "nc_transpose": lambda: {"dst": blank((128, 128), place="psum"), "data": full(128, 128)},
    "register_move": lambda: {"dst": nisa.register_alloc(), "src": 1},
    "register_load": lambda: {"dst": nisa.register_alloc(), "src": full(1, 1, dtype="int32")},
    "register_store": lambda: {"dst": blank((1, 1), "int32"), "src": nisa.register_alloc(1)},
    "core_barrier": lambda: {"data": full(*V, place="hbm"), "cores": (0, 1)},
    "sendrecv": lambda: {"src": full(128, 256), "dst": blank((128, 256)),
                         "send_to_rank": 1 - nl.program_id(), "recv_from_rank": 1 - nl.program_id(),
                         "pipe_id": 0, "dma_engine": nisa.dma_engine.gpsimd_dma},
}  # fmt: skip
TWO_CORES = {"core_barrier", "sendrecv"}

E, DGE, OOB = nisa.engine, nisa.dge_mode, nisa.oob_mode
double_row = nisa.matmul_perf_mode.double_row


def fp8(*shape):
    return full(*shape, dtype="float8_e4m3")


# (instruction, start of the rule's text) -> changes that break it, changes that just meet it.
CASES = {
    ("dma_copy", "total element counts"): (
        lambda: {"src": full(4, 17, place="hbm")}, lambda: {"src": full(64, 1, place="hbm")}),
    ("dma_copy", "dge_mode.hwdge needs"): (
        lambda: {"src": bf16(4, 16), "dge_mode": DGE.hwdge}, lambda: {"dge_mode": DGE.hwdge}),
    ("dma_copy", "gather and scatter"): (
        lambda: {"src": gather(), "dge_mode": DGE.hwdge},
        lambda: {"src": gather(), "dge_mode": DGE.swdge}),
    ("dma_copy", "engine sync or scalar"): (
        lambda: {"engine": E.sync}, lambda: {"engine": E.sync, "dge_mode": DGE.hwdge}),
    ("dma_copy", "oob_mode.skip"): (
        lambda: {"oob_mode": OOB.skip}, lambda: {"src": gather(), "oob_mode": OOB.skip}),
    ("dma_copy", "priority"): (lambda: {"priority": 0}, lambda: {"priority": None}),
    ("dma_transpose", "axes are fixed"): (
        lambda: {"axes": (0, 1)}, lambda: {"axes": (1, 0)}),
    ("dma_transpose", "dst has the transposed"): (
        lambda: {"dst": blank((128, 2, 8), "bfloat16")}, lambda: {}),
    ("dma_transpose", "equal dtype"): (lambda: {"dst": blank((128, 16))}, lambda: {}),
    ("dma_transpose", "hwdge"): (
        lambda: {"src": full(16, 128), "dst": blank((128, 16)), "dge_mode": DGE.hwdge},
        lambda: {"dge_mode": DGE.hwdge}),
    ("dma_transpose", "by row indices"): (
        lambda: {"src": gather(dtype="bfloat16"), "dst": blank((4, 16), "bfloat16")},
        lambda: {"src": gather(dtype="bfloat16", index=rows(*range(16), dtype="uint32")),
                 "dst": blank((4, 16), "bfloat16")}),
    ("dma_transpose", "gather and scatter"): (
        lambda: {"src": gather(dtype="bfloat16", index=rows(*range(16), dtype="uint32")),
                 "dst": blank((4, 16), "bfloat16"), "dge_mode": DGE.none},
        lambda: {"src": gather(dtype="bfloat16", index=rows(*range(16), dtype="uint32")),
                 "dst": blank((4, 16), "bfloat16"), "dge_mode": DGE.swdge}),
    ("dma_transpose", "oob_mode.skip"): (
        lambda: {"oob_mode": OOB.skip},
        lambda: {"src": gather(dtype="bfloat16", index=rows(*range(16), dtype="uint32")),
                 "dst": blank((4, 16), "bfloat16"), "oob_mode": OOB.skip}),
    ("dma_transpose", "priority"): (lambda: {"priority": 1}, lambda: {}),
    ("dma_compute", "total element counts"): (
        lambda: {"srcs": [full(128, 9)]}, lambda: {"srcs": [full(8, 128)]}),
    ("dma_compute", "reduce_op is add"): (lambda: {"reduce_op": nl.multiply}, lambda: {}),
    ("dma_compute", "all scales"): (
        lambda: {"scales": [2.0] * 16}, lambda: {"scales": [1.0] * 16}),
    ("dma_compute", "at most 16"): (lambda: {"srcs": [full(*V)] * 17}, lambda: {}),
    ("dma_compute", "row indices are unique"): (
        lambda: {"dst": (g := gather(index=rows(*range(15), 3))), "srcs": [g, full(16, 4)]},
        lambda: {"dst": (g := gather()), "srcs": [g, full(16, 4)]}),
    ("dma_compute", "oob_mode.skip"): (
        lambda: {"oob_mode": OOB.skip},
        lambda: {"dst": (g := gather()), "srcs": [g, full(16, 4)], "oob_mode": OOB.skip}),
    ("tensor_tensor", "operators are ALU"): (
        lambda: {"op": nl.bitwise_and}, lambda: {"op": nl.logical_xor}),
    ("tensor_tensor", "power runs"): (
        lambda: {"op": nl.power, "data1": full(*V, place="psum")}, lambda: {"op": nl.power}),
    ("tensor_scalar", "square, relu"): (lambda: {"op0": nl.square}, lambda: {"op0": nl.maximum}),
    ("tensor_scalar", "operators are ALU"): (lambda: {"op0": nl.exp}, lambda: {"op0": nl.less}),
    ("tensor_scalar", "op1 needs operand1"): (
        lambda: {"operand1": None}, lambda: {"op1": None, "operand1": None}),
    ("tensor_scalar", "Scalar: multiply+add"): (
        lambda: {"engine": E.scalar},
        lambda: {"op0": nl.multiply, "op1": nl.add, "engine": E.scalar}),
    ("scalar_tensor_tensor", "operators are ALU"): (lambda: {"op0": nl.divide}, lambda: {}),
    ("scalar_tensor_tensor", "arithmetic operators only"): (
        lambda: {"op0": nl.bitwise_or, "op1": nl.bitwise_or, "operand0": 1,
                 "dst": blank(V, "int32"), "data": full(*V, dtype="int32"),
                 "operand1": full(*V, dtype="int32")},
        lambda: {"op0": nl.logical_or}),
    ("memset", "value is a number"): (
        lambda: {"dst": blank(V, "int32")}, lambda: {"dst": blank(V, "int32"), "value": 1}),
    ("iota", "pattern has"): (
        lambda: {"pattern": [[1, 1]] + [[1, 2]] * 4}, lambda: {"pattern": [[1, 16]]}),
    ("activation", "op is an activation"): (lambda: {"op": nl.add}, lambda: {"op": nl.silu}),
    ("activation", "reduce_op is add"): (lambda: {"reduce_op": nl.maximum}, lambda: {}),
    ("activation", "reduce_res is [P, 1]"): (
        lambda: {"reduce_res": blank((128, 2))}, lambda: {}),
    ("activation_reduce", "op is an activation"): (lambda: {"op": nl.less}, lambda: {}),
    ("activation_reduce", "reduce_op is add"): (lambda: {"reduce_op": nl.minimum}, lambda: {}),
    ("activation_reduce", "reduce_res is [P, 1]"): (
        lambda: {"reduce_res": blank((127, 1))}, lambda: {}),
    ("tensor_copy_predicated", "src has dst's"): (
        lambda: {"src": full(128, 9)}, lambda: {"src": full(128, 2, 4)}),
    ("tensor_reduce", "the operator reduces"): (
        lambda: {"op": nl.less}, lambda: {"op": nl.minimum}),
    ("tensor_reduce", "axis"): (
        lambda: {"axis": (0, 1, 2)}, lambda: {"axis": (1, 2), "dst": blank((128, 1))}),
    ("tensor_reduce", "dst holds one"): (
        lambda: {"dst": blank((128, 3))}, lambda: {"dst": blank((128, 2, 1))}),
    ("tensor_partition_reduce", "op is add"): (
        lambda: {"op": nl.multiply}, lambda: {"op": nl.average}),
    ("tensor_scalar_reduce", "operators are ALU"): (lambda: {"op0": nl.exp}, lambda: {}),
    ("tensor_scalar_reduce", "reduce_op is add"): (
        lambda: {"reduce_op": nl.subtract}, lambda: {"reduce_op": nl.minimum}),
    ("tensor_scalar_reduce", "reduce_res is [P, 1]"): (
        lambda: {"reduce_res": blank((128, 2))}, lambda: {}),
    ("tensor_scalar_reduce", "reduce_init"): (
        lambda: {"reduce_init": 1.0},
        lambda: {"reduce_init": 1.0, "reduce_cmd": nisa.reduce_cmd.load_reduce}),
    ("tensor_scalar_reduce", "reduce_res may"): (
        lambda: {"reduce_res": None, "_version": "0.5"}, lambda: {"reduce_res": None}),
    ("tensor_scalar_reduce", "reverse0"): (lambda: {"reverse0": True}, lambda: {}),
    ("tensor_tensor_scan", "operators are ALU"): (lambda: {"op1": nl.mod}, lambda: {}),
    ("tensor_scalar_cumulative", "operators are ALU"): (lambda: {"op0": nl.exp}, lambda: {}),
    ("tensor_scalar_cumulative", "no 32-bit"): (
        lambda: {"src": full(*V, dtype="int32")}, lambda: {"src": full(*V, dtype="int16")}),
    ("bn_stats", "dst is [P, 6]"): (lambda: {"dst": blank((128, 5))}, lambda: {}),
    ("bn_aggr", "data is triples"): (
        lambda: {"data": full(128, 7)}, lambda: {"data": full(128, 3)}),
    ("select_reduce", "reduce_res is [P, 1]"): (
        lambda: {"reduce_res": blank((128, 2))}, lambda: {}),
    ("select_reduce", "reduce_op is maximum"): (lambda: {"reduce_op": nl.add}, lambda: {}),
    ("range_select", "comparisons"): (lambda: {"comp_op0": nl.not_equal}, lambda: {}),
    ("range_select", "reduce_op is maximum"): (lambda: {"reduce_op": nl.minimum}, lambda: {}),
    ("range_select", "on_false_value"): (
        lambda: {"on_false_value": 0.0}, lambda: {"on_false_value": float(np.finfo("f4").min)}),
    ("affine_select", "pattern has"): (lambda: {"pattern": [[1, 15]]}, lambda: {}),
    ("affine_select", "on_false_value"): (lambda: {"on_false_value": "0"}, lambda: {}),
    ("affine_select", "comparisons"): (
        lambda: {"cmp_op": nl.add}, lambda: {"cmp_op": nl.greater_equal}),
    ("max8", "src has 8 to"): (lambda: {"src": full(128, 7)}, lambda: {"src": full(128, 16_384)}),
    ("max8", "eight elements"): (lambda: {"dst": blank((128, 7))}, lambda: {}),
    ("nc_find_index8", "data has 8 to"): (
        lambda: {"data": full(2, 16_385), "vals": full(2, 8), "dst": blank((2, 8), "uint32")},
        lambda: {"data": full(2, 16_384), "vals": full(2, 8), "dst": blank((2, 8), "uint32")}),
    ("nc_find_index8", "eight elements"): (lambda: {"vals": full(128, 9)}, lambda: {}),
    ("nc_match_replace8", "eight elements"): (lambda: {"vals": full(128, 7)}, lambda: {}),
    ("nonzero_with_count", "dst has one"): (lambda: {"dst": blank(V, "int32")}, lambda: {}),
    ("nc_stream_shuffle", "shuffle_mask"): (
        lambda: {"shuffle_mask": [32] * 32}, lambda: {"shuffle_mask": [255] * 32}),
    ("nc_stream_shuffle", "equal N"): (lambda: {"src": full(128, 9)}, lambda: {"src": full(32, 8),
                                                                       "dst": blank((32, 8))}),
    ("local_gather", "equal P, a multiple"): (
        lambda: {"src_buffer": full(120, 8), "index": full(120, 1, dtype="uint16")},
        lambda: {"src_buffer": full(16, 8), "index": full(16, 1, dtype="uint16"),
                 "dst": blank((16, 16))}),
    ("local_gather", "num_elem_per_idx"): (
        lambda: {"num_elem_per_idx": 3},
        lambda: {"num_elem_per_idx": 4, "dst": blank((128, 64))}),
    ("nc_matmul", "equal K"): (lambda: {"stationary": bf16(127, 128)}, lambda: {}),
    ("nc_matmul", "M (free"): (lambda: {"stationary": bf16(128, 129)}, lambda: {}),
    ("nc_matmul", "N (free"): (
        lambda: {"moving": bf16(128, 513), "dst": blank((128, 513), place="psum")}, lambda: {}),
    ("nc_matmul", "dst is [M, N]"): (lambda: {"dst": blank((128, 511), place="psum")}, lambda: {}),
    ("nc_matmul", "float32 only"): (
        lambda: {"stationary": full(128, 128)},
        lambda: {"stationary": full(128, 128), "moving": full(128, 512)}),
    ("nc_matmul", "float8_e4m3fn"): (
        lambda: {"moving": full(128, 512, dtype="float8_e4m3fn")},
        lambda: {"moving": full(128, 512, dtype="float8_e4m3")}),
    ("nc_matmul", "dst is float32"): (
        lambda: {"dst": blank((128, 512), "bfloat16", "psum")},
        lambda: {"dst": blank((128, 128), "bfloat16", "psum"), "is_transpose": True,
                 "moving": tile(np.eye(128), dtype="bfloat16")}),
    ("nc_matmul", "the result lies"): (
        lambda: {"dst": blank((128, 1024), place="psum")[:, 1:513]},
        lambda: {"dst": blank((128, 1024), place="psum")[:, 512:1024]}),
    ("nc_matmul", "double_row"): (
        lambda: {"perf_mode": double_row, "stationary": bf16(128, 2, 128),
                 "moving": bf16(128, 2, 512)},
        lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                 "moving": fp8(128, 2, 512)}),
    ("nc_matmul", "tile_position"): (
        lambda: {"tile_position": (0, 0), "tile_size": (64, 128)},
        lambda: {"tile_position": (64, 64), "tile_size": (64, 64), "stationary": bf16(64, 64),
                 "moving": bf16(64, 512), "dst": blank((64, 512), place="psum")}),
    ("nc_transpose", "dst is [N, P]"): (
        lambda: {"dst": blank((127, 128), place="psum")}, lambda: {}),
    ("nc_transpose", "tensor: ≤ 128"): (
        lambda: {"data": full(33, 32), "dst": blank((32, 33))},
        lambda: {"data": full(32, 32), "dst": blank((32, 32))}),
    ("nc_transpose", "equal dtype"): (
        lambda: {"dst": blank((128, 128), "bfloat16", "psum")}, lambda: {}),
    ("register_move", "dst is a register"): (
        lambda: {"dst": 1}, lambda: {"dst": nisa.register_alloc(2)}),
    ("register_move", "src is a register"): (
        lambda: {"src": 1.0}, lambda: {"src": nisa.register_alloc(2)}),
    ("register_load", "dst is a register"): (lambda: {"dst": 1}, lambda: {}),
    ("register_load", "src is a tensor"): (
        lambda: {"src": full(1, 2, dtype="int32")}, lambda: {"src": full(1, 1, 1, dtype="int32")}),
    ("register_store", "src is a register"): (lambda: {"src": None}, lambda: {"src": 2**31 - 1}),
    ("register_store", "dst is a tensor"): (
        lambda: {"dst": blank((2, 1), "int32")}, lambda: {"dst": blank((2, 1), "int32")[1:2]}),
    ("core_barrier", "data lies in"): (
        lambda: {"data": nl.ndarray((1, 1), nl.int32, buffer=nl.private_hbm)}, lambda: {}),
    ("sendrecv", "LNC is 2"): (lambda: {"_lnc": 1}, lambda: {}),
    ("sendrecv", "equal shape"): (lambda: {"dst": blank((128, 2, 128))}, lambda: {}),
    ("sendrecv", "each core sends"): (lambda: {"send_to_rank": nl.program_id()}, lambda: {}),
    ("sendrecv", "gpsimd_dma"): (
        lambda: {"src": full(128, 257), "dst": blank((128, 257))}, lambda: {}),
}  # fmt: skip


def break_shared(rule, a):
    """Changes that break a shared rule of rules.py, from its kind and the operands it names."""
    last = rule.names[-1]
    if rule.kind == "engine_is":
        return {"engine": E.tensor}
    if rule.kind == "gpsimd_not_psum":
        t = a[rule.names[0]]
        return {rule.names[0]: full(*t.shape, dtype=t.dtype, place="psum"), "engine": E.gpsimd}
    if rule.kind == "not_both_psum":
        return {n: full(*a[n].shape, dtype=a[n].dtype, place="psum") for n in rule.names}
    t = next((a[n] for n in reversed(rule.names) if isinstance(a.get(n), NkiTensor)), None)
    last = next((n for n in reversed(rule.names) if isinstance(a.get(n), NkiTensor)), last)
    if last == rule.names[0]:  # all others are numbers in the good call: give one a tile
        last = rule.names[-1]
        return {last: full(t.shape[0] - 1, 1)}
    if rule.kind == "same_size":
        return {last: full(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype)}
    if rule.kind == "same_partitions":
        return {last: full(t.shape[0] - 1, *t.shape[1:], dtype=t.dtype)}
    assert rule.kind == "same_dtype"
    other = "bfloat16" if t.dtype != "bfloat16" else "float16"
    return {last: full(*t.shape, dtype=other)}


def call(name, changes):
    """The instruction's good call with changes, on as many cores as it needs."""
    lnc, version = 2 if name in TWO_CORES else 1, "0.6"
    probe = {}
    on_core(lambda: probe.update(changes(GOOD[name]())))
    lnc, version = probe.get("_lnc", lnc), probe.get("_version", version)

    def body():
        a = GOOD[name]()
        a.update({k: v for k, v in changes(a).items() if not k.startswith("_")})
        getattr(nisa, name)(**a)

    on_core(body, lnc, version)


RULES = [(name, rule) for name, row in TABLE.items() for rule in row.rules]


def find(name, rule):
    return next((c for (n, t), c in CASES.items() if n == name and rule.text.startswith(t)), None)


def test_no_rule_is_untested():
    missing = [(n, r.text) for n, r in RULES if r.kind is None and find(n, r) is None]
    assert not missing
    stale = [k for k in CASES if not any(k[0] == n and r.text.startswith(k[1]) for n, r in RULES)]
    assert not stale
    assert set(GOOD) == set(TABLE)


@pytest.mark.parametrize("name", list(TABLE))
def test_the_good_call_meets_every_limit(name):
    call(name, lambda a: {})


@pytest.mark.parametrize(("name", "rule"), RULES, ids=[f"{n}: {r.text[:40]}" for n, r in RULES])
def test_rule(name, rule):
    broken, met = find(name, rule) or (None, None)
    changes = (lambda a: break_shared(rule, a)) if broken is None else (lambda a: broken())
    with pytest.raises(KernelError) as error:
        call(name, changes)
    text = str(error.value)
    assert f"rule: {rule.text}" in text
    assert text.startswith(f"{name}: ")
    assert "test_sim_limits.py:" in text  # the kernel's own line
    if met is not None:
        call(name, lambda a: met())


# ------------------------------------------------------------------ limits of single operands
OPERANDS = [(name, o) for name, row in TABLE.items() for o in row.operands]
IDS = [f"{n}.{o.name}" for n, o in OPERANDS]


def replaced(name, operand, make):
    """Changes that put `make(good tile)` in place of one operand (of the first of a list)."""

    def changes(a):
        value = a.get(operand.name)
        if isinstance(value, list):
            return {operand.name: [make(value[0])]}
        if not isinstance(value, NkiTensor):
            value = blank((GOOD[name]()[TABLE[name].tiles[0]].shape[0], 1))
        return {operand.name: make(value)}

    return changes


def problem_of(name, changes):
    """The first line of the error of a call, or None."""
    try:
        call(name, changes)
    except KernelError as error:
        return str(error).split("\n")[0]
    return None


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=IDS)
@pytest.mark.parametrize("place", ["sbuf", "psum", "hbm"])
def test_memories(name, operand, place):
    problem = problem_of(
        name, replaced(name, operand, lambda t: full(*t.shape, dtype=t.dtype, place=place))
    )
    refused = problem is not None and f"lies in {place}" in problem
    assert refused == (place not in operand.places)
    assert not refused or f"operand {operand.name}" in problem


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=IDS)
def test_dtypes(name, operand):
    for dtype in BY_NAME:
        problem = problem_of(
            name, replaced(name, operand, lambda t, d=dtype: full(*t.shape, dtype=d,
                                                                  place=t.storage.place))
        )  # fmt: skip
        refused = problem is not None and f"has dtype {dtype}" in problem
        assert refused == (dtype not in operand.dtypes), dtype


ON_CHIP = [(n, o) for n, o in OPERANDS if not TABLE[n].manual]
ON_CHIP_IDS = [f"{n}.{o.name}" for n, o in ON_CHIP]


@pytest.mark.parametrize(("name", "operand"), ON_CHIP, ids=ON_CHIP_IDS)
def test_start_partition(name, operand):
    def starting_at(start, count):
        def make(t):
            base = full(start + count, *t.shape[1:], dtype=t.dtype, place=t.storage.place)
            return base[start : start + count]

        return replaced(name, operand, make)

    for start, count in [(1, 4), (64, 33 - 1 + 32), (16, 32), (32, 40)]:
        problem = problem_of(name, starting_at(start, count))
        allowed = (start, count) == (64, 64)
        refused = problem is not None and f"starts at partition {start}" in problem
        assert refused != allowed, (start, count)
    problem = problem_of(name, starting_at(96, 32))
    assert problem is None or "starts at partition" not in problem


@pytest.mark.parametrize(("name", "operand"), ON_CHIP, ids=ON_CHIP_IDS)
def test_contents(name, operand):
    """Inputs must have been written; outputs may not be broadcast views."""
    if operand.written:

        def broadcast(t):
            return blank((t.shape[0], 1), t.dtype, t.storage.place).broadcast(1, 8)

        assert "is a broadcast view" in problem_of(name, replaced(name, operand, broadcast))
    elif operand.reads and operand.name not in ("bias", "scale"):

        def unwritten(t):
            return blank(t.shape, t.dtype, t.storage.place)

        problem = problem_of(name, replaced(name, operand, unwritten))
        assert f"operand {operand.name}" in problem
        assert "element [0, 0" in problem
        assert "was never written" in problem


@pytest.mark.parametrize(("name", "operand"), ON_CHIP, ids=ON_CHIP_IDS)
def test_elements_a_partition(name, operand):
    if operand.max_n is not None:
        call(name, replaced(name, operand, lambda t: full(t.shape[0], operand.max_n)))
        problem = problem_of(
            name, replaced(name, operand, lambda t: full(t.shape[0], operand.max_n + 1))
        )
        assert f"has {operand.max_n + 1} elements" in problem
    if "vec" in operand.kind:
        problem = problem_of(name, replaced(name, operand, lambda t: full(t.shape[0], 2)))
        assert "has shape (128, 2)" in problem


@pytest.mark.parametrize(("name", "operand"), ON_CHIP, ids=ON_CHIP_IDS)
def test_dimensions(name, operand):
    def with_rank(rank):
        return replaced(name, operand, lambda t: full(
            t.shape[0], *[1] * (rank - 2), t.size // t.shape[0], dtype=t.dtype,
            place=t.storage.place))  # fmt: skip

    assert "has 6 dimensions" in problem_of(name, with_rank(6))
    problem = problem_of(name, with_rank(5))
    assert problem is None or "dimensions" not in problem


def test_partitions():
    on_core(lambda: blank((128, 1)))
    with pytest.raises(KernelError, match="has 129 partitions"):
        on_core(lambda: blank((129, 1)))


@pytest.mark.parametrize("name", list(TABLE))
def test_unknown_and_missing_arguments(name):
    with pytest.raises(TypeError, match=f"{name} has no argument 'mask'"):
        call(name, lambda a: {"mask": None})
    with pytest.raises(TypeError, match=f"{name} needs"):
        on_core(getattr(nisa, name))
    with pytest.raises(TypeError, match=f"{name} takes"):
        on_core(lambda: getattr(nisa, name)(*range(30)))


WITH_ENUMS = [(n, e) for n, row in TABLE.items() for e, _ in row.enums]


@pytest.mark.parametrize(("name", "argument"), WITH_ENUMS)
def test_enumerations_take_no_numbers_and_no_strings(name, argument):
    for value in (1, "vector"):
        with pytest.raises(TypeError, match=f"{argument} must be a nisa.\\w+, got {value!r}"):
            call(name, lambda a, v=value: {argument: v})


def test_numbers_where_tensors_belong():
    with pytest.raises(TypeError, match="data1 must be a tensor, not float"):
        call("tensor_tensor", lambda a: {"data1": 1.0})
    with pytest.raises(TypeError, match="operand0 must be a number or a tensor, not str"):
        call("tensor_scalar", lambda a: {"operand0": "1"})


@pytest.mark.parametrize("name", ["exponential", "activate2", "nc_matmul_mx", "quantize_mx"])
def test_trn3_only_instructions(name):
    with pytest.raises(KernelError, match=f"{name} is trn3 only"):
        on_core(lambda: getattr(nisa, name)(blank(V), full(*V)))


def test_trn3_only_view():
    with pytest.raises(KernelError, match="indirect views are trn3 only"):
        on_core(lambda: blank(V).indirect(rows(0)))
