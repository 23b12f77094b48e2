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


def full(*shape, dtype="float32", place="sbuf", value=1):
    """A written tile."""
    return tile(np.full(shape, value).astype(BY_NAME[dtype]), place, dtype)


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
                                         "op1": nl.add, "imm0": 1.0, "imm1": full(128, 1),
                                         "reduce_cmd": nisa.reduce_cmd.load_reduce},
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


def good():
    return {}


def i32(*shape, value=1):
    return tile(np.full(shape, value, np.int32))


def u32_gather(count=16, width=4, dtype="bfloat16"):
    index = rows(*range(count), dtype="uint32")
    return gather(dtype=dtype, index=index, width=width)


def scatter_add(count=2):
    """A scatter-add of 16 rows, with as many sources as asked."""
    g = gather()
    return {"dst": g, "srcs": [g, *[full(16, 4)] * (count - 1)]}


def hwdge(*shape, dtype="bfloat16", version="0.6"):
    """A transpose of `shape` by hwdge."""
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    turned = [min(shape[i], 128) for i in axes]
    return {"src": full(*shape, dtype=dtype, place="hbm"), "dge_mode": DGE.hwdge,
            "dst": blank(turned, dtype), "_version": version}  # fmt: skip


def bits(op, dtype="int32", **changes):
    """A tensor_scalar with a bit operator."""
    return {"op0": op, "operand0": 1, "op1": None, "operand1": None,
            "data": full(*V, dtype=dtype), "dst": blank(V, dtype), **changes}  # fmt: skip


def bits3(op, data1="int32", data2="int32", dst="int32"):
    """A tensor_tensor with an operator on integers."""
    return {"op": op, "data1": full(*V, dtype=data1), "data2": full(*V, dtype=data2),
            "dst": blank(V, dst)}  # fmt: skip


def local(p=128, index=1, each=1, valid=None, n=None, src=None, **changes):
    return {"src_buffer": full(p if src is None else src, 32), "dst": blank((p, n or 16 * index)),
            "index": full(p, index, dtype="uint16", value=0), "num_elem_per_idx": each,
            "num_valid_indices": valid, **changes}  # fmt: skip


def matmul(k=128, m=128, n=512, left="bfloat16", right=None, **changes):
    return {"stationary": full(k, m, dtype=left), "moving": full(k, n, dtype=right or left),
            "dst": blank((m, n), place="psum"), **changes}  # fmt: skip


def turn(p, n, engine=E.unknown, data="sbuf", dst="psum"):
    return {"data": full(p, n, place=data), "dst": blank((n, p), place=dst), "engine": engine}


def swap(n, dtype):
    return {"src": full(128, n, dtype=dtype), "dst": blank((128, n), dtype)}


def one_scalar(op, engine=E.unknown, **changes):
    return {"op0": op, "operand0": 0.0, "op1": None, "operand1": None, "engine": engine, **changes}


CMD = nisa.reduce_cmd
# (instruction, start of the rule's text) -> pairs of changes, one for each clause of the rule: the
# first breaks that clause and no other, the second just meets it. `good` is the good call itself.
CASES = {
    ("dma_copy", "total element counts"): [
        (lambda: {"src": full(4, 17, place="hbm")}, lambda: {"src": full(64, 1, place="hbm")})],
    ("dma_copy", "dge_mode.hwdge needs"): [
        (lambda: {"src": bf16(4, 16), "dge_mode": DGE.hwdge}, lambda: {"dge_mode": DGE.hwdge}),
        (lambda: {"src": bf16(4, 16), "dge_mode": DGE.hwdge}, lambda: {"src": bf16(4, 16)})],
    ("dma_copy", "gather and scatter"): [
        (lambda: {"src": gather(), "dge_mode": DGE.hwdge},
         lambda: {"src": gather(), "dge_mode": DGE.swdge}),
        (lambda: {"src": gather(), "dge_mode": DGE.none}, lambda: {"src": gather()}),
        (lambda: {"dst": gather(), "src": full(16, 4), "dge_mode": DGE.hwdge},
         lambda: {"dst": gather(), "src": full(16, 4), "dge_mode": DGE.swdge})],
    ("dma_copy", "engine sync or scalar"): [
        (lambda: {"engine": E.sync}, lambda: {"engine": E.sync, "dge_mode": DGE.hwdge}),
        (lambda: {"engine": E.scalar, "dge_mode": DGE.swdge},
         lambda: {"engine": E.scalar, "dge_mode": DGE.hwdge}),
        (lambda: {"engine": E.vector, "dge_mode": DGE.hwdge}, good)],
    ("dma_copy", "oob_mode.skip"): [
        (lambda: {"oob_mode": OOB.skip}, lambda: {"src": gather(), "oob_mode": OOB.skip})],
    ("dma_copy", "priority"): [(lambda: {"priority": 0}, good)],
    ("dma_transpose", "axes are fixed"): [
        (lambda: {"axes": (0, 1)}, lambda: {"axes": (1, 0)}),
        (lambda: {"axes": (2, 0, 1), "src": bf16(2, 3, 4)},
         lambda: {"axes": (2, 1, 0), "src": bf16(2, 3, 4), "dst": blank((4, 3, 2), "bfloat16")}),
        (lambda: {"axes": (3, 2, 1, 0), "src": bf16(2, 3, 4, 5)},
         lambda: {"axes": (3, 1, 2, 0), "src": bf16(2, 3, 4, 5),
                  "dst": blank((5, 3, 4, 2), "bfloat16")}),
        (lambda: {"src": bf16(1, 1, 1, 1, 8)}, good)],
    ("dma_transpose", "dst has the transposed"): [
        (lambda: {"dst": blank((128, 2, 8), "bfloat16")},
         lambda: {"dst": blank((128, 2, 8), "bfloat16"), "_version": "0.3"}),
        (lambda: {"dst": blank((128, 15), "bfloat16"), "_version": "0.3"}, good),
        (lambda: {"dst": blank((64, 32), "bfloat16"), "_version": "0.3"}, good)],
    ("dma_transpose", "equal dtype"): [
        (lambda: {"dst": blank((128, 16), "float16")}, lambda: {"src": full(16, 128, dtype="int16"),
                                                     "dst": blank((128, 16), "int16")})],
    ("dma_transpose", "hwdge"): [
        (lambda: hwdge(16, 128, dtype="float32"), lambda: hwdge(16, 128, dtype="int16")),
        (lambda: hwdge(16, 128, dtype="uint8"), lambda: hwdge(16, 128)),
        (lambda: hwdge(16, 129), lambda: hwdge(16, 128)),
        (lambda: hwdge(15, 128, version="0.5"), lambda: hwdge(16, 128, version="0.5")),
        (lambda: hwdge(32, 128, version="0.5"), lambda: hwdge(32, 128)),
        (lambda: hwdge(3, 16, 8, version="0.5"), lambda: hwdge(1, 16, 8, version="0.5")),
        (lambda: hwdge(32, 16, 8, version="0.5"), lambda: hwdge(16, 1, 8, version="0.5")),
        (lambda: hwdge(8, 3, 8, version="0.5"), lambda: hwdge(8, 2, 8, version="0.5")),
        (lambda: hwdge(4, 4, 3, 8, version="0.5"), lambda: hwdge(4, 3, 4, 8, version="0.5"))],
    ("dma_transpose", "by row indices"): [
        (lambda: {"src": u32_gather(dtype="float32"), "dst": blank((4, 16))},
         lambda: {"src": u32_gather(dtype="uint16"), "dst": blank((4, 16), "uint16")}),
        (lambda: {"src": u32_gather(width=129), "dst": blank((128, 16), "bfloat16")},
         lambda: {"src": u32_gather(width=128), "dst": blank((128, 16), "bfloat16")}),
        (lambda: {"src": u32_gather(8), "dst": blank((4, 8), "bfloat16")},
         lambda: {"src": u32_gather(16), "dst": blank((4, 16), "bfloat16")}),
        (lambda: {"src": gather(dtype="bfloat16"), "dst": blank((4, 16), "bfloat16")},
         lambda: {"src": u32_gather(), "dst": blank((4, 16), "bfloat16")})],
    ("dma_transpose", "gather and scatter"): [
        (lambda: {"src": u32_gather(), "dst": blank((4, 16), "bfloat16"), "dge_mode": DGE.none},
         lambda: {"src": u32_gather(), "dst": blank((4, 16), "bfloat16"), "dge_mode": DGE.swdge})],
    ("dma_transpose", "oob_mode.skip"): [
        (lambda: {"oob_mode": OOB.skip},
         lambda: {"src": u32_gather(), "dst": blank((4, 16), "bfloat16"), "oob_mode": OOB.skip})],
    ("dma_transpose", "priority"): [(lambda: {"priority": 1}, good)],
    ("dma_compute", "total element counts"): [
        (lambda: {"srcs": [full(*V), full(128, 9)]}, lambda: {"srcs": [full(8, 128)]})],
    ("dma_compute", "reduce_op is add"): [
        (lambda: {"reduce_op": nl.multiply}, good), (lambda: {"reduce_op": "add"}, good)],
    ("dma_compute", "scales, if given"): [
        (lambda: {"scales": [1.0] * 15 + [2.0]}, lambda: {"scales": [1.0] * 16}),
        (lambda: {"scales": [1.0] * 15}, lambda: {"scales": (1,) * 16})],
    ("dma_compute", "at most 16"): [
        (lambda: {"srcs": [full(*V)] * 17}, lambda: {"srcs": [full(*V)]}),
        (lambda: scatter_add(3), scatter_add),
        (lambda: scatter_add(1), scatter_add)],
    ("dma_compute", "addresses are static"): [
        (lambda: {"srcs": [full(*V), full(2, *V, place="hbm").ap(
            [[8, 128], [1, 8]], scalar_offset=nisa.register_alloc(1))]}, good),
        (lambda: {"dst": full(2, *V, place="hbm").ap(
            [[8, 128], [1, 8]], scalar_offset=nisa.register_alloc(1))}, good)],
    ("dma_compute", "with row indices"): [
        (lambda: {"dst": gather(), "srcs": [full(16, 4), full(16, 4)]}, scatter_add),
        (lambda: {"dst": (g := gather()), "srcs": [g, g]}, scatter_add),
        (lambda: {"dst": (g := gather()), "srcs": [g, gather()]}, scatter_add),
        (lambda: {"dst": blank((16, 4)), "srcs": [gather(), full(16, 4)]},
         lambda: {"dst": (t := full(16, 4)), "srcs": [gather(), t]}),
        # Another column, and other indices, of the same tensor.
        (lambda: {"dst": (b := full(20, 5, place="hbm")).ap(
            [[5, 16], [1, 4]], vector_offset=(i := rows(*range(16)))),
            "srcs": [b.ap([[5, 16], [1, 4]], offset=1, vector_offset=i), full(16, 4)]},
         lambda: {"dst": (b := full(20, 5, place="hbm")).ap(
             [[5, 16], [1, 4]], vector_offset=(i := rows(*range(16)))),
             "srcs": [full(16, 4), b.ap([[5, 16], [1, 4]], vector_offset=i)]}),
        (lambda: {"dst": (b := full(20, 4, place="hbm")).ap(
            [[4, 16], [1, 4]], vector_offset=rows(*range(16))),
            "srcs": [b.ap([[4, 16], [1, 4]], vector_offset=rows(*range(16))), full(16, 4)]},
         scatter_add)],
    ("dma_compute", "row indices are unique"): [
        (lambda: {"dst": (g := gather(index=rows(*range(15), 3))), "srcs": [g, full(16, 4)]},
         scatter_add),
        (lambda: {"dst": (t := full(16, 4)), "srcs": [t, gather(index=rows(*range(15), 3))]},
         lambda: {"dst": (t := full(16, 4)), "srcs": [t, gather()]}),
        (lambda: {"dst": (g := gather(index=rows(*[-1] * 14, 19, 19))), "srcs": [g, full(16, 4)],
                  "oob_mode": OOB.skip},  # only rows inside the tensor count
         lambda: {"dst": (g := gather(index=rows(*[-1] * 14, 20, 20))), "srcs": [g, full(16, 4)],
                  "oob_mode": OOB.skip}),
        (lambda: {"dst": (g := gather(index=rows(0, 0, *range(2, 16)))), "srcs": [g, full(16, 4)]},
         scatter_add)],
    ("dma_compute", "oob_mode.skip"): [
        (lambda: {"oob_mode": OOB.skip}, lambda: {**scatter_add(), "oob_mode": OOB.skip})],
    ("tensor_tensor", "op: binary ALU"): [
        (lambda: {"op": nl.exp}, lambda: {"op": nl.logical_xor}),
        (lambda: {"op": nl.divide}, lambda: {"op": nl.power}),
        (lambda: {"op": None}, good),
        (lambda: {"op": np.add}, good)],
    ("tensor_tensor", "bit operators"): [
        (lambda: {"op": nl.bitwise_and}, lambda: bits3(nl.bitwise_and)),
        (lambda: bits3(nl.bitwise_or, "float32"), lambda: bits3(nl.bitwise_or, "uint32")),
        (lambda: bits3(nl.left_shift, "int32", "int8"), lambda: bits3(nl.left_shift)),
        (lambda: bits3(nl.right_shift, dst="int16"), lambda: bits3(nl.right_shift, dst="uint32"))],
    ("tensor_tensor", "GpSimd has no access"): [
        *[(lambda n=n: {n: full(*V, place="psum"), "engine": E.gpsimd},
           lambda n=n: {n: full(*V, place="psum")}) for n in ("dst", "data1", "data2")],
        *[(lambda n=n: {n: full(*V, place="psum"), "op": nl.power}, lambda: {"op": nl.power})
          for n in ("dst", "data1", "data2")]],
    ("tensor_tensor", "power runs"): [
        (lambda: {"op": nl.power, "engine": E.vector},
         lambda: {"op": nl.power, "engine": E.gpsimd})],
    ("tensor_scalar", "square, relu"): [
        *[(lambda n=n: {"op0": getattr(nl, n)}, lambda: {"op0": nl.maximum})
          for n in ("square", "relu", "abs_max", "abs_min")]],
    ("tensor_scalar", "op0: binary ALU"): [
        (lambda: {"op0": nl.exp}, lambda: {"op0": nl.less}),
        (lambda: {"op0": nl.power}, lambda: one_scalar(nl.rsqrt)),
        (lambda: {"op0": None}, lambda: bits(nl.invert))],
    ("tensor_scalar", "op1: binary ALU"): [
        (lambda: {"op1": nl.rsqrt}, lambda: {"op1": nl.greater}),
        (lambda: {"op1": nl.power}, good),
        (lambda: bits(nl.bitwise_and, op1=nl.invert, operand1=1),
         lambda: bits(nl.bitwise_and, op1=nl.left_shift, operand1=1)),
        (lambda: {"op1": nl.square}, lambda: {"op1": None, "operand1": None})],
    ("tensor_scalar", "bit operators"): [
        (lambda: bits(nl.bitwise_and, op1=nl.add, operand1=1),
         lambda: bits(nl.bitwise_and, op1=nl.bitwise_or, operand1=2)),
        (lambda: bits(nl.bitwise_and, data=full(*V)), lambda: bits(nl.bitwise_and)),
        (lambda: bits(nl.bitwise_and, dst=blank(V, "uint8")),
         lambda: bits(nl.bitwise_and, dst=blank(V, "uint32"))),
        (lambda: bits(nl.bitwise_and, operand0=1.0), lambda: bits(nl.bitwise_and)),
        (lambda: bits(nl.bitwise_and, operand0=full(128, 1)), lambda: bits(nl.bitwise_and)),
        (lambda: bits(nl.bitwise_and, "int8", operand0=256),
         lambda: bits(nl.bitwise_and, "int8", operand0=255)),
        (lambda: bits(nl.bitwise_and, "uint8", operand0=-129),
         lambda: bits(nl.bitwise_and, "uint8", operand0=-128)),
        (lambda: bits(nl.bitwise_and, "int8", op1=nl.bitwise_or, operand1=256),
         lambda: bits(nl.bitwise_and, "int8", op1=nl.bitwise_or, operand1=255))],
    ("tensor_scalar", "op1 needs operand1"): [
        (lambda: {"operand1": None}, lambda: {"op1": None, "operand1": None}),
        (lambda: {"op1": None}, good)],
    ("tensor_scalar", "Scalar: multiply+add"): [
        (lambda: {"engine": E.scalar},
         lambda: {"op0": nl.multiply, "op1": nl.add, "engine": E.scalar}),
        (lambda: one_scalar(nl.subtract, E.scalar), lambda: one_scalar(nl.multiply, E.scalar)),
        (lambda: bits(nl.bitwise_or, engine=E.scalar), lambda: one_scalar(nl.add, E.scalar)),
        (lambda: one_scalar(nl.rsqrt, E.scalar), lambda: one_scalar(nl.rsqrt)),
        (lambda: one_scalar(nl.rsqrt, E.vector), lambda: one_scalar(nl.rsqrt, E.gpsimd)),
        (lambda: one_scalar(nl.add, E.gpsimd), lambda: one_scalar(nl.add, E.vector)),
        (lambda: one_scalar(nl.rsqrt, op1=nl.add, operand1=1.0), lambda: one_scalar(nl.rsqrt))],
    ("tensor_scalar", "rsqrt has one operand"): [
        (lambda: one_scalar(nl.rsqrt, operand0=1.0), lambda: one_scalar(nl.rsqrt, operand0=0)),
        (lambda: one_scalar(nl.rsqrt, operand0=full(128, 1)), lambda: one_scalar(nl.rsqrt)),
        (lambda: one_scalar(nl.rsqrt, reverse0=True), lambda: one_scalar(nl.rsqrt))],
    ("tensor_scalar", "GpSimd has no access"): [
        *[(lambda n=n, e=e: one_scalar(nl.rsqrt, e, **{n: full(*V, place="psum")}),
           lambda n=n: one_scalar(nl.add, **{n: full(*V, place="psum")}))
          for n in ("dst", "data") for e in (E.unknown, E.gpsimd)]],
    ("scalar_tensor_tensor", "op0, op1: binary ALU"): [
        (lambda: {"op0": nl.divide}, lambda: {"op0": nl.subtract}),
        (lambda: {"op0": nl.rsqrt}, good), (lambda: {"op1": nl.rsqrt}, good),
        (lambda: {"op0": nl.power}, good), (lambda: {"op1": nl.power}, good),
        (lambda: {"op1": None}, lambda: {"op1": nl.less})],
    ("scalar_tensor_tensor", "arithmetic operators only"): [
        (lambda: {"op0": nl.bitwise_or}, lambda: {"op0": nl.logical_or}),
        (lambda: {"op1": nl.left_shift}, lambda: {"op1": nl.logical_or})],
    ("memset", "value is a number"): [
        (lambda: {"dst": blank(V, "int32")}, lambda: {"dst": blank(V, "int32"), "value": 1}),
        (lambda: {"value": None}, lambda: {"value": np.float32(1)}),
        (lambda: {"dst": blank(V, "int8"), "value": 128},
         lambda: {"dst": blank(V, "int8"), "value": 127}),
        (lambda: {"dst": blank(V, "int8"), "value": -129},
         lambda: {"dst": blank(V, "int8"), "value": -128}),
        (lambda: {"dst": blank(V, "uint8"), "value": -1},
         lambda: {"dst": blank(V, "uint8"), "value": np.int64(0)}),
        (lambda: {"dst": blank(V, "uint32"), "value": 2**32},
         lambda: {"dst": blank(V, "uint32"), "value": 2**32 - 1}),
        (lambda: {"dst": blank(V, "float16"), "value": 65520.0},  # rounds to 2^16: infinite
         lambda: {"dst": blank(V, "float16"), "value": 65519.0}),
        (lambda: {"value": 3.5e38}, lambda: {"value": -np.inf}),
        (lambda: {"dst": blank(V, "float8_e4m3fn"), "value": 480.0},  # this dtype has no infinity
         lambda: {"dst": blank(V, "float8_e4m3fn"), "value": 448}),
        (lambda: {"dst": blank(V, "float8_e4m3fn"), "value": np.inf},
         lambda: {"dst": blank(V, "float8_e4m3fn"), "value": np.nan})],
    ("iota", "pattern has"): [
        (lambda: {"pattern": [[1, 1]] + [[1, 2]] * 4}, lambda: {"pattern": [[1, 16]]}),
        (lambda: {"pattern": [[1, 15]]}, good)],
    ("iota", "all values fit"): [
        (lambda: {"pattern": [[-1, 16]], "offset": 2**31},
         lambda: {"pattern": [[-1, 16]], "offset": 2**31 - 1}),
        (lambda: {"pattern": [[1, 16]], "offset": 2**31 - 15},
         lambda: {"pattern": [[1, 16]], "offset": 2**31 - 16}),
        (lambda: {"channel_multiplier": -1, "offset": 126 - 2**31},
         lambda: {"channel_multiplier": -1, "offset": 127 - 2**31})],
    ("activation", "op is an activation"): [
        (lambda: {"op": nl.add}, lambda: {"op": nl.silu}),
        (lambda: {"op": nl.invert}, good), (lambda: {"op": "exp"}, good)],
    ("activation", "reduce_op is add"): [(lambda: {"reduce_op": nl.maximum}, good)],
    ("activation", "reduce_res is [P, 1]"): [
        (lambda: {"reduce_res": blank((128, 2))}, lambda: {"reduce_res": blank((128, 1, 1))}),
        (lambda: {"reduce_res": blank((64, 1))}, lambda: {"reduce_res": None})],
    ("activation", "reduce_cmd loads nothing"): [
        (lambda: {"reduce_cmd": CMD.load_reduce}, lambda: {"reduce_cmd": CMD.reset})],
    ("activation_reduce", "op is an activation"): [(lambda: {"op": nl.less}, good)],
    ("activation_reduce", "reduce_op is add"): [(lambda: {"reduce_op": nl.minimum}, good)],
    ("activation_reduce", "reduce_res is [P, 1]"): [
        (lambda: {"reduce_res": blank((127, 1))}, good),
        (lambda: {"reduce_res": blank((128, 2))}, good)],
    ("tensor_copy_predicated", "src has dst's"): [
        (lambda: {"src": full(128, 9)}, lambda: {"src": full(128, 2, 4)}),
        (lambda: {"src": full(64, 16)}, good),
        (lambda: {"src": bf16(*V)}, lambda: {"src": bf16(*V), "dst": full(*V, dtype="bfloat16")}),
        (lambda: {"src": 1.0, "dst": i32(*V)}, lambda: {"src": 1, "dst": i32(*V)}),
        (lambda: {"src": 1e39}, lambda: {"src": 1e38})],
    ("tensor_reduce", "op reduces"): [
        (lambda: {"op": nl.less}, lambda: {"op": nl.minimum}),
        (lambda: {"op": nl.exp}, lambda: {"op": nl.logical_xor}),
        (lambda: {"op": nl.left_shift}, lambda: {"op": nl.subtract}),
        (lambda: {"op": "add"}, good)],
    ("tensor_reduce", "bit operators"): [
        (lambda: {"op": nl.bitwise_or},
         lambda: {"op": nl.bitwise_or, "data": i32(128, 2, 4), "dst": blank((128, 2), "int32")}),
        (lambda: {"op": nl.bitwise_or, "data": i32(128, 2, 4)},
         lambda: {"data": i32(128, 2, 4)}),
        (lambda: {"op": nl.bitwise_and, "data": i32(128, 2, 4), "dst": blank((128, 2), "int32"),
                  "negate": True}, lambda: {"negate": True})],
    ("tensor_reduce", "axis"): [
        (lambda: {"axis": (0, 1, 2)}, lambda: {"axis": (1, 2), "dst": blank((128, 1))}),
        (lambda: {"axis": 0}, lambda: {"axis": -1}),
        (lambda: {"axis": 1}, lambda: {"axis": [2]}),
        (lambda: {"axis": 3}, good), (lambda: {"axis": 5}, good),
        (lambda: {"axis": -4}, lambda: {"axis": (-2, -1), "dst": blank((128, 1))}),
        (lambda: {"axis": (2, 2)}, good), (lambda: {"axis": ()}, good),
        (lambda: {"axis": 2.0}, good), (lambda: {"axis": None}, good)],
    ("tensor_reduce", "dst holds one"): [
        (lambda: {"dst": blank((128, 3))}, lambda: {"dst": blank((128, 2, 1))}),
        (lambda: {"dst": blank((64, 4))}, good)],
    ("tensor_partition_reduce", "op is add"): [
        (lambda: {"op": nl.multiply}, lambda: {"op": nl.average}),
        (lambda: {"op": nl.bitwise_xor}, lambda: {"op": nl.maximum}),
        (lambda: {"dst": blank((2, 8))}, good), (lambda: {"dst": blank((1, 9))}, good)],
    ("tensor_partition_reduce", "bit operators"): [
        (lambda: {"op": nl.bitwise_or},
         lambda: {"op": nl.bitwise_or, "data": i32(*V), "dst": blank((1, 8), "int32")}),
        (lambda: {"op": nl.bitwise_and, "data": i32(*V)},
         lambda: {"op": nl.bitwise_and, "data": i32(*V), "dst": blank((1, 8), "int32")})],
    ("tensor_scalar_reduce", "op0: binary ALU"): [
        (lambda: {"op0": nl.exp}, lambda: {"op0": nl.equal}), (lambda: {"op0": nl.power}, good)],
    ("tensor_scalar_reduce", "arithmetic operators only"): [
        (lambda: {"op0": nl.bitwise_and, "operand0": 1}, good)],
    ("tensor_scalar_reduce", "reduce_op is add"): [
        (lambda: {"reduce_op": nl.subtract}, lambda: {"reduce_op": nl.minimum})],
    ("tensor_scalar_reduce", "reduce_res is [P, 1]"): [
        (lambda: {"reduce_res": blank((128, 2))}, good),
        (lambda: {"reduce_res": blank((64, 1))}, good)],
    ("tensor_scalar_reduce", "reduce_init"): [
        (lambda: {"reduce_init": 1.0},
         lambda: {"reduce_init": 1.0, "reduce_cmd": CMD.load_reduce}),
        (lambda: {"reduce_cmd": CMD.load_reduce},
         lambda: {"reduce_init": 0, "reduce_cmd": CMD.load_reduce}),
        (lambda: {"reduce_init": full(128, 1), "reduce_cmd": CMD.load_reduce}, good)],
    ("tensor_scalar_reduce", "reduce_res may"): [
        (lambda: {"reduce_res": None, "_version": "0.5"}, lambda: {"reduce_res": None})],
    ("tensor_scalar_reduce", "reverse0"): [(lambda: {"reverse0": True}, good)],
    ("tensor_tensor_scan", "op0, op1: binary ALU"): [
        (lambda: {"op1": nl.mod}, lambda: {"op1": nl.maximum}),
        (lambda: {"op0": nl.power}, good), (lambda: {"op1": nl.power}, good)],
    ("tensor_tensor_scan", "arithmetic operators only"): [
        (lambda: {"op0": nl.bitwise_or}, good), (lambda: {"op1": nl.bitwise_or}, good)],
    ("tensor_scalar_cumulative", "op0: binary ALU"): [
        (lambda: {"op0": nl.exp}, lambda: {"op0": nl.less}), (lambda: {"op0": nl.power}, good)],
    ("tensor_scalar_cumulative", "arithmetic operators only"): [
        (lambda: {"op0": nl.bitwise_or}, good)],
    ("tensor_scalar_cumulative", "op1 is add"): [
        (lambda: {"op1": nl.less}, lambda: {"op1": nl.subtract}),
        (lambda: {"op1": nl.power}, lambda: {"op1": nl.minimum})],
    ("tensor_scalar_cumulative", "reduce_cmd is"): [
        (lambda: {"reduce_cmd": CMD.idle, "imm1": None},
         lambda: {"reduce_cmd": CMD.reset_reduce, "imm1": None}),
        (lambda: {"reduce_cmd": CMD.reset, "imm1": None}, good),
        (lambda: {"imm1": None}, lambda: {"imm1": 1.0}),
        (lambda: {"reduce_cmd": CMD.reset_reduce}, good),
        (lambda: {"reduce_cmd": CMD.reduce}, good)],
    ("tensor_scalar_cumulative", "no 32-bit"): [
        (lambda: {"src": i32(*V)}, lambda: {"src": full(*V, dtype="int16")}),
        (lambda: {"dst": blank(V, "uint32")}, lambda: {"dst": blank(V, "uint16")})],
    ("bn_stats", "dst is [P, 6]"): [
        (lambda: {"dst": blank((128, 5))}, lambda: {"dst": blank((128, 2, 3))})],
    ("bn_aggr", "data is triples"): [
        (lambda: {"data": full(128, 7)}, lambda: {"data": full(128, 3)}),
        (lambda: {"dst": blank((128, 3))}, good)],
    ("select_reduce", "reduce_res is [P, 1]"): [
        (lambda: {"reduce_res": blank((128, 2))}, good),
        (lambda: {"reduce_res": blank((64, 2))}, lambda: {"reduce_res": None})],
    ("select_reduce", "reduce_op is maximum"): [(lambda: {"reduce_op": nl.add}, good)],
    ("select_reduce", "reduce_cmd loads nothing"): [
        (lambda: {"reduce_cmd": CMD.load_reduce}, lambda: {"reduce_cmd": CMD.reset})],
    ("range_select", "comparisons"): [
        (lambda: {"comp_op0": nl.not_equal}, lambda: {"comp_op0": nl.equal}),
        (lambda: {"comp_op1": nl.not_equal}, lambda: {"comp_op1": nl.less_equal}),
        (lambda: {"comp_op1": None}, lambda: {"comp_op1": nl.greater})],
    ("range_select", "reduce_res is [P, 1]"): [
        (lambda: {"reduce_res": blank(V)}, good),
        (lambda: {"reduce_res": blank((64, 1))}, lambda: {"reduce_res": None})],
    ("range_select", "reduce_op is maximum"): [(lambda: {"reduce_op": nl.minimum}, good)],
    ("range_select", "reduce_cmd loads nothing"): [
        (lambda: {"reduce_cmd": CMD.load_reduce}, lambda: {"reduce_cmd": CMD.reset})],
    ("range_select", "on_false_value"): [
        (lambda: {"on_false_value": 0.0}, lambda: {"on_false_value": float(np.finfo("f4").min)})],
    ("affine_select", "pattern has"): [
        (lambda: {"pattern": [[1, 15]]}, lambda: {"pattern": [[1, 16]]}),
        (lambda: {"pattern": [[1, 1]] + [[1, 2]] * 4}, good)],
    ("affine_select", "on_false_value"): [
        (lambda: {"on_false_value": "0"}, lambda: {"on_false_value": np.float32(0)})],
    ("affine_select", "comparisons"): [
        (lambda: {"cmp_op": nl.add}, lambda: {"cmp_op": nl.greater_equal}),
        (lambda: {"cmp_op": nl.not_equal}, lambda: {"cmp_op": nl.less})],
    ("max8", "src has 8 to"): [
        (lambda: {"src": full(128, 7)}, good),
        (lambda: {"src": full(128, 16_385)}, lambda: {"src": full(128, 16_384)})],
    ("max8", "eight elements"): [
        (lambda: {"dst": blank((128, 7))}, lambda: {"dst": blank((128, 2, 4))}),
        (lambda: {"dst": blank((128, 9))}, good)],
    ("max8", "src has at most 3"): [
        (lambda: {"src": full(128, 2, 2, 2, 2)}, lambda: {"src": full(128, 2, 2, 2)})],
    ("nc_find_index8", "data has 8 to"): [
        (lambda: {"data": full(2, 16_385), "vals": full(2, 8), "dst": blank((2, 8), "uint32")},
         lambda: {"data": full(2, 16_384), "vals": full(2, 8), "dst": blank((2, 8), "uint32")}),
        (lambda: {"data": full(128, 7)}, good)],
    ("nc_find_index8", "eight elements"): [
        (lambda: {"vals": full(128, 9)}, good), (lambda: {"dst": blank((128, 7), "uint32")}, good)],
    ("nc_match_replace8", "eight elements"): [
        (lambda: {"vals": full(128, 7)}, good),
        (lambda: {"dst_idx": blank((128, 9), "uint32")}, lambda: {"dst_idx": None})],
    ("nc_match_replace8", "imm is a number"): [
        (lambda: {"imm": None}, lambda: {"imm": np.float32(0)})],
    ("nonzero_with_count", "dst has one"): [
        (lambda: {"dst": blank(V, "int32")}, good),
        (lambda: {"dst": blank((128, 10), "int32")}, good)],
    ("nc_stream_shuffle", "shuffle_mask"): [
        (lambda: {"shuffle_mask": [32] * 32}, lambda: {"shuffle_mask": [255] * 32}),
        (lambda: {"shuffle_mask": [-1] * 32}, lambda: {"shuffle_mask": [0] * 32}),
        (lambda: {"shuffle_mask": [0] * 31}, good), (lambda: {"shuffle_mask": [0] * 33}, good)],
    ("nc_stream_shuffle", "equal N"): [
        (lambda: {"src": full(128, 9)}, lambda: {"src": full(32, 8), "dst": blank((32, 8))}),
        (lambda: {"src": full(128, 8), "dst": blank((96, 8))},
         lambda: {"src": full(96, 8), "shuffle_mask": [255] * 31 + [0], "dst": blank((96, 8))})],
    ("local_gather", "equal P, a multiple"): [
        (lambda: local(120), lambda: local(112)),
        (lambda: local(128, src=112), good),
        (lambda: local(128, index=1) | {"index": full(112, 1, dtype="uint16")}, good),
        (lambda: local(128, dst=blank((112, 16))), good)],
    ("local_gather", "num_elem_per_idx"): [
        (lambda: local(each=3, n=48), lambda: local(each=32, n=512)),
        (lambda: local(each=0, n=1), lambda: local(each=1)),
        (lambda: local(each=64, n=1024), lambda: local(each=2, n=32)),
        (lambda: local(16, index=257), lambda: local(16, index=256)),
        (lambda: local(valid=17, n=17), lambda: local(valid=16)),
        (lambda: local(valid=0, n=16), lambda: local(valid=1, n=1)),
        (lambda: local(valid=8, n=16), lambda: local(valid=8, n=8)),
        (lambda: local(each=4, n=16), lambda: local(each=4, valid=4, n=16))],
    ("nc_matmul", "equal K"): [(lambda: {"stationary": bf16(127, 128)}, good)],
    ("nc_matmul", "M (free"): [
        (lambda: {"stationary": bf16(128, 129)}, good),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 129),
                  "moving": fp8(128, 2, 512)},
         lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                  "moving": fp8(128, 2, 512)})],
    ("nc_matmul", "N (free"): [
        (lambda: {"moving": bf16(128, 513), "dst": blank((128, 513), place="psum")}, good),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                  "moving": fp8(128, 2, 513), "dst": blank((128, 513), place="psum")}, good)],
    ("nc_matmul", "dst is [M, N]"): [
        (lambda: {"dst": blank((128, 511), place="psum")}, good),
        (lambda: {"dst": blank((127, 512), place="psum")}, lambda: matmul(m=127)),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 64),
                  "moving": fp8(128, 2, 512)}, good)],
    ("nc_matmul", "float32 only"): [
        (lambda: {"stationary": full(128, 128)},
         lambda: {"stationary": full(128, 128), "moving": full(128, 512)}),
        (lambda: {"moving": full(128, 512)}, lambda: {"moving": fp8(128, 512)})],
    ("nc_matmul", "float8_e4m3fn"): [
        (lambda: {"moving": full(128, 512, dtype="float8_e4m3fn")},
         lambda: {"moving": full(128, 512, dtype="float8_e4m3")}),
        (lambda: {"stationary": full(128, 128, dtype="float8_e4m3fn")},
         lambda: {"stationary": full(128, 128, dtype="float8_e5m2")})],
    ("nc_matmul", "dst is float32"): [
        (lambda: {"dst": blank((128, 512), "bfloat16", "psum")}, good),
        (lambda: {"dst": blank((128, 128), place="psum"), "is_transpose": True,
                  "moving": tile(np.eye(128), dtype="bfloat16")},
         lambda: {"dst": blank((128, 128), "bfloat16", "psum"), "is_transpose": True,
                  "moving": tile(np.eye(128), dtype="bfloat16")})],
    ("nc_matmul", "the result lies"): [
        (lambda: {"dst": blank((128, 1024), place="psum")[:, 1:513]},
         lambda: {"dst": blank((128, 1024), place="psum")[:, 512:1024]}),
        (lambda: {"dst": blank((128, 1024), place="psum")[:, ::2]}, good)],
    ("nc_matmul", "double_row"): [
        (lambda: {"perf_mode": double_row, "stationary": bf16(128, 2, 128),
                  "moving": fp8(128, 2, 512)},
         lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                  "moving": fp8(128, 2, 512)}),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                  "moving": bf16(128, 2, 512)}, good),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 256),
                  "moving": fp8(128, 2, 512)}, good),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 4, 64),
                  "moving": fp8(128, 2, 512)}, good),
        (lambda: {"perf_mode": double_row, "stationary": fp8(128, 2, 128),
                  "moving": fp8(128, 2, 128), "is_transpose": True,
                  "dst": blank((128, 128), "float8_e4m3", "psum")}, good)],
    ("nc_matmul", "tile_position"): [
        (lambda: {"tile_position": (0, 0), "tile_size": (64, 128)},
         lambda: {"tile_position": (0, 0), "tile_size": (128, 128)}),
        (lambda: {"tile_position": (0, 0), "tile_size": (128, 64)}, good),
        (lambda: {"tile_size": (128, 128)}, good), (lambda: {"tile_position": (0, 0)}, good),
        (lambda: {"tile_position": (0, 0, 0), "tile_size": (128, 128)}, good),
        (lambda: matmul(64, 64, tile_position=(32, 64), tile_size=(64, 64)),
         lambda: matmul(64, 64, tile_position=(64, 64), tile_size=(64, 64))),
        (lambda: matmul(64, 64, tile_position=(64, 32), tile_size=(64, 64)),
         lambda: matmul(64, 32, tile_position=(64, 32), tile_size=(64, 32))),
        (lambda: matmul(16, 16, tile_position=(0, 0), tile_size=(16, 32)),
         lambda: matmul(16, 16, tile_position=(96, 96), tile_size=(32, 32))),
        (lambda: matmul(64, 64, tile_position=(128, 0), tile_size=(64, 64)), good)],
    ("nc_transpose", "dst is [N, P]"): [
        (lambda: {"dst": blank((127, 128), place="psum")}, good),
        (lambda: {"dst": blank((128, 127), place="psum")}, good)],
    ("nc_transpose", "tensor: ≤ 128"): [
        (lambda: turn(33, 32, dst="sbuf"), lambda: turn(32, 32, dst="sbuf")),
        (lambda: turn(32, 33, E.vector), lambda: turn(32, 32, E.vector, "psum", "psum")),
        (lambda: turn(33, 32, E.vector), lambda: turn(32, 32, E.vector)),
        (lambda: turn(16, 16, E.scalar), lambda: turn(16, 16)),
        (lambda: turn(16, 16, E.tensor, dst="sbuf"), lambda: turn(16, 16, E.tensor)),
        (lambda: turn(16, 16, E.tensor, "psum", "psum"), lambda: turn(128, 128, E.tensor))],
    ("nc_transpose", "equal dtype"): [
        (lambda: {"dst": blank((128, 128), "bfloat16", "psum")}, good)],
    ("register_move", "dst is a register"): [
        (lambda: {"dst": 1}, lambda: {"dst": nisa.register_alloc(2)})],
    ("register_move", "src is a register"): [
        (lambda: {"src": 1.0}, lambda: {"src": nisa.register_alloc(2)})],
    ("register_load", "dst is a register"): [(lambda: {"dst": 1}, good)],
    ("register_load", "src is a tensor"): [
        (lambda: {"src": i32(1, 2)}, lambda: {"src": i32(1, 1, 1)})],
    ("register_store", "src is a register"): [
        (lambda: {"src": None}, lambda: {"src": 2**31 - 1})],
    ("register_store", "dst is a tensor"): [
        (lambda: {"dst": blank((2, 1), "int32")}, lambda: {"dst": blank((2, 1), "int32")[1:2]})],
    ("core_barrier", "data lies in"): [
        (lambda: {"data": nl.ndarray((1, 1), nl.int32, buffer=nl.private_hbm)}, good)],
    ("sendrecv", "LNC is 2"): [(lambda: {"_lnc": 1}, good)],
    ("sendrecv", "equal shape"): [
        (lambda: {"dst": blank((128, 2, 128))}, good),
        (lambda: {"dst": blank((128, 256), "int32")}, good)],
    ("sendrecv", "each core sends"): [
        (lambda: {"send_to_rank": nl.program_id()}, good),
        (lambda: {"recv_from_rank": nl.program_id()}, good)],
    ("sendrecv", "gpsimd_dma"): [
        (lambda: swap(257, "float32"), good),
        (lambda: swap(257, "bfloat16"), lambda: swap(256, "bfloat16")),
        (lambda: swap(257, "uint8"), lambda: swap(256, "uint8"))],
}  # fmt: skip


def shared_cases(rule, a):
    """Pairs of changes for a shared rule of rules.py: one for each operand or value it names."""
    first, *others = rule.names
    if rule.kind == "engine_is":
        wrong = [e for e in E if e.name not in (*rule.names, "unknown")]
        right = [E[n] for n in rule.names]
        return [({"engine": e}, {"engine": right[i % len(right)]}) for i, e in enumerate(wrong)]
    if rule.kind in ("gpsimd_not_psum", "not_both_psum"):
        moved = {n: full(*a[n].shape, dtype=a[n].dtype, place="psum") for n in rule.names}
        if rule.kind == "not_both_psum":
            return [(moved, {n: moved[n]}) for n in rule.names]
        return [({n: moved[n], "engine": E.gpsimd}, {n: moved[n]}) for n in rule.names]
    pairs = []
    for name in others:
        t = a[name] if isinstance(a.get(name), NkiTensor) else full(a[first].shape[0], 1)
        p, *free = t.shape
        if rule.kind == "same_size":
            pairs.append(({name: full(p, *free[:-1], free[-1] + 1, dtype=t.dtype)}, {}))
        if rule.kind == "same_dtype":
            dtype = "bfloat16" if t.dtype != "bfloat16" else "float16"
            pairs.append(({name: full(*t.shape, dtype=dtype)}, {}))
            continue
        # Another P, for same_size with the same number of elements.
        grow = 2 if rule.kind == "same_size" else 1
        pairs.append(({name: full(p // 2, *free[:-1], free[-1] * grow, dtype=t.dtype)}, {name: t}))
    return pairs


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


def clauses():
    """(instruction, rule, number of the clause) for everything that can be broken."""
    found = []
    for name, rule in RULES:
        pairs = find(name, rule)
        if pairs is None and rule.kind is not None:
            pairs = on_core(lambda n=name, r=rule: shared_cases(r, GOOD[n]()))
        found += [(name, rule, i) for i in range(len(pairs or ()))]
    return found


CLAUSES = clauses()


def test_no_rule_is_untested():
    missing = [(n, r.text) for n, r in RULES if (n, r) not in [c[:2] for c in CLAUSES]]
    assert not missing
    stale = [k for k in CASES if not any(k[0] == n and r.text.startswith(k[1]) for n, r in RULES)]
    assert not stale
    assert set(GOOD) == set(TABLE)


@pytest.mark.parametrize("name", list(TABLE))
def test_the_good_call_meets_every_limit(name):
    call(name, lambda a: {})


@pytest.mark.parametrize(
    ("name", "rule", "i"), CLAUSES, ids=[f"{n}: {r.text[:40]} {i}" for n, r, i in CLAUSES]
)
def test_rule(name, rule, i):
    pairs = find(name, rule)
    if pairs is None:
        broken, met = (lambda a, k=k: shared_cases(rule, a)[i][k] for k in (0, 1))
    else:
        broken, met = (lambda a, k=k: pairs[i][k]() for k in (0, 1))
    with pytest.raises(KernelError) as error:
        call(name, broken)
    text = str(error.value)
    assert f"rule: {rule.text}\n" in text
    assert text.startswith(f"{name}: ")
    assert "test_sim_limits.py:" in text  # the kernel's own line
    if rule.kind == "engine_is":  # the engine is allowed; another rule may want other operators
        assert rule.text not in (problem_of(name, met, whole=True) or "")
    elif pairs is None or pairs[i][1] is not good:
        call(name, met)


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


def problem_of(name, changes, whole=False):
    """The first line of the error of a call (or the whole text), or None."""
    try:
        call(name, changes)
    except KernelError as error:
        return str(error) if whole else str(error).split("\n")[0]
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

        problem = problem_of(name, replaced(name, operand, broadcast))
        assert f"operand {operand.name}" in problem
        assert "holds an element more than once" in problem
    elif operand.reads:

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
