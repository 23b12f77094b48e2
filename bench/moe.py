"""The expert kernels under the simulator against their PyTorch reference, in the same run.

    python bench/moe.py

A ratio above its limit exits with 1. The simulator interprets every instruction in Python, so its
cost is that of the number of blocks at small widths and that of numpy's matrix products at large
ones. Neither number says anything about a NeuronCore.
"""

import os
import statistics
import sys
import time
from pathlib import Path

# nki_sim.py in this folder has the name of a package: Python must not find it here.
sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread on both sides, as a rank of two has

import torch  # noqa: E402

from qwen3_trainium import kernel_backend  # noqa: E402
from qwen3_trainium.ops import grouped_experts  # noqa: E402

# name: (R, D, F, E, highest ratio, rounds)
CASES = {
    "the lesson's widths": (1024, 64, 48, 64, 60, 5),
    "a quarter of the published widths": (1024, 512, 192, 64, 40, 3),
}


def step_seconds(R, D, F, E, seed=0):
    """Seconds of forward and backward, float32, rows spread unevenly over the experts."""
    g = torch.Generator().manual_seed(seed)
    shares = torch.softmax(torch.randn(E, generator=g), 0)
    counts = torch.bincount(torch.multinomial(shares, R, True, generator=g), minlength=E)
    x = torch.randn(R, D, generator=g, requires_grad=True)
    weights = [
        (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).requires_grad_()
        for shape in ((E, F, D), (E, D, F), (E, F, D))
    ]
    start = time.perf_counter()
    grouped_experts(x, counts, *weights).sum().backward()
    return time.perf_counter() - start


def main():
    failed = False
    for name, (R, D, F, E, limit, rounds) in CASES.items():
        pairs = []
        for _ in range(rounds + 1):  # the first warms up
            os.environ.pop(kernel_backend.VARIABLE, None)
            simulated = step_seconds(R, D, F, E)
            os.environ[kernel_backend.VARIABLE] = kernel_backend.REFERENCE
            pairs.append((simulated, step_seconds(R, D, F, E)))
        simulated, reference = (
            statistics.median(column) for column in zip(*pairs[1:], strict=True)
        )
        ratio = simulated / reference
        failed |= ratio > limit
        print(
            f"{name}: R {R}, dim {D}, width {F}, {E} experts, forward and backward\n"
            f"  simulator {simulated * 1e3:.0f} ms, PyTorch reference {reference * 1e3:.1f} ms, "
            f"ratio {ratio:.1f} (limit {limit}){'  MISSED' if ratio > limit else ''}"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
