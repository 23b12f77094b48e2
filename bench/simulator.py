"""Speed of the simulator against its two targets; exits with 1 if one is missed.

    python bench/simulator.py

1. Overhead of one instruction: a [128, 512] float32 tensor_tensor, at most 30 µs above numpy's
   own time for the same addition.
2. The rope kernel on q [1, 32, 2048, 128], k [1, 8, 2048, 128] float32: at most 8 times the time
   of the PyTorch reference in the same run.

Both compare medians of measurements that alternate, so that a busy machine slows both sides.
"""

import statistics
import sys
import time

import nki_sim

nki_sim.install()

import nki.isa as nisa  # noqa: E402  (after install)
import nki.language as nl  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from qwen3_trainium.kernels.rope import rope_kernel  # noqa: E402

OVERHEAD_US = 30
ROPE_TIMES = 8


def seconds(call, repeat=1):
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def medians(first, second, rounds, repeat=1):
    """Median seconds of two calls, measured in turn."""
    pairs = [(seconds(first, repeat), seconds(second, repeat)) for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def overhead():
    """(instruction, numpy): seconds of one 128 × 512 float32 addition."""
    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    out = np.empty_like(x)
    result = []

    def kernel(x_HBM):
        a, dst = nl.load(x_HBM), nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
        result.extend(medians(
            lambda: nisa.tensor_tensor(dst=dst, data1=a, data2=a, op=nl.add),
            lambda: np.add(x, x, out=out),
            rounds=50, repeat=50,
        ))  # fmt: skip

    nki_sim.simulate(kernel)(x)
    return result


def rope():
    """(kernel, reference): seconds of one forward rotation."""
    B, Hq, Hk, S, D = 1, 32, 8, 2048, 128
    q, k = torch.randn(B, Hq, S, D), torch.randn(B, Hk, S, D)
    angle = torch.arange(S)[:, None] * 1e6 ** (-torch.arange(D // 2) / (D // 2))[None]
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos(), angle.sin()
    cache = torch.cat((cos, sin), -1)

    def reference():
        for x in (q, k):
            x1, x2 = x[..., : D // 2], x[..., D // 2 :]
            x * cos + torch.cat((-x2, x1), -1) * sin

    return medians(lambda: rope_kernel(q, k, cache), reference, rounds=7)


def main():
    import warnings

    warnings.simplefilter("ignore", nki_sim.LintWarning)
    instruction, plain = (1e6 * s for s in overhead())
    kernel, reference = rope()
    above, ratio = instruction - plain, kernel / reference
    print(f"tensor_tensor [128, 512] float32: {instruction:.1f} µs, numpy {plain:.1f} µs, "
          f"overhead {above:.1f} µs (target ≤ {OVERHEAD_US})")  # fmt: skip
    print(f"rope kernel: {kernel * 1e3:.0f} ms, PyTorch reference {reference * 1e3:.0f} ms, "
          f"ratio {ratio:.2f} (target ≤ {ROPE_TIMES})")  # fmt: skip
    return above <= OVERHEAD_US and ratio <= ROPE_TIMES


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
