"""Rotary position embedding of queries and keys, as NKI kernels.

Shape suffixes:
    B  batch             S  sequence positions       H  heads (of q or of k)
    D  head dimension    W  2·D, a cache row         M  rows of the cache
    P  partitions of a tile, each with N consecutive positions     G  heads in one tile

Rotation of the pair (i, i + D/2) of a head, in the half-split order of Transformers:
    forward    y1 = x1·cos1 − x2·sin1      y2 = x2·cos2 + x1·sin2
    backward   dx1 = dy1·cos1 + dy2·sin2   dx2 = dy2·cos2 − dy1·sin1
where 1 and 2 name the halves of D. Backward is the transpose of forward, also for unequal halves.

Two entries for two layouts, `rope_kernel` as in Transformers, `rope_kernel_bshd` as in torchtitan,
each with cache rows in order or, with positions, gathered by the kernel itself.

Written with what NKI 0.3 to 0.7 share: Python loops, indexing, `.ap`, keyword arguments, `== None`.
Source of the algorithm: Su et al. 2021 (RoFormer), section 3.4.2.
"""

import nki
import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128  # partitions of SBUF
# Most positions a partition holds: few, long instructions, since each costs ≈60 cycles to start.
POSITIONS = 8
# Most elements of x a partition holds. With its float32 temporaries a tile then takes 80 KiB of
# the 208 in bfloat16, 96 in float32, so that a compiler can load the next tile and store the last
# one while this one is computed.
ELEMENTS = 8192


def check_rope(q_shape, k_shape, cache_shape, lnc, layout="BHSD", positions_shape=None):
    """Raise ValueError, in one sentence, for shapes that the kernels cannot take at this LNC.

    layout   "BHSD" for `rope_kernel`, "BSHD" for `rope_kernel_bshd`
    """
    names = "[" + ", ".join(layout) + "]"
    if len(q_shape) != 4 or len(k_shape) != 4:
        raise ValueError(f"q and k must be {names}, got {list(q_shape)} and {list(k_shape)}")
    B, S, D = q_shape[0], q_shape[layout.index("S")], q_shape[3]
    if (k_shape[0], k_shape[layout.index("S")], k_shape[3]) != (B, S, D):
        raise ValueError(
            f"q {list(q_shape)} and k {list(k_shape)} may differ in heads only, dimension "
            f"{layout.index('H')} of {names}: check the layout"
        )
    if D % 2:
        raise ValueError(
            f"head dimension {D} is odd, but rotation pairs dimension i with i + D/2: use {D + 1}"
        )
    step = PARTITIONS * lnc
    if S % step or S == 0:
        below = f"{S // step * step} or " if S // step else ""
        one_core = f", or {S} with LNC 1" if S and S % PARTITIONS == 0 else ""
        raise ValueError(
            f"sequence length {S} is not a multiple of {step} ({PARTITIONS} rows a tile × LNC "
            f"{lnc}): use {below}{(S // step + 1) * step}{one_core}"
        )
    if positions_shape is None:
        if len(cache_shape) != 2 and (len(cache_shape) != 3 or cache_shape[0] != B):
            raise ValueError(f"the cache must be [S, 2D] or [{B}, S, 2D], got {list(cache_shape)}")
        if cache_shape[-2] < S or cache_shape[-1] != 2 * D:
            raise ValueError(
                f"the cache must have at least {S} rows of {2 * D}, got {list(cache_shape)}"
            )
        return
    if tuple(positions_shape) != (B, S):
        raise ValueError(f"positions must be [{B}, {S}], got {list(positions_shape)}")
    if len(cache_shape) != 2 or cache_shape[1] != 2 * D:
        raise ValueError(f"with positions the cache must be [M, {2 * D}], got {list(cache_shape)}")


@nki.jit
def rope_kernel(q_BHSD, k_BHSD, cache, backward=False, positions_BS=None):
    """Rotate q and k, or with backward their gradients, by the angle of each position.

    q_BHSD, k_BHSD   HBM, float32 or bfloat16; numbers of heads may differ
    cache            HBM [S, 2D] or [B, S, 2D], float32, cos in the first D columns, then sin
    positions_BS     HBM int32 or None. Given, position s of sequence b takes row positions_BS[b, s]
                     of a cache [M, 2D]; a row that does not exist stops the run
    Returns (q_out, k_out) in shared HBM, shapes and dtypes as q and k. Products and sums are
    float32, rounded once on the way out. Each byte of q and k is read from HBM once, each byte of
    the outputs written once; a cache tile serves all heads. A cache row is read once, or with
    positions once for each position that names it. With LNC 2 each core takes half of the
    sequence. S is a multiple of 128 × LNC; `check_rope` says so before a launch.
    """
    return rotate_all(q_BHSD, k_BHSD, cache, backward, positions_BS, True)


@nki.jit
def rope_kernel_bshd(q_BSHD, k_BSHD, cache, backward=False, positions_BS=None):
    """`rope_kernel` for [B, S, H, D]: no transpose before and after, longer pieces of memory.

    The heads of a position lie side by side, H·D elements, and so do the positions of a partition:
    where all heads fit into a tile, a partition gets N·H·D elements as one piece.
    """
    return rotate_all(q_BSHD, k_BSHD, cache, backward, positions_BS, False)


def rotate_all(q, k, cache, backward, positions, heads_first):
    """This core's share of the sequence, tile by tile."""
    B, D = q.shape[0], q.shape[3]
    S = q.shape[2] if heads_first else q.shape[1]
    cores = nl.num_programs(axes=0)
    assert S % (PARTITIONS * cores) == 0, f"sequence length {S} for {cores} cores"
    q_out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    k_out = nl.ndarray(k.shape, dtype=k.dtype, buffer=nl.shared_hbm)
    share = S // cores
    first = nl.program_id(axis=0) * share
    one_position = D if heads_first else max(q.shape[2], k.shape[2]) * D  # side by side in HBM
    # Fewer positions rather than fewer heads, so that a partition's share stays one piece of HBM.
    N_most = min(POSITIONS, max(1, ELEMENTS // one_position))
    for start in range(first, first + share, PARTITIONS * N_most):
        N = min(N_most, (first + share - start) // PARTITIONS)
        for b in range(B):
            if positions != None:  # noqa: E711, the spelling that every NKI compiles
                cache_PNW = gather_cache(cache, positions, b * S + start, N)
            elif len(cache.shape) == 3:
                cache_PNW = load_cache(cache, b * cache.shape[1] + start, N)
            elif b == 0:  # one cache for the whole batch: its tile is loaded once
                cache_PNW = load_cache(cache, start, N)
            rotate_heads(q, q_out, cache_PNW, b, start, backward, heads_first)
            rotate_heads(k, k_out, cache_PNW, b, start, backward, heads_first)
    return q_out, k_out


def load_cache(cache, row, N):
    """128·N cache rows from `row` on; a partition gets N consecutive ones, one piece of memory."""
    W = cache.shape[-1]
    cache_PNW = nl.ndarray((PARTITIONS, N, W), dtype=nl.float32, buffer=nl.sbuf)
    source = cache.ap(pattern=[[N * W, PARTITIONS], [W, N], [1, W]], offset=row * W)
    nisa.dma_copy(dst=cache_PNW, src=source)
    negate_first_sine(cache_PNW)
    return cache_PNW


def gather_cache(cache_MW, positions_BS, at, N):
    """The cache rows that 128·N positions name, from the flat index `at` of positions on."""
    W = cache_MW.shape[1]
    rows_PN = nl.ndarray((PARTITIONS, N), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_PN, src=positions_BS.ap(pattern=[[N, PARTITIONS], [1, N]], offset=at))
    cache_PNW = nl.ndarray((PARTITIONS, N, W), dtype=nl.float32, buffer=nl.sbuf)
    for n in range(N):  # an indirect transfer takes one row index for each partition
        row_P1 = rows_PN.ap(pattern=[[N, PARTITIONS], [1, 1]], offset=n)
        source = cache_MW.ap(pattern=[[W, PARTITIONS], [1, W]], vector_offset=row_P1)
        nisa.dma_copy(dst=cache_PNW[:, n, :], src=source)
    negate_first_sine(cache_PNW)
    return cache_PNW


def negate_first_sine(cache_PNW):
    """Turn sin1 into −sin1, the only sine with a minus in forward and in backward.

    Once a tile, so that every rotation ends in a single sum. Negation is exact in floating point.
    """
    D = cache_PNW.shape[2] // 2
    sin1 = cache_PNW[:, :, D : D + D // 2]
    nisa.tensor_scalar(dst=sin1, data=sin1, op0=nl.multiply, operand0=-1.0)


def rotate_heads(x, out, cache_PNW, b, start, backward, heads_first):
    """Rotate 128·N positions of sequence b from `start` on, as many heads at once as fit."""
    N = cache_PNW.shape[1]
    D = x.shape[3]
    S, H = (x.shape[2], x.shape[1]) if heads_first else (x.shape[1], x.shape[2])
    G_most = min(H, max(1, ELEMENTS // (N * D)))
    for h in range(0, H, G_most):
        G = min(G_most, H - h)
        # Partition p takes positions start + p·N and on: neighbours in HBM stay neighbours.
        if heads_first:
            shape = (PARTITIONS, G, N, D)
            pattern = [[N * D, PARTITIONS], [S * D, G], [D, N], [1, D]]
            offset = ((b * H + h) * S + start) * D
        else:
            shape = (PARTITIONS, N, G, D)
            pattern = [[N * H * D, PARTITIONS], [H * D, N], [D, G], [1, D]]
            offset = ((b * S + start) * H + h) * D
        x_tile = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_tile, src=x.ap(pattern=pattern, offset=offset))
        y_tile = rotate(x_tile, cache_PNW, backward, heads_first)
        nisa.dma_copy(dst=out.ap(pattern=pattern, offset=offset), src=y_tile)


def rotate(x_tile, cache_PNW, backward, heads_first):
    """The rotation of one tile, in float32: four instructions on the Vector engine.

    x_tile   [P, G, N, D] if heads_first, else [P, N, G, D]
    x·cos, each half of x times the sine of its partner, and their sum, which is written in x's
    dtype: the only rounding below float32.
    """
    D = x_tile.shape[3]
    half = D // 2
    G = x_tile.shape[1] if heads_first else x_tile.shape[2]
    cos = over_heads(cache_PNW, 0, D, G, heads_first)
    minus_sin1 = over_heads(cache_PNW, D, half, G, heads_first)
    sin2 = over_heads(cache_PNW, D + half, half, G, heads_first)
    # Forward: half 1 gets −x2·sin1, half 2 gets x1·sin2. Backward: x2·sin2 and −x1·sin1.
    to1, to2 = (sin2, minus_sin1) if backward else (minus_sin1, sin2)
    x1, x2 = x_tile[:, :, :, 0:half], x_tile[:, :, :, half:D]
    straight = nl.ndarray(x_tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    crossed = nl.ndarray(x_tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    y_tile = nl.ndarray(x_tile.shape, dtype=x_tile.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=straight, data1=x_tile, data2=cos, op=nl.multiply)
    nisa.tensor_tensor(dst=crossed[:, :, :, 0:half], data1=x2, data2=to1, op=nl.multiply)
    nisa.tensor_tensor(dst=crossed[:, :, :, half:D], data1=x1, data2=to2, op=nl.multiply)
    nisa.tensor_tensor(dst=y_tile, data1=straight, data2=crossed, op=nl.add)
    return y_tile


def over_heads(cache_PNW, column, width, G, heads_first):
    """Columns of the cache tile as each of G heads sees them: a stride of 0, not a copy."""
    _, N, W = cache_PNW.shape
    if heads_first:
        pattern = [[N * W, PARTITIONS], [0, G], [W, N], [1, width]]
    else:
        pattern = [[N * W, PARTITIONS], [W, N], [0, G], [1, width]]
    return cache_PNW.ap(pattern=pattern, offset=column)
