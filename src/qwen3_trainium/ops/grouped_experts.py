"""The experts of a mixture-of-experts layer as PyTorch operators over the blockwise kernels.

`grouped_experts` is what a model calls. Below it are two registered operators,
`qwen3_trainium::grouped_experts` and `::grouped_experts_backward`. They return new tensors and
change no argument. Forward keeps its inputs and the gate and up projections, [R, F] each, for
backward. Which rows go to which expert is data, not shape: a compiled model is not compiled again
when the routing changes.

Shape suffixes: R routed rows sorted by expert, E experts, D model dimension, F expert width,
P slots of a block, N blocks.
"""

import torch
from torch.nn import functional

from qwen3_trainium import kernel_backend
from qwen3_trainium.kernels.grouped_experts import (
    BLOCK,
    block_count,
    check_experts,
    grouped_experts_backward_kernel,
    grouped_experts_kernel,
    resident,
)


def grouped_experts(
    x_RD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    *,
    transpose_by_dma: bool = False,
) -> torch.Tensor:
    """w2·(silu(w1·x) · w3·x) of each row with its expert's weights; differentiable in all but one.

    x_RD                      rows sorted by expert: the first num_tokens_per_expert_E[0] rows are
                              expert 0's, and so on; float32 or bfloat16, any strides
    num_tokens_per_expert_E   integers that sum to R; no gradient
    w1_EFD, w2_EDF, w3_EFD    of x's dtype; torchtitan's layout
    transpose_by_dma          see `kernels.grouped_experts`; bfloat16 only, not verified
    Returns a new contiguous [R, D] of x's dtype. Sums are float32; gate, up, their product and y
    are each rounded once to x's dtype, and so are the gradients.
    Raises ValueError, in one sentence, for inputs that the kernels cannot take.
    """
    check(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, transpose_by_dma)
    return _experts(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, transpose_by_dma)[0]


def check(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, transpose_by_dma=False) -> None:
    """Raise ValueError, in one sentence, for what `grouped_experts` cannot take."""
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (x_RD, w1_EFD, w2_EDF, w3_EFD)]
    if x_RD.dtype == torch.float64 and kernel_backend.backend(x_RD) == kernel_backend.REFERENCE:
        # The reference serves float64 as well, for numerical tests of the derivative.
        dtypes = [name.replace("float64", "float32") for name in dtypes]
    check_experts(
        x_RD.shape,
        num_tokens_per_expert_E.shape,
        w1_EFD.shape,
        w2_EDF.shape,
        w3_EFD.shape,
        dtypes,
    )
    counts = num_tokens_per_expert_E
    if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype == torch.bool:
        raise ValueError(f"num_tokens_per_expert must be integers, got {counts.dtype}")
    if transpose_by_dma and x_RD.element_size() != 2:
        raise ValueError(
            f"transpose_by_dma moves 2-byte elements, got {x_RD.dtype}: use bfloat16 or leave it"
        )


def block_tables(
    num_tokens_per_expert_E: torch.Tensor, R: int, cores: int, keep_weights: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernels' tables of a routing: rows_PN, blocks [3, N] and empty [1, E], all int32.

    cores          the kernel's; each begins with a load, whatever the core before it holds
    keep_weights   a block of the same expert as the one before it loads nothing
    No value leaves the device: shapes follow from R and E alone, and no operation here is one that
    TorchNeuron has to hand to the CPU (as it does `searchsorted`, by the source that we know).
    """
    counts_E = num_tokens_per_expert_E.long()
    device, E = counts_E.device, counts_E.shape[0]
    N = block_count(R, E)
    n_N = torch.arange(N, device=device)
    end_E = torch.cumsum((counts_E + BLOCK - 1) // BLOCK, 0)  # one past an expert's last block
    # Blocks past the last used one get E, an expert that does not exist, and no rows.
    expert_N = (end_E[:, None] <= n_N).sum(0)
    used_N = expert_N.clamp(max=E - 1)
    slots_E = (counts_E + BLOCK - 1) // BLOCK * BLOCK
    first_slot_N = (torch.cumsum(slots_E, 0) - slots_E)[used_N]
    slot_PN = torch.arange(BLOCK, device=device)[:, None] + n_N * BLOCK - first_slot_N
    row_PN = (torch.cumsum(counts_E, 0) - counts_E)[used_N] + slot_PN
    row_PN = torch.where((slot_PN < counts_E[used_N]) & (expert_N < E), row_PN, R)

    as_before_N = expert_N == torch.roll(expert_N, 1)
    as_before_N &= n_N > 0
    is_last_N = expert_N != torch.roll(expert_N, -1)
    is_last_N |= n_N == N - 1
    first_of_core_N = n_N % -(-N // cores) == 0 if N else n_N
    if keep_weights:
        fetch_N = torch.where(first_of_core_N, used_N, torch.where(as_before_N, E, expert_N))
    else:
        fetch_N = used_N
    store_N = torch.where(is_last_N, expert_N, E)
    blocks = torch.stack((fetch_N, as_before_N.long(), store_N))
    empty_E = torch.where(counts_E == 0, torch.arange(E, device=device), E)
    return row_PN.int(), blocks.int(), empty_E[None].int()


# ------------------------------------------------------------------ reference
def reference_forward(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD):
    """(y, gate, up) as the kernel computes them, one expert after the other, in PyTorch.

    float32 inside (float64 for float64), each result rounded once to x's dtype. For the CPU: it
    reads the counts, and each number of rows is a shape of its own, which a NeuronCore would
    compile.
    """
    F = w1_EFD.shape[1]
    y_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    gate_RF, up_RF = x_RD.new_empty(x_RD.shape[0], F), x_RD.new_empty(x_RD.shape[0], F)
    for e, rows in _rows_of_experts(num_tokens_per_expert_E):
        x, w1, w2, w3 = (_wide(t) for t in (x_RD[rows], w1_EFD[e], w2_EDF[e], w3_EFD[e]))
        gate, up = x @ w1.T, x @ w3.T
        act = (functional.silu(gate) * up).to(x_RD.dtype)
        gate_RF[rows], up_RF[rows] = gate.to(x_RD.dtype), up.to(x_RD.dtype)
        y_RD[rows] = (_wide(act) @ w2.T).to(x_RD.dtype)
    return y_RD, gate_RF, up_RF


def reference_backward(
    dy_RD, x_RD, gate_RF, up_RF, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD
):
    """(dx, dw1, dw2, dw3) as the kernel computes them: the derivative written out."""
    dtype = x_RD.dtype
    dx_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    dw1, dw2, dw3 = (torch.zeros_like(w) for w in (w1_EFD, w2_EDF, w3_EFD))
    for e, rows in _rows_of_experts(num_tokens_per_expert_E):
        dy, x, gate, up = (_wide(t[rows]) for t in (dy_RD, x_RD, gate_RF, up_RF))
        w1, w2, w3 = (_wide(w[e]) for w in (w1_EFD, w2_EDF, w3_EFD))
        sigmoid = torch.sigmoid(gate)
        silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
        dact = dy @ w2
        act, dup, dgate = (_wide(t.to(dtype)) for t in (silu * up, dact * silu, dact * up * slope))
        dx_RD[rows] = (dgate @ w1 + dup @ w3).to(dtype)
        dw1[e], dw2[e], dw3[e] = (
            (dgate.T @ x).to(dtype),
            (dy.T @ act).to(dtype),
            (dup.T @ x).to(dtype),
        )
    return dx_RD, dw1, dw2, dw3


def _rows_of_experts(num_tokens_per_expert_E):
    """(expert, slice of its rows) for each expert that has any."""
    end = 0
    for e, count in enumerate(num_tokens_per_expert_E.tolist()):
        if count:
            yield e, slice(end, end + count)
        end += count


def _wide(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


# ------------------------------------------------------------------ operators
def _fake_forward(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, transpose_by_dma=False):
    R, F = x_RD.shape[0], w1_EFD.shape[1]
    y_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    return y_RD, x_RD.new_empty(R, F), x_RD.new_empty(R, F)


@kernel_backend.operator("qwen3_trainium::grouped_experts", _fake_forward)
def _experts(
    x_RD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    transpose_by_dma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    R, (F, D) = x_RD.shape[0], w1_EFD.shape[1:]
    if R == 0:  # no row, no block, nothing to launch
        return x_RD.new_empty(0, D), x_RD.new_empty(0, F), x_RD.new_empty(0, F)
    _require_all_rows(num_tokens_per_expert_E, R)
    counts_E = num_tokens_per_expert_E
    keep = transpose_by_dma or resident(D, F, x_RD.element_size())
    rows_PN, blocks, _ = block_tables(counts_E, R, kernel_backend.lnc(), keep)

    def reference(x_RD, rows_PN, blocks, w1_EFD, w2_EDF, w3_EFD, **constants):
        return reference_forward(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD)

    return tuple(
        kernel_backend.run(
            grouped_experts_kernel,
            x_RD.contiguous(),
            rows_PN,
            blocks,
            w1_EFD.contiguous(),
            w2_EDF.contiguous(),
            w3_EFD.contiguous(),
            reference=reference,
            keep_weights=keep,
            transpose_by_dma=transpose_by_dma,
        )
    )


def _fake_backward(dy_RD, x_RD, gate_RF, up_RF, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD):
    tensors = (x_RD, w1_EFD, w2_EDF, w3_EFD)
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


@kernel_backend.operator("qwen3_trainium::grouped_experts_backward", _fake_backward)
def _experts_backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    gate_RF: torch.Tensor,
    up_RF: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (w1_EFD, w2_EDF, w3_EFD)
    R, (F, D) = x_RD.shape[0], w1_EFD.shape[1:]
    if R == 0:
        zeros = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in weights]
        return x_RD.new_empty(0, D), *zeros
    counts_E = num_tokens_per_expert_E
    # Backward needs the weights as they are stored only: half of what forward keeps.
    keep = resident(D, F, x_RD.element_size() // 2)
    rows_PN, blocks, empty = block_tables(counts_E, R, kernel_backend.lnc(), keep)

    def reference(dy_RD, x_RD, gate_RF, up_RF, rows_PN, blocks, empty, *weights, **constants):
        return reference_backward(dy_RD, x_RD, gate_RF, up_RF, counts_E, *weights)

    return tuple(
        kernel_backend.run(
            grouped_experts_backward_kernel,
            dy_RD.contiguous(),
            x_RD.contiguous(),
            gate_RF.contiguous(),
            up_RF.contiguous(),
            rows_PN,
            blocks,
            empty,
            *(w.contiguous() for w in weights),
            reference=reference,
            keep_weights=keep,
        )
    )


def _require_all_rows(num_tokens_per_expert_E, R):
    """Where values can be read without waiting for a device, see that every row has an expert."""
    if num_tokens_per_expert_E.device.type != "cpu":
        return
    total = int(num_tokens_per_expert_E.sum())
    if total != R:
        raise ValueError(
            f"num_tokens_per_expert sums to {total}, but x has {R} rows: every row needs an expert"
        )


def _setup_context(ctx, inputs, output):
    x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD, _ = inputs
    _, gate_RF, up_RF = output
    ctx.mark_non_differentiable(gate_RF, up_RF)
    ctx.save_for_backward(x_RD, gate_RF, up_RF, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD)


def _differentiate(ctx, dy_RD, _dgate, _dup):
    dx_RD, dw1_EFD, dw2_EDF, dw3_EFD = _experts_backward(dy_RD, *ctx.saved_tensors)
    return dx_RD, None, dw1_EFD, dw2_EDF, dw3_EFD, None


_experts.register_autograd(_differentiate, setup_context=_setup_context)
