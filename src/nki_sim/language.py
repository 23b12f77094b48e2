"""The module that kernels import as `nki.language`: tensors, grid, operators and helpers.

A helper such as `nl.exp(x)` allocates a fresh SBUF tile and issues one instruction of nki.isa.
"""

import builtins
import contextlib
import inspect
import math

import numpy as np

from . import arch, dma, elementwise, gather, pe, reductions
from .dtypes import BY_NAME, holds, name_of
from .enums import engine
from .errors import fail
from .lint import REMOVED
from .machine import MemoryRegion, Storage, current_core
from .ops import HELPER, OPS
from .sync import (  # noqa: F401
    NkiScalar,
    VirtualRegister,
    dynamic_range,
    fori_loop,
    while_loop,
)
from .table import require_written, resolve_scalar
from .tensors import NkiTensor, ndarray, row_major

int8, int16, int32 = "int8", "int16", "int32"
uint8, uint16, uint32, bool_ = "uint8", "uint16", "uint32", "bool_"
float16, bfloat16, float32 = "float16", "bfloat16", "float32"
float8_e4m3, float8_e4m3fn, float8_e5m2 = "float8_e4m3", "float8_e4m3fn", "float8_e5m2"
float8_e8m0fnu = "float8_e8m0fnu"
# Dtypes that kernels may name (tables of the NKI library do) but that no tensor here can have.
tfloat32, float8_e5m2_x4, float8_e4m3fn_x4 = "tfloat32", "float8_e5m2_x4", "float8_e4m3fn_x4"
float4_e2m1fn_x4 = "float4_e2m1fn_x4"

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
hbm = private_hbm = MemoryRegion.hbm
shared_hbm = MemoryRegion.shared_hbm

globals().update(OPS)  # nl.add, nl.exp, ...: operators that are also helpers


def __getattr__(name):
    """Names of earlier generations say what replaced them."""
    if name in REMOVED:
        since, instead = REMOVED[name]
        raise AttributeError(f"nl.{name} was removed in NKI {since}; {instead}")
    raise AttributeError(f"nki.language has no {name}")


class NKIObject:
    """Base of classes that a kernel may use.

    A missing `__init__` takes the annotated fields; what a call leaves out stays unset.
    """

    def __init__(self, *args, **kwargs):
        fields = list(inspect.get_annotations(type(self)))
        if len(args) > len(fields) or set(kwargs) - set(fields):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(fields)}")
        for name, value in (*zip(fields, args, strict=False), *kwargs.items()):
            setattr(self, name, value)
        if hasattr(self, "__post_init__"):
            self.__post_init__()


class _TileSize:
    """`nl.tile_size`: trn2's limits; names younger than the chosen NKI version raise."""

    pmax = arch.PMAX
    psum_bank_fmax = psum_fmax = arch.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = arch.PSUM_BANK_BYTES
    gemm_stationary_fmax = arch.STATIONARY_FMAX
    gemm_moving_fmax = arch.MOVING_FMAX
    bn_stats_fmax = arch.BN_STATS_FMAX
    psum_min_align, sbuf_min_align = 4, 1
    _younger = {  # noqa: RUF012
        "sbuf_fmax": ("0.4", arch.SBUF_BYTES // 4),
        "sbuf_fmax_bytes": ("0.4", arch.SBUF_BYTES),
        "sbuf_size_bytes": ("0.4", arch.SBUF_BYTES * arch.PMAX),
        "total_available_sbuf_size": ("0.3", arch.SBUF_BYTES),
        "psum_num_banks": ("0.5", arch.PSUM_BANKS),
    }

    def __getattr__(self, name):
        if name not in self._younger:
            raise AttributeError(f"nl.tile_size has no {name}")
        since, value = self._younger[name]
        if current_core().version < since:
            fail(
                f"nl.tile_size.{name} does not exist in NKI {current_core().version}",
                rule=f"added in NKI {since}",
            )
        return value


tile_size = _TileSize()


# ------------------------------------------------------------------ arguments
def _tensor(helper, x):
    """x, which must be a tensor."""
    if not isinstance(x, NkiTensor):
        raise TypeError(f"nl.{helper} takes a tensor, not {type(x).__name__}")
    return x


def _axes(helper, x, axis):
    """Dimensions of x by their numbers from 0, ascending, from an int or several."""
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    whole = all(isinstance(n, int) and -x.ndim <= n < x.ndim for n in axes)
    numbers = sorted({n % x.ndim for n in axes}) if whole else []
    if not numbers or len(numbers) < len(axes):
        fail(
            f"nl.{helper} of {x.describe()} over axis {axis!r}",
            rule=f"axes are different integers from {-x.ndim} to {x.ndim - 1}",
        )
    return numbers


# ------------------------------------------------------------------ grid and loops
def _one_axis(helper, axis):
    if isinstance(axis, bool) or axis != 0:
        fail(f"nl.{helper} of axis {axis!r}", rule="a launch grid has one axis, 0")


def program_id(axis=0):
    """This core's number in the launch, 0 or 1."""
    _one_axis("program_id", axis)
    return current_core().index


def num_programs(axes=0):
    """Cores of the launch, 1 or 2."""
    _one_axis("num_programs", axes)
    return current_core().launch.lnc


def program_ndim():
    """1 for a launch `kernel[lnc]` with two cores, else 0."""
    return 1 if current_core().launch.lnc > 1 else 0


affine_range = sequential_range = static_range = range


@contextlib.contextmanager
def no_reorder():
    """Execution is in program order anyway."""
    yield


def ds(start, size):
    """The slice start : start + size."""
    return slice(start, start + size)


def is_hbm(buffer):
    return buffer in (hbm, shared_hbm)


def is_sbuf(buffer):
    return buffer is sbuf


def is_psum(buffer):
    return buffer is psum


def is_on_chip(buffer):
    return buffer in (sbuf, psum)


# ------------------------------------------------------------------ allocation
def full(shape, fill_value, dtype, buffer=sbuf, name=""):
    t = ndarray(shape, dtype, buffer, name)
    elementwise.memset(t, fill_value)
    return t


def zeros(shape, dtype, buffer=sbuf, name=""):
    return full(shape, 0, dtype, buffer, name)


def ones(shape, dtype, buffer=sbuf, name=""):
    return full(shape, 1, dtype, buffer, name)


def empty_like(x, dtype=None, buffer=None, name=""):
    _tensor("empty_like", x)
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x, dtype=None, buffer=None, name=""):
    _tensor("zeros_like", x)
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant):
    """A numpy array as a tensor in shared HBM."""
    if not isinstance(constant, (np.ndarray, np.generic)) or constant.size == 0:
        fail(
            f"nl.shared_constant of {constant!r}",
            rule="a numpy array of at least one element, of a dtype that NKI has",
        )
    array = np.ascontiguousarray(constant)
    dtype = name_of(array.dtype)
    data = array.reshape(-1).view(np.uint8).copy()
    storage = Storage(array.shape, dtype, shared_hbm, "constant", data=data)
    storage.is_input = False
    return NkiTensor(storage, dtype, array.shape, row_major(array.shape))


def shared_identity_matrix(n, dtype=uint8, dst=None):
    """The n × n identity in SBUF."""
    dtype = name_of(dtype)
    if not isinstance(n, (int, np.integer)) or not 1 <= n <= arch.PMAX or not holds(dtype, 0):
        fail(
            f"nl.shared_identity_matrix of size {n!r} in {dtype}",
            rule=f"n is 1 to {arch.PMAX}, and the dtype has 0 and 1",
        )
    constant = shared_constant(np.eye(n).astype(BY_NAME[dtype]))
    dst = ndarray((n, n), dtype) if dst is None else dst
    dma.dma_copy(dst, constant)
    return dst


# ------------------------------------------------------------------ movement
def load(src, dtype=None):
    """A new SBUF tile with the contents of an HBM view."""
    tile = ndarray(_tensor("load", src).shape, dtype or src.dtype)
    dma.dma_copy(tile, src)
    return tile


def store(dst, value):
    """Copy an SBUF tile to an HBM view."""
    if _tensor("store", dst).on_chip() or _tensor("store", value).storage.place != "sbuf":
        fail(
            f"nl.store of {value.describe()} to {dst.describe()}",
            rule="the value lies in SBUF, the destination in HBM",
        )
    dma.dma_copy(dst, value)


def _new(x, dtype, shape=None):
    return ndarray(shape or x.shape, dtype or x.dtype)


def transpose(x, dtype=None):
    """x transposed, in PSUM."""
    _tensor("transpose", x)
    result = ndarray((x.size // x.shape[0], x.shape[0]), dtype or x.dtype, psum)
    pe.nc_transpose(result, x, engine=engine.tensor)
    return result


def matmul(x, y, transpose_x=False):
    """xᵀ · y in PSUM; only transpose_x=True compiles."""
    if not transpose_x:
        fail("nl.matmul without transpose_x=True", rule="only transpose_x=True compiles")
    _tensor("matmul", x), _tensor("matmul", y)
    result = ndarray((x.size // x.shape[0], y.size // y.shape[0]), float32, psum)
    pe.nc_matmul(result, x, y)
    return result


def broadcast_to(x, shape, dtype=None):
    """x with its size-1 dimensions repeated: free ones as a view, the partition by a shuffle.

    Another dtype takes a copy.
    """
    _tensor("broadcast_to", x)
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    fits = len(shape) == x.ndim and all(
        isinstance(m, (int, np.integer)) and m > 0 and n in (1, m)
        for n, m in zip(x.shape, shape, strict=True)
    )
    if not fits or (x.vector is not None and shape[0] != x.shape[0]):
        fail(
            f"broadcast_to of {x.describe()} to {shape}",
            rule="equal rank, and only size-1 dimensions grow (not one that row indices select)",
        )
    if x.on_chip() and shape[0] != x.shape[0]:
        x = _on_all_partitions(x, shape[0])
    strides = tuple(0 if n != m else s for n, m, s in zip(x.shape, shape, x.strides, strict=True))
    view = x._derive(shape, strides, x.offset)
    return view if dtype in (None, x.dtype) else _copied(view, dtype)


def _on_all_partitions(x, count):
    """The one partition of x on `count` partitions: a shuffle reaches 32 of them at a time."""
    result = ndarray((count, *x.shape[1:]), x.dtype)
    for first in range(0, count, 32):
        gather.nc_stream_shuffle(result[first : builtins.min(first + 32, count)], x, [0] * 32)
    return result


def _copied(x, dtype):
    result = _new(x, dtype)
    elementwise.tensor_copy(result, x)
    return result


def expand_dims(x, axis):
    """A view of x with a new dimension of size 1."""
    count = _tensor("expand_dims", x).ndim + 1
    if not isinstance(axis, int) or not -count <= axis < count:
        fail(
            f"expand_dims of {x.describe()} at axis {axis!r}",
            rule=f"axis is an integer from {-count} to {count - 1}",
        )
    axis %= count
    if axis == 0 and (x.on_chip() or x.vector is not None):
        fail(
            f"expand_dims of {x.describe()} at axis 0",
            rule="dimension 0 is the partition, or what row indices select",
        )
    return x._derive(
        (*x.shape[:axis], 1, *x.shape[axis:]), (*x.strides[:axis], 1, *x.strides[axis:]), x.offset
    )


# ------------------------------------------------------------------ arithmetic
def _operator(op, x, y=None, dtype=None):
    """What calling an operator does: `nl.add(x, y)`, `nl.exp(x)`."""
    if op.kind == "absent":
        fail(
            f"nl.{op.name} is not a hardware instruction",
            rule="NKI's simulator computes it, no engine does",
        )
    if op.binary is None:  # of one tensor; the second argument is the dtype
        return _unary(op, _tensor(op.name, x), y if dtype is None else dtype)
    tile = x if isinstance(x, NkiTensor) else _tensor(op.name, y)
    result = _new(tile, dtype)
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        elementwise.tensor_tensor(result, x, y, op)
    else:
        scalar, reverse = (y, False) if tile is x else (x, True)
        elementwise.tensor_scalar(result, tile, op, scalar, reverse0=reverse)
    return result


HELPER.append(_operator)


def _unary(op, x, dtype):
    result = _new(x, dtype)
    if op.name == "copy":
        elementwise.tensor_copy(result, x)
    elif op.name == "reciprocal":
        elementwise.reciprocal(result, x)
    elif op.name in ("rsqrt", "invert"):
        elementwise.tensor_scalar(result, x, op, 0)
    else:
        elementwise.activation(result, op, x)
    return result


def negative(x, dtype=None):
    result = _new(_tensor("negative", x), dtype)
    elementwise.tensor_scalar(result, x, OPS["multiply"], -1.0)
    return result


def logical_not(x, dtype=None):
    result = _new(_tensor("logical_not", x), dtype)
    elementwise.tensor_scalar(result, x, OPS["equal"], 0.0)
    return result


def where(condition, x, y, dtype=None):
    """x where condition is 1.0, y where it is 0.0: condition · x + (1 - condition) · y."""
    like = x if isinstance(x, NkiTensor) else _tensor("where", y)
    result = _new(like, dtype, _tensor("where", condition).shape)
    mask = ndarray(condition.shape, uint8)
    elementwise.tensor_copy(mask, condition)
    if isinstance(y, NkiTensor):
        elementwise.tensor_copy(result, y)
    else:
        elementwise.memset(result, y)
    if isinstance(x, NkiTensor) and x.dtype != result.dtype:
        x = _copied(x, result.dtype)
    elementwise.tensor_copy_predicated(result, x, mask)
    return result


# ------------------------------------------------------------------ reductions
def _reduce(op, helper, x, axis, dtype, keepdims):
    axes = _axes(helper, _tensor(helper, x), axis)
    if keepdims:
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    else:
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    result = _new(x, dtype, shape if len(shape) > 1 else (*shape, 1))
    reductions.tensor_reduce(result, OPS[op], x, tuple(axes))
    return result


def sum(x, axis, dtype=None, keepdims=False):
    return _reduce("add", "sum", x, axis, dtype, keepdims)


def max(x, axis, dtype=None, keepdims=False):
    return _reduce("maximum", "max", x, axis, dtype, keepdims)


def min(x, axis, dtype=None, keepdims=False):
    return _reduce("minimum", "min", x, axis, dtype, keepdims)


def prod(x, axis, dtype=None, keepdims=False):
    return _reduce("multiply", "prod", x, axis, dtype, keepdims)


def mean(x, axis, dtype=None, keepdims=False):
    axes = _axes("mean", _tensor("mean", x), axis)
    total = _reduce("add", "mean", x, axis, float32, keepdims)
    result = _new(total, dtype or x.dtype)
    count = math.prod(x.shape[a] for a in axes)
    elementwise.tensor_scalar(result, total, OPS["multiply"], 1.0 / count)
    return result


def device_print(print_prefix, tensor):
    """Print a tensor's values."""
    if _tensor("device_print", tensor).vector is not None:
        fail(f"nl.device_print of {tensor.describe()}", rule="only DMA gathers rows")
    if tensor.scalar is not None:
        tensor = resolve_scalar(tensor, "device_print", "tensor")
    if current_core().shapes_only:
        builtins.print(print_prefix, tensor.describe())
        return
    require_written(tensor, "device_print", "tensor")
    builtins.print(print_prefix, tensor.np)
