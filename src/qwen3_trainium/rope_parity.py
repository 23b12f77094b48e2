"""Is the rotary kernel right? Forward and backward against two programs that know nothing of it.

    python -m qwen3_trainium.rope_parity DEVICE

prints one JSON line a case, and ends with an error when any difference is not 0.0.

In float32 the kernel multiplies and adds the same pairs in the same order as PyTorch does, so the
difference must be 0.0: a product is rounded once, a sum once, and −sin·x is exact. In bfloat16
the kernel keeps float32 until its one rounding, and so does the reference.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from qwen3_trainium import cpu


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape. `rows` says where a position's cosines come from, `restarts` where documents do.

    rows   "shared": row s of one cache; "each": a cache for each sequence; "positions": the row
           that a position names
    """

    B: int
    Hq: int
    Hk: int
    S: int
    D: int
    lnc: int
    rows: str = "positions"
    dtype: torch.dtype = torch.float32
    heads_first: bool = False  # q and k lie in memory as [B, H, S, D]

    def __str__(self) -> str:
        layout = "[B, H, S, D]" if self.heads_first else "[B, S, H, D]"
        return (
            f"B {self.B}, heads {self.Hq}/{self.Hk}, S {self.S}, D {self.D}, LNC {self.lnc}, "
            f"{self.rows}, {str(self.dtype).removeprefix('torch.')}, {layout}"
        )


# Sizes that differ pairwise, heads from 1 to 32 on 1 to 8, both layouts, each kind of cache.
CASES = (
    Case(1, 32, 8, 256, 128, 2),
    Case(2, 8, 2, 256, 64, 1, "shared"),
    Case(3, 4, 1, 128, 64, 1),
    Case(2, 3, 3, 512, 64, 2, "each"),
    Case(1, 1, 1, 2048, 128, 2, "shared"),
    Case(1, 16, 4, 1024, 64, 2, heads_first=True),
    Case(2, 5, 1, 384, 128, 1, "each", heads_first=True),
    Case(1, 32, 8, 256, 128, 2, dtype=torch.bfloat16),
    Case(2, 6, 2, 512, 64, 1, dtype=torch.bfloat16, heads_first=True),
)


def angles(rows: int, D: int, theta: float = 5e6) -> Tensor:
    """torchtitan's cosines and sines for Qwen3-4B-Instruct-2507's base: float32 [rows, 2D]."""
    from torchtitan.models.common.rope import CosSinRoPE

    return CosSinRoPE.Config(dim=D, max_seq_len=rows, theta=theta).build().cache


def documents(B: int, S: int, seed: int) -> Tensor:
    """Positions of packed documents, int64 [B, S]: each restarts at 0, each row elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(B):
        cuts = torch.randint(1, S, (3,), generator=generator).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, S], strict=True)]
        rows.append(torch.cat([torch.arange(length) for length in lengths]))
    return torch.stack(rows)


def expression(x_BSHD: Tensor, cos_sin: Tensor) -> Tensor:
    """x·cos + rotate_half(x)·sin in plain PyTorch, whose gradient autograd derives."""
    cos, sin = cos_sin[..., None, :].chunk(2, -1)
    wide = x_BSHD.float()  # once, so that its gradient is summed in float32 and rounded once
    first, second = wide.chunk(2, -1)
    return wide * cos + torch.cat((-second, first), -1) * sin


def transformers(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation of Transformers' Qwen3, on its layout, cos and sin of [B, S, D]."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    cos, sin = cos_sin.chunk(2, -1)
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    turned = apply_rotary_pos_emb(q.float().transpose(1, 2), k.float().transpose(1, 2), cos, sin)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def differences(case: Case, device: str = "cpu", implementation: str = "own") -> dict[str, float]:
    """Largest absolute differences of one case, in float64.

    forward, backward         of q and k, and of their gradients, from `expression` and autograd
    forward_hf, backward_hf   the same from `transformers` and autograd
    `math.inf` where a result is not finite, or is one value everywhere: a kernel that did nothing.
    """
    from qwen3_trainium import kernel_backend
    from qwen3_trainium.ops import rope

    inputs, cache, positions, gradients = _inputs(case)
    rows = cache[positions] if positions is not None else cache[..., : case.S, :]
    there = [x.to(device).requires_grad_() for x in inputs]
    places = None if positions is None else positions.to(device)
    with kernel_backend.as_if_lnc(case.lnc):
        out = rope(*there, cache.to(device), places, implementation=implementation)
        got = torch.autograd.grad(out, there, [g.to(device) for g in gradients])

    found = {}
    for suffix, rotated in (("", _expressions), ("_hf", transformers)):
        here = [x.clone().requires_grad_() for x in inputs]
        expected = [x.to(case.dtype) for x in rotated(*here, rows)]
        found["forward" + suffix] = _largest(out, expected)
        found["backward" + suffix] = _largest(got, torch.autograd.grad(expected, here, gradients))
    return found


def _expressions(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return expression(q, cos_sin), expression(k, cos_sin)


def _inputs(case: Case):
    generator = torch.Generator().manual_seed(case.S + case.Hq)

    def random(H: int) -> Tensor:
        shape = (case.B, H, case.S, case.D) if case.heads_first else (case.B, case.S, H, case.D)
        x = torch.randn(shape, generator=generator).to(case.dtype)
        return x.transpose(1, 2) if case.heads_first else x

    inputs, gradients = ([random(H) for H in (case.Hq, case.Hk)] for _ in range(2))
    cache = angles(case.S + 64, case.D)
    if case.rows == "each":  # each sequence begins elsewhere
        cache = torch.stack([cache.roll(-7 * b, 0) for b in range(case.B)])
    positions = documents(case.B, case.S, seed=1) if case.rows == "positions" else None
    return inputs, cache, positions, gradients


def _largest(ours, theirs) -> float:
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a = a.cpu().double()
        if not a.isfinite().all() or a.min() == a.max():
            return math.inf
        largest = max(largest, (a - b).abs().max().item())
    return largest


def table(device: str = "cpu", cases=CASES) -> Iterator[dict]:
    """One row a case, ready for a data frame; on a NeuronCore those of the runtime's own LNC."""
    from qwen3_trainium import kernel_backend

    for case in cases:
        if device != "neuron" or case.lnc == kernel_backend.lnc():
            yield {"case": str(case), **differences(case, device)}


def main(device: str, cases=CASES) -> str:
    """Print the table as JSON lines; returns what is wrong in one sentence a fault, or nothing."""
    from qwen3_trainium import kernel_backend

    faults, ran = [], 0
    for row in table(device, cases):
        ran += 1
        print(json.dumps(row), flush=True)
        wrong = {name: value for name, value in row.items() if name != "case" and value != 0}
        if wrong:
            faults.append(f"{row['case']}: the difference is not 0.0 but {wrong}")
    if not ran:
        faults.append(f"no case is for LNC {kernel_backend.lnc()}")
    places = set(kernel_backend.ran().values())
    if device == "neuron" and places - {"neuron"}:
        faults.append(f"not all ran on neuron, but on {', '.join(sorted(places))}")
    return "\n".join(faults)


def in_a_process(device: str, module: str = "rope_parity") -> tuple[list[dict], str]:
    """The table and the faults of `main` in a process of its own: this one may hold no NeuronCore.

    module   of this package, with a `main` that prints and returns what the one here does
    Where that process fails before it is done, its last words are the fault.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"qwen3_trainium.{module}", device],
        capture_output=True,
        text=True,
        env=cpu.with_accelerators(os.environ),
    )
    # A compiler may write to the output too.
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if not done.returncode:
        return rows, ""
    return rows, done.stderr.strip()[-500:] or f"exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu") or 0)
