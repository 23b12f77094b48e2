"""Rotary position embedding of queries and keys, as an NKI kernel.

Shape suffixes:
    B  batch             H  heads (of q or of k)     S  sequence positions
    D  head dimension    P  partitions of a tile     N  row tiles side by side in one tile

Rotation of the pair (i, i + D/2) of a head, in the half-split order of Transformers:
    forward    y1 = x1·cos1 − x2·sin1      y2 = x2·cos2 + x1·sin2
    backward   dx1 = dy1·cos1 + dy2·sin2   dx2 = dy2·cos2 − dy1·sin1
where 1 and 2 name the halves of D. Backward is the transpose of forward, also for unequal halves.

Written with what NKI 0.3 to 0.7 share: Python loops, indexing, `.ap`, keyword arguments.
Source of the algorithm: Su et al. 2021 (RoFormer), section 3.4.2.
"""

import nki
import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128  # positions a row tile holds, one a partition
ROW_TILES = 8  # row tiles that one instruction covers: amortises the ≈60 cycles of its start


def check_rope(q_shape, k_shape, cache_shape, lnc):
    """Raise ValueError, in one sentence, for shapes that `rope_kernel[lnc]` cannot take."""
    if len(q_shape) != 4 or len(k_shape) != 4:
        raise ValueError(f"q and k must be [B, H, S, D], got {list(q_shape)} and {list(k_shape)}")
    B, _, S, D = q_shape
    if (k_shape[0], k_shape[2], k_shape[3]) != (B, S, D):
        raise ValueError(f"q {list(q_shape)} and k {list(k_shape)} may differ in heads only")
    if D % 2:
        raise ValueError(f"head dimension {D} is odd, but rotation pairs dimension i with i + D/2")
    step = PARTITIONS * lnc
    if S % step:
        below = f"{S // step * step} or " if S // step else ""
        raise ValueError(
            f"sequence length {S} is not a multiple of {step} ({PARTITIONS} rows a tile × LNC "
            f"{lnc}): use {below}{(S // step + 1) * step}"
        )
    shared = len(cache_shape) == 2
    if not shared and (len(cache_shape) != 3 or cache_shape[0] != B):
        raise ValueError(f"the cache must be [S, 2D] or [{B}, S, 2D], got {list(cache_shape)}")
    if cache_shape[-2] < S or cache_shape[-1] != 2 * D:
        raise ValueError(
            f"the cache must have at least {S} rows of {2 * D}, got {list(cache_shape)}"
        )


@nki.jit
def rope_kernel(q_BHSD, k_BHSD, cache, backward=False):
    """Rotate q and k, or with backward their gradients, by the angle of each position.

    q_BHSD, k_BHSD   HBM, float32 or bfloat16; numbers of heads may differ
    cache            HBM [S, 2D] or [B, S, 2D], cos in the first D columns, then sin; row = position
    Returns (q_out, k_out) in shared HBM, shapes and dtypes as q and k. Products and sums are
    float32, rounded once on the way out. Each input byte is read from HBM once, each output byte
    written once; a cache tile serves all heads. With LNC 2 each core takes half of the sequence.
    S is a multiple of 128 × LNC; `check_rope` says so before a launch.
    """
    B, _, S, D = q_BHSD.shape
    cores = nl.num_programs(axes=0)
    assert S % (PARTITIONS * cores) == 0, f"sequence length {S} for {cores} cores"
    q_out = nl.ndarray(q_BHSD.shape, dtype=q_BHSD.dtype, buffer=nl.shared_hbm)
    k_out = nl.ndarray(k_BHSD.shape, dtype=k_BHSD.dtype, buffer=nl.shared_hbm)
    rows = S // cores
    first = nl.program_id(axis=0) * rows
    # A cache without batch dimension serves every sequence: load a tile once for the whole batch.
    shared = len(cache.shape) == 2
    for start in range(first, first + rows, PARTITIONS * ROW_TILES):
        N = min(ROW_TILES, (first + rows - start) // PARTITIONS)
        if shared:
            cache_PN2D = load_rows(cache, start, N, 2 * D)
        for b in range(B):
            if not shared:
                cache_PN2D = load_rows(cache, b * cache.shape[1] + start, N, 2 * D)
            rotate_heads(q_BHSD, q_out, cache_PN2D, b, start, backward)
            rotate_heads(k_BHSD, k_out, cache_PN2D, b, start, backward)
    return q_out, k_out


def rows_of(tensor, row, N, width):
    """View [P, N, width] of HBM: row `row + n·P + p` of the tensor seen as [rows, width]."""
    return tensor.ap(
        pattern=[[width, PARTITIONS], [PARTITIONS * width, N], [1, width]], offset=row * width
    )


def load_rows(tensor, row, N, width):
    """An SBUF tile [P, N, width] of float32, cast by the DMA on the way."""
    tile_PNW = nl.ndarray((PARTITIONS, N, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_PNW, src=rows_of(tensor, row, N, width))
    return tile_PNW


def rotate_heads(x_BHSD, out_BHSD, cache_PN2D, b, start, backward):
    """Rotate N row tiles from position `start` of every head of sequence b."""
    _, H, S, D = x_BHSD.shape
    N = cache_PN2D.shape[1]
    for h in range(H):
        row = (b * H + h) * S + start
        x_PND = nl.ndarray((PARTITIONS, N, D), dtype=x_BHSD.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_PND, src=rows_of(x_BHSD, row, N, D))
        y_PND = rotate(x_PND, cache_PN2D, backward)
        nisa.dma_copy(dst=rows_of(out_BHSD, row, N, D), src=y_PND)


def rotate(x_PND, cache_PN2D, backward):
    """The rotation of one tile: four products and two sums on the Vector engine, in float32.

    Four instructions: x·cos whole, each half times the sine of its partner, and each sum. The
    sum writes y in x's dtype, which is the only rounding below float32.
    """
    _, N, D = x_PND.shape
    half = D // 2
    cos_PND = cache_PN2D[:, :, 0:D]
    sin1, sin2 = cache_PN2D[:, :, D : D + half], cache_PN2D[:, :, D + half : 2 * D]
    x1, x2 = x_PND[:, :, 0:half], x_PND[:, :, half:D]
    straight_PND = nl.ndarray((PARTITIONS, N, D), dtype=nl.float32, buffer=nl.sbuf)
    crossed_PND = nl.ndarray((PARTITIONS, N, D), dtype=nl.float32, buffer=nl.sbuf)
    y_PND = nl.ndarray((PARTITIONS, N, D), dtype=x_PND.dtype, buffer=nl.sbuf)
    # Forward: half 1 gets x2·sin1, half 2 gets x1·sin2. Backward: x2·sin2 and x1·sin1.
    to1, to2 = (sin2, sin1) if backward else (sin1, sin2)
    op1, op2 = (nl.add, nl.subtract) if backward else (nl.subtract, nl.add)
    nisa.tensor_tensor(dst=straight_PND, data1=x_PND, data2=cos_PND, op=nl.multiply)
    nisa.tensor_tensor(dst=crossed_PND[:, :, 0:half], data1=x2, data2=to1, op=nl.multiply)
    nisa.tensor_tensor(dst=crossed_PND[:, :, half:D], data1=x1, data2=to2, op=nl.multiply)
    nisa.tensor_tensor(
        dst=y_PND[:, :, 0:half],
        data1=straight_PND[:, :, 0:half],
        data2=crossed_PND[:, :, 0:half],
        op=op1,
    )
    nisa.tensor_tensor(
        dst=y_PND[:, :, half:D],
        data1=straight_PND[:, :, half:D],
        data2=crossed_PND[:, :, half:D],
        op=op2,
    )
    return y_PND
