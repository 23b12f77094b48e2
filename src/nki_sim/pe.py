"""Instructions of the Tensor engine: a 128×128 array of multipliers that writes to PSUM."""

import numpy as np

from . import arch
from .dtypes import ANY, FLOAT8, ITEMSIZE
from .enums import engine, matmul_perf_mode
from .errors import fail
from .numeric import free_size, rows, store
from .table import CHIP, PS, SB, Rule, inp, instruction, mark_written, out

MATMUL_DTYPES = ("float32", "bfloat16", "float16", *sorted(FLOAT8 - {"float8_e8m0fnu"}))


# ------------------------------------------------------------------ rules of nc_matmul
def _check_contraction(a):
    s, m = a["stationary"], a["moving"]
    if s.shape[0] != m.shape[0]:
        return f"K differs: stationary {s.describe()}, moving {m.describe()}"
    return None


def _shape_of(a):
    return a["stationary"].shape[0], free_size(a["stationary"]), free_size(a["moving"])


def _check_result(a):
    _, m, n = _shape_of(a)
    if a["perf_mode"] is matmul_perf_mode.double_row:
        m, n = m // 2, n // 2
    dst = a["dst"]
    if dst.shape[0] != m or free_size(dst) != n:
        return f"dst {dst.describe()} for a [{m}, {n}] result"
    return None


def _check_pairing(a):
    s, m = a["stationary"].dtype, a["moving"].dtype
    if ("float32" in (s, m)) and s != m:
        return f"stationary {a['stationary'].describe()}, moving {a['moving'].describe()}"
    return None


def _check_e4m3fn(a):
    for name in ("stationary", "moving"):
        if a[name].dtype == "float8_e4m3fn":
            return f"{name} {a[name].describe()}"
    return None


def _check_dst_dtype(a):
    wanted = a["stationary"].dtype if a["is_transpose"] else "float32"
    if a["dst"].dtype != wanted:
        return f"dst {a['dst'].describe()}, expected dtype {wanted}"
    return None


def _check_bank(a):
    dst = a["dst"]
    bytes_of = dst.storage.partition_bytes
    start = dst.offset * dst.itemsize % bytes_of + dst.storage.base[1]
    end = (
        start
        + sum(s * (n - 1) for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True) if s > 0)
        * dst.itemsize
    )
    if start // arch.PSUM_BANK_BYTES != (end + dst.itemsize - 1) // arch.PSUM_BANK_BYTES:
        return (
            f"dst {dst.describe()} covers bytes {start}..{end + dst.itemsize - 1} of its partition"
        )
    return None


def _check_double_row(a):
    if a["perf_mode"] is not matmul_perf_mode.double_row:
        return None
    s, m = a["stationary"], a["moving"]
    for t in (s, m):
        if t.ndim != 3 or t.shape[1] != 2 or t.dtype not in FLOAT8:
            return f"operand {t.describe()}"
    return "with is_transpose" if a["is_transpose"] else None


def _check_tiling(a):
    position, size = tuple(a["tile_position"]), tuple(a["tile_size"])
    if not position and not size:
        return None
    if len(position) != 2 or len(size) != 2:
        return f"tile_position {position}, tile_size {size}"
    k, m, _ = _shape_of(a)
    for p, s, need in zip(position, size, (k, m), strict=True):
        if s not in (32, 64, 128) or p % s or p + s > arch.PMAX or need > s:
            return f"tile_position {position}, tile_size {size} for K {k}, M {m}"
    return None


def _matmul_cost(a):
    k, m, n = _shape_of(a)
    double = a["perf_mode"] is matmul_perf_mode.double_row
    if double:
        m, n = m // 2, n // 2
    passes = arch.PE_FLOAT32_PASSES if a["moving"].dtype == "float32" else 1
    columns = max(n, arch.PE_MIN_COLUMNS)
    return {
        "macs": 0 if a["is_transpose"] else k * m * n * (2 if double else 1),
        "columns": columns,
        "cycles": columns * passes,
        "array_used": k * m / (arch.PMAX * arch.STATIONARY_FMAX) * n / columns,
    }


@instruction(
    "tensor",
    dst=out(PS),
    stationary=inp(SB, MATMUL_DTYPES),
    moving=inp(SB, MATMUL_DTYPES),
    rules=[
        Rule("equal K (partitions): stationary, moving", _check_contraction),
        Rule(
            f"M (free size of stationary) ≤ {arch.STATIONARY_FMAX}",
            lambda a: (
                f"stationary {a['stationary'].describe()} has M = {_logical_m(a)}"
                if _logical_m(a) > arch.STATIONARY_FMAX
                else None
            ),
        ),
        Rule(
            f"N (free size of moving) ≤ {arch.MOVING_FMAX}, one float32 PSUM bank",
            lambda a: (
                f"moving {a['moving'].describe()} has N = {_logical_n(a)}"
                if _logical_n(a) > arch.MOVING_FMAX
                else None
            ),
        ),
        Rule("dst is [M, N]", _check_result),
        Rule("float32 only with float32; 16-bit and 8-bit floats may mix", _check_pairing),
        Rule("float8_e4m3fn is trn3 only", _check_e4m3fn),
        Rule("dst is float32 (is_transpose: the dtype of stationary)", _check_dst_dtype),
        Rule(f"the result lies in one PSUM bank ({arch.PSUM_BANK_BYTES} bytes)", _check_bank),
        Rule("double_row: float8 [K, 2, free] operands, no transpose", _check_double_row),
        Rule(
            "tile_position and tile_size together: sizes 32/64/128, position a multiple, K and "
            "M fit",
            _check_tiling,
        ),
    ],
    cost=_matmul_cost,
    marks=False,
)
def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
    name=None,
):
    """dst[M, N] (+)= stationary[K, M]ᵀ · moving[K, N]; products and sums in float32.

    accumulate False overwrites, True adds, None decides for each PSUM element: the first matmul
    to write it overwrites, later ones add. Adding where no matmul has written is an error.
    With is_transpose, moving is the identity and dst = stationaryᵀ, bit for bit.
    """
    if is_transpose:
        _transpose(dst, stationary, moving)
        return
    if perf_mode is matmul_perf_mode.double_row:
        k, m, n = stationary.shape[0], stationary.shape[2], moving.shape[2]
        left = rows(stationary).reshape(2 * k, m)
        right = rows(moving).reshape(2 * k, n)
    else:
        left, right = rows(stationary), rows(moving)
    product = (left.T @ right).reshape(dst.shape)
    started = dst.storage.by_matmul.read(dst) if accumulate is not False else False
    if accumulate and started is not True:
        _refuse_accumulation(dst, started)
    if started is True:
        product = dst.np + product
    elif started is not False:
        product = np.where(started, dst.np, np.float32(0)) + product
    store(dst, product)
    mark_written(dst)
    dst.storage.by_matmul.set(dst)


def _transpose(dst, data, identity):
    if not np.array_equal(rows(identity), np.eye(identity.shape[0])):
        fail(
            f"is_transpose with moving {identity.describe()}, which is not the identity [K, K]",
            rule="transpose mode takes the data as stationary and the identity as moving",
            instruction="nc_matmul",
        )
    dst.np[...] = data.np.reshape(data.shape[0], -1).T.reshape(dst.shape)
    mark_written(dst)
    dst.storage.by_matmul.set(dst)


def _logical_m(a):
    double = a["perf_mode"] is matmul_perf_mode.double_row
    return free_size(a["stationary"]) // (2 if double else 1)


def _logical_n(a):
    double = a["perf_mode"] is matmul_perf_mode.double_row
    return free_size(a["moving"]) // (2 if double else 1)


def _refuse_accumulation(dst, started):
    first = (0,) * dst.ndim
    if started is not False:
        first = tuple(int(i) for i in np.unravel_index(np.argmin(started), dst.shape))
    state = dst.storage.written.read(dst)
    written = state is True or (state is not False and bool(state[first]))
    how = "was last written by another instruction" if written else "was never written"
    fail(
        f"accumulate=True adds to {dst.describe()}, but element {list(first)} {how}",
        rule="a PSUM accumulation starts with a matmul that overwrites; memset or a copy before "
        "it is undefined on trn2",
        instruction="nc_matmul",
        hint="use accumulate=(k > 0), or accumulate=None on a fresh PSUM tile",
    )


# ------------------------------------------------------------------ nc_transpose
def _transpose_engine(a):
    if a["engine"] is not engine.unknown:
        return a["engine"].name
    small = a["data"].shape[0] <= 32 and free_size(a["data"]) <= 32
    return "vector" if small or a["dst"].storage.place == "sbuf" else "tensor"


def _check_transpose_shape(a):
    dst, data = a["dst"], a["data"]
    if dst.shape[0] != free_size(data) or free_size(dst) != data.shape[0]:
        return f"dst {dst.describe()} for data {data.describe()}"
    return None


def _check_transpose_limits(a):
    dst, data = a["dst"], a["data"]
    name = _transpose_engine(a)
    if name not in ("vector", "tensor"):
        return f"engine {name}"
    # A tile has at most 128 partitions, which bounds both sides on the Tensor engine.
    if name == "vector" and max(data.shape[0], free_size(data)) > 32:
        return f"data {data.describe()} on engine {name}"
    if name == "tensor" and (dst.storage.place, data.storage.place) != ("psum", "sbuf"):
        return f"dst {dst.describe()}, data {data.describe()} on engine tensor"
    return None


def _check_transpose_dtype(a):
    if a["dst"].dtype != a["data"].dtype:
        return f"dst {a['dst'].describe()}, data {a['data'].describe()}"
    return None


def _transpose_cost(a):
    if _transpose_engine(a) == "vector":
        return None
    columns = max(a["data"].shape[0], arch.PE_MIN_COLUMNS)
    passes = arch.PE_FLOAT32_PASSES if ITEMSIZE[a["data"].dtype] == 4 else 1
    return {"columns": columns, "cycles": columns * passes}


@instruction(
    "tensor vector",
    dst=out(CHIP, ANY),
    data=inp(CHIP, ANY),
    rules=[
        Rule("dst is [N, P] of data [P, N], free dimensions flattened", _check_transpose_shape),
        Rule("tensor: ≤ 128×128, SBUF to PSUM; vector: ≤ 32×32", _check_transpose_limits),
        Rule("equal dtype: dst, data", _check_transpose_dtype),
    ],
    pick=_transpose_engine,
    cost=_transpose_cost,
)
def nc_transpose(dst, data, engine=engine.unknown, name=None):
    """dst = data transposed, bit for bit, through the Tensor or the Vector engine."""
    turned = data.np.reshape(data.shape[0], -1).T
    dst.np[...] = turned.reshape(dst.shape)
