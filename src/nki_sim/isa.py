"""The module that kernels import as `nki.isa`: names only, each defined in its own place."""
# ruff: noqa: F401

from . import enums as _enums
from .dma import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    activate2,
    activation,
    activation_reduce,
    exponential,
    iota,
    memset,
    nc_matmul_mx,
    quantize_mx,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from .enums import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from .errors import KernelError as NkiValidationError
from .gather import local_gather, nc_n_gather, nc_stream_shuffle
from .pe import nc_matmul, nc_transpose
from .reductions import (
    bn_aggr,
    bn_stats,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from .selection import (
    affine_select,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nonzero_with_count,
    range_select,
    select_reduce,
)
from .sync import (
    NkiScalar,
    VirtualRegister,
    core_barrier,
    register_alloc,
    register_load,
    register_move,
    register_store,
    scalar_load,
    scalar_store,
    sendrecv,
)

# Spellings of older releases that the NKI library still uses.
tensor_engine = _enums.engine.tensor
vector_engine = _enums.engine.vector
scalar_engine = _enums.engine.scalar
gpsimd_engine = _enums.engine.gpsimd
unknown_engine = _enums.engine.unknown


def get_nc_version():
    """The simulator models trn2 whatever NEURON_PLATFORM_TARGET_OVERRIDE says."""
    return nc_version.gen3
