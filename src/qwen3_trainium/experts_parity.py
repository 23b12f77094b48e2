"""Are the expert kernels right? Forward and every gradient against a loop over experts in float32.

    python -m qwen3_trainium.experts_parity DEVICE

prints one JSON line a case, and ends with an error when an element of a result is further from the
loop's than its bound allows (`experts_bounds`), is not finite, or when a result is all zeros.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One routing at one size; `counts` are the rows of each expert."""

    name: str
    counts: tuple[int, ...]
    D: int
    F: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {sum(self.counts)} rows, dim {self.D}, width {self.F}, {dtype}"


ROUTINGS = {  # rows of each expert, D, F; D ≠ F, so that no transposed matrix fits
    "uniform": ((32,) * 8, 48, 32),
    "one expert takes all": ((0, 0, 300, 0), 48, 32),
    "most are empty": ((0, 0, 5, 0, 0, 0, 0, 131, 0, 0), 48, 32),
    "no row at all": ((0, 0, 0), 48, 32),
    "64 experts": (tuple((7 * e) % 13 for e in range(64)), 32, 16),
    "128 experts": (tuple((5 * e) % 9 for e in range(128)), 32, 16),
    "several tiles and a rest": ((3, 0, 200, 17), 272, 144),
}
CASES = tuple(
    Case(name, *routing, dtype)
    for name, routing in ROUTINGS.items()
    for dtype in (torch.float32, torch.bfloat16)
)
# Each shape is a compilation, so a device gets few; the last is a layer of the instance's model.
DEVICE_CASES = (
    *(case for case in CASES if case.name == "several tiles and a rest"),
    *(case for case in CASES if case.name == "most are empty"),
    Case("as published", (128, 0, 300, 84) * 16, 2048, 768, torch.bfloat16),
)


def compared(case: Case, device: str = "cpu") -> dict[str, dict[str, float]]:
    """y and every gradient beside the loop's; what `experts_bounds.compare` says of each.

    A result that is zero everywhere although rows were given has an infinite ratio.
    """
    from qwen3_trainium import experts_bounds
    from qwen3_trainium.ops import grouped_experts

    g = torch.Generator().manual_seed(0)
    counts, (E, R) = torch.tensor(case.counts), (len(case.counts), sum(case.counts))
    x, dy = (torch.randn(R, case.D, generator=g).to(case.dtype) for _ in range(2))
    shapes = ((E, case.F, case.D), (E, case.D, case.F), (E, case.F, case.D))
    weights = [(torch.randn(*s, generator=g) / s[-1] ** 0.5).to(case.dtype) for s in shapes]

    def there(x, counts, *weights):
        return grouped_experts(*(t.to(device) for t in (x, counts, *weights))).cpu()

    ours = experts_bounds.results(there, x, counts, weights, dy)
    wide = [w.float() for w in weights]
    theirs = experts_bounds.results(experts_bounds.loop, x.float(), counts, wide, dy.float())
    allowed = experts_bounds.bounds(x, counts, weights, dy, case.dtype)
    found = experts_bounds.compare(ours, theirs, allowed)
    for name, result in ours.items():
        if R and not result.any():
            found[name]["largest ratio"] = float("inf")
    return found


def table(device: str = "cpu", cases=DEVICE_CASES) -> Iterator[dict]:
    """One row a case: for y and each gradient the worst element in units of its bound."""
    for case in cases:
        found = compared(case, device)
        yield {"case": str(case), **{name: entry["largest ratio"] for name, entry in found.items()}}


def main(device: str, cases=DEVICE_CASES) -> str:
    """Print the table as JSON lines; returns what is wrong in one sentence a fault, or nothing."""
    from qwen3_trainium import kernel_backend

    faults = []
    for row in table(device, cases):
        print(json.dumps(row), flush=True)
        wrong = {name: value for name, value in row.items() if name != "case" and not value <= 1}
        if wrong:
            faults.append(f"{row['case']}: outside the bound, in units of it {wrong}")
    places = set(kernel_backend.ran().values())
    if device == "neuron" and places != {"neuron"}:
        faults.append(f"not all ran on neuron, but on {', '.join(sorted(places)) or 'nothing'}")
    return "\n".join(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu") or 0)
