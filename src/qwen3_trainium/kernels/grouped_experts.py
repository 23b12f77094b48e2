"""The experts of a mixture-of-experts layer, dropless and in blocks, as NKI kernels.

Shape suffixes:
    R  routed rows, sorted by expert     E  experts          D  model dimension
    P  slots of a block (128 rows)       N  blocks           F  width of an expert
    T  partitions of a 128-wide tile of D or F; K such tiles of D, J of F

An expert e maps its rows to  y = (silu(x·w1[e]ᵀ) · (x·w3[e]ᵀ)) · w2[e]ᵀ .  Each expert's rows are
cut into blocks of 128, the last of them padded. How many blocks there are at most follows from R
and E alone (`block_count`), so shapes never depend on the routing; which expert and which rows a
block has is read on the device, from two tables that the caller makes:

    rows_PN   int32 [128, N]   row of x in slot p of block n; R (one past the last) is padding
    blocks    int32 [3, N]     FETCH   expert whose weights to load, E to keep those loaded before
                               KEEP    1 if block n has the expert of block n − 1, else 0
                               STORE   expert of block n if it is the expert's last block, else E

An index one past the end makes a DMA with `oob_mode.skip` do nothing: that is how padding is
neither read nor written, and how blocks of one expert share its weights.

Written with what NKI 0.3 to 0.7 share: Python loops, indexing, `.ap`, keyword arguments.
Source of the idea: Gale et al. 2022 (MegaBlocks), sections 4 and 5.
"""

import nki
import nki.isa as nisa
import nki.language as nl

BLOCK = 128  # slots of a block, one a partition
TILE = 128  # contraction a matmul takes, and columns of its stationary operand
COLUMNS = 512  # columns of its moving operand: one PSUM bank of float32
BANK_BYTES = 2048  # of a partition
ALIGN = 16  # elements: D and F are multiples, so that DMA moves at least 32 contiguous bytes
SBUF_BYTES = 212984  # of a partition, that a kernel may use on trn2
# Of these, what weights (forward) or sums of gradients (backward) may take; rows need the rest.
RESIDENT_BYTES = 160 * 1024
FETCH, KEEP, STORE = 0, 1, 2


def block_count(R, E):
    """Blocks that suffice for R rows of E experts, however they are routed.

    Worst case: all experts but one hold a single row, which takes a block each.
    """
    if R <= E:
        return R
    return -(-(R - (E - 1)) // BLOCK) + E - 1


def resident(D, F, itemsize):
    """Whether one expert's weights, as stored and transposed, stay in SBUF between blocks."""
    as_stored = (2 * tiles(F) * D + tiles(D) * F) * itemsize
    transposed = (2 * tiles(D) * F + tiles(F) * D) * itemsize
    return as_stored + transposed <= RESIDENT_BYTES


def sbuf_bytes(D, F, itemsize):
    """Bytes a partition that the kernels need at most, of the 212,984 that a kernel may use.

    What is live at once in each of the three loops over blocks, each tile counted whole; tables
    with room for 400 blocks.
    """
    tables, temporaries = 5 * 4 * 400, 2 * COLUMNS * 4
    as_stored = (2 * tiles(F) * D + tiles(D) * F) * itemsize
    transposed = (2 * tiles(D) * F + tiles(F) * D) * itemsize
    strips = as_stored if resident(D, F, itemsize) else max(D, F) * itemsize
    rows = (3 * D + 3 * F + (tiles(D) + tiles(F)) * TILE) * itemsize
    forward = transposed + strips + rows
    row_pairs = (2 * D + 4 * F) * itemsize
    first = 3 * F + max(tiles(D) * TILE, 2 * tiles(F) * TILE + D)
    backward = as_stored + row_pairs + first * itemsize
    width = min(D, gradient_columns(D, F))
    sums = (2 * tiles(F) * width + tiles(width) * F) * 4
    gradients = sums + (5 * width + 4 * F) * itemsize
    return max(forward, backward, gradients) + tables + temporaries


def check_experts(x_shape, count_shape, w1_shape, w2_shape, w3_shape, dtypes):
    """Raise ValueError, in one sentence, for what the kernels cannot take.

    dtypes   names of the dtypes of x, w1, w2, w3, e.g. "float32"
    """
    if len(x_shape) != 2 or len(w1_shape) != 3:
        raise ValueError(
            f"x must be [R, D] and w1 [E, F, D], got {list(x_shape)} and {list(w1_shape)}"
        )
    E, F, D = w1_shape
    if x_shape[1] != D:
        raise ValueError(f"x {list(x_shape)} has rows of {x_shape[1]}, w1 {list(w1_shape)} of {D}")
    if tuple(w3_shape) != (E, F, D) or tuple(w2_shape) != (E, D, F):
        raise ValueError(
            f"w1 is {[E, F, D]}, so w3 must be {[E, F, D]} and w2 {[E, D, F]}, got "
            f"{list(w3_shape)} and {list(w2_shape)}"
        )
    if tuple(count_shape) != (E,):
        raise ValueError(
            f"num_tokens_per_expert must be [{E}], one count an expert, got {list(count_shape)}"
        )
    for name, size in (("dim", D), ("expert width", F)):
        if size % ALIGN:
            below = f"{size // ALIGN * ALIGN} or " if size // ALIGN else ""
            raise ValueError(
                f"{name} {size} is not a multiple of {ALIGN}, the least that a DMA moves well: "
                f"use {below}{(size // ALIGN + 1) * ALIGN}"
            )
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"x, w1, w2, w3 must have one dtype, got {', '.join(dtypes)}: cast them first"
        )
    if dtypes[0] not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtypes[0]} is not supported: use float32 or bfloat16")
    need = sbuf_bytes(D, F, 4 if dtypes[0] == "float32" else 2)
    if need > SBUF_BYTES:
        raise ValueError(
            f"one expert of dim {D} and width {F} in {dtypes[0]} takes {need:,} bytes of an SBUF "
            f"partition, which has {SBUF_BYTES:,}: use bfloat16 or a narrower expert"
        )


# ------------------------------------------------------------------ kernels
@nki.jit
def grouped_experts_kernel(
    x_RD, rows_PN, blocks, w1_EFD, w2_EDF, w3_EFD, keep_weights=True, transpose_by_dma=False
):
    """Rows through their experts: y, and for backward the gate and up projections.

    x_RD                    HBM, rows sorted by expert; float32 or bfloat16, as the weights
    rows_PN, blocks         HBM, the tables described above
    w1_EFD, w2_EDF, w3_EFD  HBM, gate, down and up projection of every expert
    keep_weights            FETCH may say "keep": the weights stay in SBUF between blocks. Needs
                            `resident(D, F, itemsize)`
    transpose_by_dma        transpose the weights on their way in, not on the Tensor engine.
                            2-byte dtypes only. AWS documents such a transfer for fixed addresses;
                            here the address is known at run time only: NOT VERIFIED on a device
    Returns (y_RD, gate_RF, up_RF) in shared HBM, in x's dtype. All sums are float32, in PSUM. With
    LNC 2 each core takes half of the blocks. `check_experts` says before a launch what is wrong.
    """
    R, D = x_RD.shape
    F = w1_EFD.shape[1]
    dtype = x_RD.dtype
    y_RD = nl.ndarray((R, D), dtype=dtype, buffer=nl.shared_hbm)
    gate_RF = nl.ndarray((R, F), dtype=dtype, buffer=nl.shared_hbm)
    up_RF = nl.ndarray((R, F), dtype=dtype, buffer=nl.shared_hbm)
    rows_sb = load_rows_table(rows_PN)
    fetch_sb = load_blocks_row(blocks, FETCH)
    x_tiles = fresh_pair(D, dtype)
    w1T_TKF = nl.ndarray((TILE, tiles(D), F), dtype=dtype, buffer=nl.sbuf)
    w3T_TKF = nl.ndarray((TILE, tiles(D), F), dtype=dtype, buffer=nl.sbuf)
    w2T_TJD = nl.ndarray((TILE, tiles(F), D), dtype=dtype, buffer=nl.sbuf)
    stored = None
    if keep_weights and not transpose_by_dma:
        stored = (weight_tiles(F, D, dtype), weight_tiles(D, F, dtype), weight_tiles(F, D, dtype))
    first, last = blocks_of_this_core(rows_PN)
    for n in range(first, last):
        x_PD = x_tiles[n % 2]
        gather(x_PD, x_RD, rows_sb, n)
        xT_TKP = nl.ndarray((TILE, tiles(D), BLOCK), dtype=dtype, buffer=nl.sbuf)
        transpose(xT_TKP, x_PD, BLOCK, 0)
        expert = fetch_sb.ap(pattern=[[fetch_sb.shape[1], 1], [1, 1]], offset=n)
        if transpose_by_dma:
            fetch_transposed(w1T_TKF, w1_EFD, expert)
            fetch_transposed(w3T_TKF, w3_EFD, expert)
            fetch_transposed(w2T_TJD, w2_EDF, expert)
        else:
            fetch_and_transpose(w1T_TKF, w1_EFD, expert, stored[0] if stored else None)
            fetch_and_transpose(w3T_TKF, w3_EFD, expert, stored[2] if stored else None)
            fetch_and_transpose(w2T_TJD, w2_EDF, expert, stored[1] if stored else None)
        gate_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        up_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        act_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        for f in range(0, F, COLUMNS):
            width = min(COLUMNS, F - f)
            gate_and_up(gate_PF, up_PF, act_PF, xT_TKP, w1T_TKF, w3T_TKF, D, f, width)
        scatter(gate_RF, gate_PF, rows_sb, n)
        scatter(up_RF, up_PF, rows_sb, n)
        actT_TJP = nl.ndarray((TILE, tiles(F), BLOCK), dtype=dtype, buffer=nl.sbuf)
        transpose(actT_TJP, act_PF, BLOCK, 0)
        y_PD = nl.ndarray((BLOCK, D), dtype=dtype, buffer=nl.sbuf)
        for d in range(0, D, COLUMNS):
            width = min(COLUMNS, D - d)
            y_psum = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.psum)
            multiply(y_psum, actT_TJP, w2T_TJD, F, d, width, True)
            nisa.tensor_copy(dst=y_PD[:, d : d + width], src=y_psum)
        scatter(y_RD, y_PD, rows_sb, n)
    return y_RD, gate_RF, up_RF


@nki.jit
def grouped_experts_backward_kernel(
    dy_RD, x_RD, gate_RF, up_RF, rows_PN, blocks, empty_E, w1_EFD, w2_EDF, w3_EFD, keep_weights=True
):
    """Gradients of the rows and of all three weights.

    dy_RD             HBM, gradient of y
    x_RD … w3_EFD     HBM, as in forward; gate_RF, up_RF are what forward returned
    empty_E           HBM int32 [1, E]: e where expert e has no row, else E (one past the last)
    Returns (dx_RD, dw1_EFD, dw2_EDF, dw3_EFD) in shared HBM, in x's dtype; experts without a row
    get zeros. SiLU, its derivative and the products are computed again from gate and up; the two
    projections, which would need the transposed weights once more, are not.

    Two passes, with a barrier between them when there are two cores. The first walks the blocks
    (each core half of them) with the weights as they are stored, and leaves the gradients of gate
    and up and the activations in HBM. The second walks all blocks for the weights' gradients,
    which it sums in SBUF, in float32, and writes once an expert; each core takes half of D.
    """
    R, D = x_RD.shape
    E, F, _ = w1_EFD.shape
    dtype = x_RD.dtype
    dx_RD = nl.ndarray((R, D), dtype=dtype, buffer=nl.shared_hbm)
    dw1_EFD = nl.ndarray((E, F, D), dtype=dtype, buffer=nl.shared_hbm)
    dw2_EDF = nl.ndarray((E, D, F), dtype=dtype, buffer=nl.shared_hbm)
    dw3_EFD = nl.ndarray((E, F, D), dtype=dtype, buffer=nl.shared_hbm)
    dgate_RF = nl.ndarray((R, F), dtype=dtype, buffer=nl.shared_hbm)
    dup_RF = nl.ndarray((R, F), dtype=dtype, buffer=nl.shared_hbm)
    act_RF = nl.ndarray((R, F), dtype=dtype, buffer=nl.shared_hbm)
    rows_sb = load_rows_table(rows_PN)
    fetch_sb = load_blocks_row(blocks, FETCH)
    store_sb = load_blocks_row(blocks, STORE)
    empty_sb = load_blocks_row(empty_E, 0)
    keep_PN = load_keep(blocks)
    input_gradient(
        dy_RD, gate_RF, up_RF, rows_sb, fetch_sb, w1_EFD, w2_EDF, w3_EFD,
        dx_RD, dgate_RF, dup_RF, act_RF, keep_weights,
    )  # fmt: skip
    if nl.num_programs(axes=0) > 1:
        nisa.core_barrier(dgate_RF, (0, 1))
        nisa.core_barrier(dup_RF, (0, 1))
        nisa.core_barrier(act_RF, (0, 1))
    first, last = columns_of_this_core(D)
    step = gradient_columns(D, F)
    for d in range(first, last, step):
        weight_gradients(
            dy_RD, x_RD, dgate_RF, dup_RF, act_RF, rows_sb, keep_PN, store_sb, empty_sb,
            dw1_EFD, dw2_EDF, dw3_EFD, d, min(step, last - d),
        )  # fmt: skip
    return dx_RD, dw1_EFD, dw2_EDF, dw3_EFD


def input_gradient(
    dy_RD, gate_RF, up_RF, rows_sb, fetch_sb, w1_EFD, w2_EDF, w3_EFD,
    dx_RD, dgate_RF, dup_RF, act_RF, keep_weights,
):  # fmt: skip
    """First pass of backward: dx, and in HBM what the second pass needs of each row."""
    D = dy_RD.shape[1]
    F = gate_RF.shape[1]
    dtype = dy_RD.dtype
    dy_tiles, gate_tiles, up_tiles = (
        fresh_pair(D, dtype),
        fresh_pair(F, dtype),
        fresh_pair(F, dtype),
    )
    w1_TJD, w2_TKF, w3_TJD = (
        weight_tiles(F, D, dtype),
        weight_tiles(D, F, dtype),
        weight_tiles(F, D, dtype),
    )
    first, last = blocks_of_this_core(rows_sb)
    for n in range(first, last):
        dy_PD, gate_PF, up_PF = dy_tiles[n % 2], gate_tiles[n % 2], up_tiles[n % 2]
        gather(dy_PD, dy_RD, rows_sb, n)
        gather(gate_PF, gate_RF, rows_sb, n)
        gather(up_PF, up_RF, rows_sb, n)
        if not keep_weights and n > first:  # a fresh set of tiles lets the next load start early
            w1_TJD, w2_TKF, w3_TJD = (
                weight_tiles(F, D, dtype),
                weight_tiles(D, F, dtype),
                weight_tiles(F, D, dtype),
            )
        expert = fetch_sb.ap(pattern=[[fetch_sb.shape[1], 1], [1, 1]], offset=n)
        fetch(w1_TJD, w1_EFD, expert)
        fetch(w2_TKF, w2_EDF, expert)
        fetch(w3_TJD, w3_EFD, expert)
        dyT_TKP = nl.ndarray((TILE, tiles(D), BLOCK), dtype=dtype, buffer=nl.sbuf)
        transpose(dyT_TKP, dy_PD, BLOCK, 0)
        act_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        dgate_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        dup_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        for f in range(0, F, COLUMNS):
            width = min(COLUMNS, F - f)
            dact_psum = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.psum)
            multiply(dact_psum, dyT_TKP, w2_TKF, D, f, width, True)
            swiglu_gradient(
                act_PF[:, f : f + width],
                dgate_PF[:, f : f + width],
                dup_PF[:, f : f + width],
                gate_PF[:, f : f + width],
                up_PF[:, f : f + width],
                dact_psum,
            )
        scatter(act_RF, act_PF, rows_sb, n)
        scatter(dgate_RF, dgate_PF, rows_sb, n)
        scatter(dup_RF, dup_PF, rows_sb, n)
        dgateT_TJP = nl.ndarray((TILE, tiles(F), BLOCK), dtype=dtype, buffer=nl.sbuf)
        dupT_TJP = nl.ndarray((TILE, tiles(F), BLOCK), dtype=dtype, buffer=nl.sbuf)
        transpose(dgateT_TJP, dgate_PF, BLOCK, 0)
        transpose(dupT_TJP, dup_PF, BLOCK, 0)
        dx_PD = nl.ndarray((BLOCK, D), dtype=dtype, buffer=nl.sbuf)
        for d in range(0, D, COLUMNS):
            width = min(COLUMNS, D - d)
            dx_psum = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.psum)
            multiply(dx_psum, dgateT_TJP, w1_TJD, F, d, width, True)
            multiply(dx_psum, dupT_TJP, w3_TJD, F, d, width, False)
            nisa.tensor_copy(dst=dx_PD[:, d : d + width], src=dx_psum)
        scatter(dx_RD, dx_PD, rows_sb, n)


def weight_gradients(
    dy_RD, x_RD, dgate_RF, dup_RF, act_RF, rows_sb, keep_PN, store_sb, empty_sb,
    dw1_EFD, dw2_EDF, dw3_EFD, d, width,
):  # fmt: skip
    """Second pass of backward, for columns d … d + width of D: dw1, dw3 and those rows of dw2.

    A block's share is a product over its 128 slots. Padding must add nothing: there dgate, dup
    and act are zero, and x and dy hold older rows, which are finite.
    """
    F = act_RF.shape[1]
    dtype = x_RD.dtype
    N = rows_sb.shape[1]
    x_tiles, dy_tiles = fresh_pair(width, dtype), fresh_pair(width, dtype)
    sum1_TJd = nl.ndarray((TILE, tiles(F), width), dtype=nl.float32, buffer=nl.sbuf)
    sum3_TJd = nl.ndarray((TILE, tiles(F), width), dtype=nl.float32, buffer=nl.sbuf)
    sum2_TkF = nl.ndarray((TILE, tiles(width), F), dtype=nl.float32, buffer=nl.sbuf)
    # A new expert starts from KEEP · old sum = 0 · old sum, so that even the first must be finite.
    nisa.memset(dst=sum1_TJd, value=0.0)
    nisa.memset(dst=sum3_TJd, value=0.0)
    nisa.memset(dst=sum2_TkF, value=0.0)
    for n in range(N):
        x_PD, dy_PD = x_tiles[n % 2], dy_tiles[n % 2]
        gather_columns(x_PD, x_RD, rows_sb, n, d)
        gather_columns(dy_PD, dy_RD, rows_sb, n, d)
        dgate_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        dup_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        act_PF = nl.ndarray((BLOCK, F), dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=dgate_PF, value=0.0)
        nisa.memset(dst=dup_PF, value=0.0)
        nisa.memset(dst=act_PF, value=0.0)
        gather(dgate_PF, dgate_RF, rows_sb, n)
        gather(dup_PF, dup_RF, rows_sb, n)
        gather(act_PF, act_RF, rows_sb, n)
        keep = keep_PN[:, n : n + 1]
        add_outer(sum1_TJd, dgate_PF, x_PD, F, width, keep)
        add_outer(sum3_TJd, dup_PF, x_PD, F, width, keep)
        add_outer(sum2_TkF, dy_PD, act_PF, width, F, keep)
        expert = store_sb.ap(pattern=[[N, 1], [1, 1]], offset=n)
        store_rows(dw1_EFD, sum1_TJd, expert, 0, F, d, width)
        store_rows(dw3_EFD, sum3_TJd, expert, 0, F, d, width)
        store_rows(dw2_EDF, sum2_TkF, expert, d, width, 0, F)
    zero_F = nl.ndarray((TILE, 1, F), dtype=dtype, buffer=nl.sbuf)
    zero_d = nl.ndarray((TILE, 1, width), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=zero_F, value=0.0)
    nisa.memset(dst=zero_d, value=0.0)
    for e in range(dw1_EFD.shape[0]):
        expert = empty_sb.ap(pattern=[[empty_sb.shape[1], 1], [1, 1]], offset=e)
        store_rows(dw1_EFD, zero_d, expert, 0, F, d, width)
        store_rows(dw3_EFD, zero_d, expert, 0, F, d, width)
        store_rows(dw2_EDF, zero_F, expert, d, width, 0, F)


# ------------------------------------------------------------------ tables and work per core
def tiles(size):
    """128-wide tiles that cover `size`; the last one may be narrower."""
    return (size + TILE - 1) // TILE


def gradient_columns(D, F):
    """Columns of D whose weight gradients fit into SBUF together, in float32."""
    a_tile = (2 * tiles(F) * TILE + F) * 4  # bytes a partition of 128 columns
    return max(1, RESIDENT_BYTES // a_tile) * TILE


def blocks_of_this_core(rows_PN):
    """Consecutive blocks, so that blocks of one expert stay together; the first and one past."""
    N = rows_PN.shape[1]
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    share = (N + cores - 1) // cores
    return min(N, core * share), min(N, (core + 1) * share)


def columns_of_this_core(D):
    """Columns of D whose weight gradients this core computes; whole tiles if there are enough."""
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    unit = TILE if cores * TILE <= D else ALIGN
    units = (D + unit - 1) // unit
    share = (units + cores - 1) // cores * unit
    return min(D, core * share), min(D, (core + 1) * share)


def load_rows_table(rows_PN):
    rows_sb = nl.ndarray(rows_PN.shape, dtype=rows_PN.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=rows_PN)
    return rows_sb


def load_blocks_row(table, row):
    """One row of an int32 table [_, N], on one partition."""
    N = table.shape[1]
    row_1N = nl.ndarray((1, N), dtype=table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=row_1N, src=table.ap(pattern=[[N, 1], [1, N]], offset=row * N))
    return row_1N


def load_keep(blocks):
    """KEEP as float32 on every partition: a scalar operand must be there for each of them."""
    N = blocks.shape[1]
    keep_PN = nl.ndarray((TILE, N), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=keep_PN, src=blocks.ap(pattern=[[0, TILE], [1, N]], offset=KEEP * N))
    return keep_PN


# ------------------------------------------------------------------ rows in and out
def fresh_pair(width, dtype):
    """Two row tiles, used in turn so that a gather overlaps the work on the block before.

    Zeroed once: slots of padding then hold zeros or rows of an earlier block, never garbage.
    """
    pair = (
        nl.ndarray((BLOCK, width), dtype=dtype, buffer=nl.sbuf),
        nl.ndarray((BLOCK, width), dtype=dtype, buffer=nl.sbuf),
    )
    nisa.memset(dst=pair[0], value=0.0)
    nisa.memset(dst=pair[1], value=0.0)
    return pair


def rows_of(tensor, rows_sb, n, column, width):
    """View [P, width] of HBM: for each slot of block n its row, from `column` on."""
    return tensor.ap(
        pattern=[[tensor.shape[1], BLOCK], [1, width]],
        offset=column,
        vector_offset=rows_sb.ap(pattern=[[rows_sb.shape[1], BLOCK], [1, 1]], offset=n),
    )


def gather(tile, tensor, rows_sb, n):
    gather_columns(tile, tensor, rows_sb, n, 0)


def gather_columns(tile, tensor, rows_sb, n, column):
    source = rows_of(tensor, rows_sb, n, column, tile.shape[1])
    nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)


def scatter(tensor, tile, rows_sb, n):
    target = rows_of(tensor, rows_sb, n, 0, tile.shape[1])
    nisa.dma_copy(dst=target, src=tile, oob_mode=nisa.oob_mode.skip)


# ------------------------------------------------------------------ weights
def weight_tiles(rows, width, dtype):
    """Room for a matrix [rows, width], its rows on partitions: [T, tiles of rows, width]."""
    return nl.ndarray((TILE, tiles(rows), width), dtype=dtype, buffer=nl.sbuf)


def weight_rows(weight, expert, row, count):
    """View [count, width] of HBM: rows of one expert, whose number is read on the device."""
    width = weight.shape[2]
    return weight.ap(pattern=[[width, count], [1, width]], offset=row * width, scalar_offset=expert)


def fetch(tile, weight, expert):
    """Load one expert's matrix; expert E is out of bounds and leaves the tile as it is."""
    rows = weight.shape[1]
    for t in range(tiles(rows)):
        count = min(TILE, rows - t * TILE)
        nisa.dma_copy(
            dst=tile[0:count, t],
            src=weight_rows(weight, expert, t * TILE, count),
            oob_mode=nisa.oob_mode.skip,
        )


def fetch_and_transpose(target, weight, expert, stored):
    """One expert's matrix [rows, width] as [T, tiles of width, rows].

    stored   tile that keeps it as stored, for the next block of the expert; None loads it always
    """
    rows, width = weight.shape[1], weight.shape[2]
    if stored != None:  # noqa: E711, NKI before 0.7 may reject `is`
        fetch(stored, weight, expert)
    for t in range(tiles(rows)):
        count = min(TILE, rows - t * TILE)
        if stored != None:  # noqa: E711
            strip = stored[0:count, t]
        else:
            strip = nl.ndarray((count, width), dtype=weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=strip, src=weight_rows(weight, expert, t * TILE, count))
        transpose(target, strip, count, t * TILE)


def fetch_transposed(target, weight, expert):
    """The same by DMA alone: columns of the matrix become partitions on the way in."""
    rows, width = weight.shape[1], weight.shape[2]
    for t in range(tiles(width)):
        count = min(TILE, width - t * TILE)
        nisa.dma_transpose(
            dst=target[0:count, t],
            src=weight.ap(
                pattern=[[width, rows], [1, count]], offset=t * TILE, scalar_offset=expert
            ),
            oob_mode=nisa.oob_mode.skip,
        )


def store_rows(weight, sums, expert, row, rows, column, width):
    """Write [rows, width] of one expert's matrix from [T, tiles, width], cast on the way.

    `sums` of one tile serve every tile of rows: that is how zeros are written.
    """
    _, _, stride = weight.shape
    for t in range(tiles(rows)):
        count = min(TILE, rows - t * TILE)
        target = weight.ap(
            pattern=[[stride, count], [1, width]],
            offset=(row + t * TILE) * stride + column,
            scalar_offset=expert,
        )
        source = sums[0:count, min(t, sums.shape[1] - 1)]
        nisa.dma_copy(dst=target, src=source, oob_mode=nisa.oob_mode.skip)


# ------------------------------------------------------------------ arithmetic
def transpose(target, tile, rows, column):
    """Write a tile [rows, width] into target [T, tiles of width, …] at `column`, transposed.

    As many 128 × 128 pieces as one PSUM bank holds leave it with one copy.
    """
    width = tile.shape[1]
    group = BANK_BYTES // (TILE * (4 if tile.dtype == nl.float32 else 2))
    for first in range(0, tiles(width), group):
        here = min(group, tiles(width) - first)
        pieces_TGr = nl.ndarray((TILE, here, rows), dtype=tile.dtype, buffer=nl.psum)
        for g in range(here):
            start = (first + g) * TILE
            count = min(TILE, width - start)
            nisa.nc_transpose(dst=pieces_TGr[0:count, g], data=tile[:, start : start + count])
        whole = min(here, width // TILE - first)  # a narrower last piece is copied by itself
        if whole > 0:
            nisa.tensor_copy(
                dst=target[:, first : first + whole, column : column + rows],
                src=pieces_TGr[:, 0:whole],
            )
        if whole < here:
            count = width % TILE
            nisa.tensor_copy(
                dst=target[0:count, first + whole, column : column + rows],
                src=pieces_TGr[0:count, whole],
            )


def multiply(psum, left_TKM, right_TKN, contraction, column, width, starts):
    """psum [M, width] (+)= leftᵀ · right[:, column …], contracted over tiles of 128.

    starts   the first product overwrites psum; otherwise it adds to what is there
    """
    for k in range(tiles(contraction)):
        count = min(TILE, contraction - k * TILE)
        nisa.nc_matmul(
            dst=psum,
            stationary=left_TKM[0:count, k],
            moving=right_TKN[0:count, k, column : column + width],
            accumulate=not (starts and k == 0),
        )


def gate_and_up(gate_PF, up_PF, act_PF, xT_TKP, w1T_TKF, w3T_TKF, D, f, width):
    """Columns f … f + width of gate, up and silu(gate) · up."""
    gate_psum = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.psum)
    up_psum = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.psum)
    for k in range(tiles(D)):  # side by side: the rows are loaded into the array once for both
        count = min(TILE, D - k * TILE)
        xT = xT_TKP[0:count, k]
        w1T, w3T = w1T_TKF[0:count, k, f : f + width], w3T_TKF[0:count, k, f : f + width]
        nisa.nc_matmul(dst=gate_psum, stationary=xT, moving=w1T, accumulate=k > 0)
        nisa.nc_matmul(dst=up_psum, stationary=xT, moving=w3T, accumulate=k > 0)
    silu = nl.ndarray((BLOCK, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=silu, op=nl.silu, data=gate_psum)
    nisa.tensor_tensor(dst=act_PF[:, f : f + width], data1=silu, data2=up_psum, op=nl.multiply)
    nisa.tensor_copy(dst=gate_PF[:, f : f + width], src=gate_psum)
    nisa.tensor_copy(dst=up_PF[:, f : f + width], src=up_psum)


def swiglu_gradient(act, dgate, dup, gate, up, dact):
    """act = silu(gate)·up again, and from its gradient (PSUM, float32) those of gate and up."""
    silu = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    slope = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=silu, op=nl.silu, data=gate)
    nisa.activation(dst=slope, op=nl.silu_dx, data=gate)
    nisa.tensor_tensor(dst=act, data1=silu, data2=up, op=nl.multiply)
    nisa.tensor_tensor(dst=dup, data1=silu, data2=dact, op=nl.multiply)
    nisa.tensor_tensor(dst=slope, data1=slope, data2=up, op=nl.multiply)
    nisa.tensor_tensor(dst=dgate, data1=slope, data2=dact, op=nl.multiply)


def add_outer(sums, left_PM, right_PN, rows, width, keep):
    """sums [T, tiles of rows, width] = keep · sums + leftᵀ · right, contracted over the slots."""
    for t in range(tiles(rows)):
        count = min(TILE, rows - t * TILE)
        for c in range(0, width, COLUMNS):
            here = min(COLUMNS, width - c)
            psum = nl.ndarray((count, here), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=psum,
                stationary=left_PM[:, t * TILE : t * TILE + count],
                moving=right_PN[:, c : c + here],
            )
            nisa.scalar_tensor_tensor(
                dst=sums[0:count, t, c : c + here],
                data=sums[0:count, t, c : c + here],
                op0=nl.multiply,
                operand0=keep[0:count],
                op1=nl.add,
                operand1=psum,
            )
