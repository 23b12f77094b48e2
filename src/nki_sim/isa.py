"""The module that kernels import as `nki.isa`: names only, each defined in its own place."""

from . import enums as _enums
from .dma import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    activation,
    activation_reduce,
    exponential,
    iota,
    memset,
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


__all__ = [name for name in dir() if not name.startswith("_")]
