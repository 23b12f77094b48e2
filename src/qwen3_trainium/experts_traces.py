"""What the expert kernels would ask of a NeuronCore at given sizes, without computing it.

Traces need shapes and the routing alone, so the published widths take seconds on a laptop.
"""

import torch

import nki_sim
from nki_sim import arch
from nki_sim.tracing import Trace
from qwen3_trainium import kernel_backend
from qwen3_trainium.kernels.grouped_experts import (
    grouped_experts_backward_kernel,
    grouped_experts_kernel,
)
from qwen3_trainium.ops.grouped_experts import block_tables


def routed(rows: int, experts: int) -> torch.Tensor:
    """Rows of each expert as a router that is not balanced might send them; int [E]."""
    g = torch.Generator().manual_seed(1)
    shares = torch.softmax(0.7 * torch.randn(experts, generator=g), 0)
    return torch.bincount(torch.multinomial(shares, rows, True, generator=g), minlength=experts)


def _empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(
    counts, D, F, *, cores=1, keep_weights=True, transpose_by_dma=False, dtype=torch.bfloat16
) -> Trace:
    """Trace of the forward kernel for a routing; no value is computed."""
    R, E = int(counts.sum()), len(counts)
    rows, blocks, _ = block_tables(counts, R, cores, keep_weights)
    weights = [_empty(*shape, dtype=dtype) for shape in ((E, F, D), (E, D, F), (E, F, D))]
    with nki_sim.trace(shapes_only=True) as trace:
        kernel_backend.simulated(grouped_experts_kernel[cores])(
            _empty(R, D, dtype=dtype),
            rows,
            blocks,
            *weights,
            keep_weights=keep_weights,
            transpose_by_dma=transpose_by_dma,
        )
    return trace


def backward(counts, D, F, *, cores=1, keep_weights=True, dtype=torch.bfloat16) -> Trace:
    """Trace of the backward kernel for a routing; no value is computed."""
    R, E = int(counts.sum()), len(counts)
    rows, blocks, empty = block_tables(counts, R, cores, keep_weights)
    weights = [_empty(*shape, dtype=dtype) for shape in ((E, F, D), (E, D, F), (E, F, D))]
    with nki_sim.trace(shapes_only=True) as trace:
        kernel_backend.simulated(grouped_experts_backward_kernel[cores])(
            *(_empty(R, width, dtype=dtype) for width in (D, D, F, F)),
            rows,
            blocks,
            empty,
            *weights,
            keep_weights=keep_weights,
        )
    return trace


def minimum(counts, D: int, F: int, itemsize: int = 2) -> dict[str, int]:
    """Least HBM bytes of each direction, whatever the program.

    forward    every row in and out once, the three matrices of every *used* expert in once
    backward   x, dy, gate and up in, dx out, used experts' matrices in, all experts' gradients out
    """
    R, E, used = int(counts.sum()), len(counts), int((counts > 0).sum())
    expert = 3 * D * F
    return {
        "forward": (2 * R * D + used * expert) * itemsize,
        "backward": (3 * R * D + 2 * R * F + (used + E) * expert) * itemsize,
    }


def figures(trace: Trace, least: int) -> dict[str, float]:
    """One row of a table: traffic, use of the array, peak memory."""
    return {
        "HBM MB": trace.hbm_bytes() / 1e6,
        "HBM / minimum": trace.hbm_bytes() / least,
        "array, matmuls": trace.array_utilization(),
        "array, with transposes": trace.array_utilization(transposes=True),
        "SBUF": trace.peak_sbuf / arch.SBUF_BYTES,
        "PSUM": trace.peak_psum / (arch.PSUM_BANKS * arch.PSUM_BANK_BYTES),
    }
