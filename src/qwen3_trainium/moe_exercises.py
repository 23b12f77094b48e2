"""The checker of lesson 04's kernel exercises: three answers, as in lesson 03.

Inputs are small integers, so that float32 sums are exact and a right kernel is right to the bit.
"""

from collections.abc import Callable, Iterator

import torch

from qwen3_trainium import kernel_backend
from qwen3_trainium.kernel_exercises import (
    NOT_ATTEMPTED,
    NOT_YET,
    RIGHT,
    difference,
    first_lines,
    same,
    tell,
)
from qwen3_trainium.kernels import broken_experts


def _integers(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=g).float()


def _projections() -> Iterator[tuple]:
    for D in (128, 384):
        x, w = _integers(D, 128), _integers(D, 48, seed=1)
        yield f"a sum over D = {D}", (x, w), x.T @ w


def _gradients() -> Iterator[tuple]:
    for count in (128, 100, 1):
        R = 300
        dgate, x = _integers(R, 48), _integers(R, 96, seed=1)
        rows = torch.full((128, 1), R, dtype=torch.int32)
        rows[:count, 0] = torch.arange(7, 7 + count)
        expected = dgate[7 : 7 + count].T @ x[7 : 7 + count]
        yield f"{count} rows and {128 - count} slots of padding", (dgate, x, rows), expected


# name: (the faulty kernel, what it is tried with, where to look)
EXERCISES: dict[str, tuple[object, Callable, str]] = {
    "project": (
        broken_experts.project,
        _projections,
        "When does a product overwrite PSUM, and when is it to be added to what is there?",
    ),
    "weight_gradient": (
        broken_experts.weight_gradient,
        _gradients,
        "What is the product of two slots that no row was copied into?",
    ),
}


def check(name: str, kernel) -> None:
    """Print how an answer stands."""
    tell(*judge(name, kernel))


def judge(name: str, kernel) -> tuple[str, str]:
    """How an answer stands, and what is wrong with it."""
    faulty, trials, look = EXERCISES[name]
    if kernel is None or kernel is ... or same(kernel, faulty):
        return NOT_ATTEMPTED, "the kernel is as it was; mend it and run its cell again."
    for given, arguments, expected in trials():
        try:
            got = kernel_backend.simulated(kernel)(*arguments)
        except Exception as error:  # an answer may fail in any way
            return NOT_YET, f"with {given} it stops: {first_lines(error)}\n{look}"
        if wrong := difference(got, expected):
            return NOT_YET, f"with {given} {wrong}\n{look}"
    return RIGHT, ""
