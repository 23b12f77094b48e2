"""The checker of lesson 03's exercises: not attempted, not yet, or right, and what is wrong.

A kernel is run under the simulator on inputs that only a right one gets through, and compared with
PyTorch. What is wrong is told, in the simulator's own words, also of a kernel that nobody has
touched yet; what to write is not.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable

import torch

from qwen3_trainium import kernel_backend
from qwen3_trainium.kernels import broken

NOT_ATTEMPTED, NOT_YET, RIGHT = "Not attempted", "Not yet", "Right"


@dataclasses.dataclass(frozen=True)
class Exercise:
    """A broken kernel, what it should compute, inputs to try, and where to look.

    trials   (shape of x, cores)
    cached   whether the kernel takes cosines and sines as a second argument
    """

    kernel: object
    expected: Callable[..., torch.Tensor]
    trials: tuple[tuple[tuple[int, ...], int], ...]
    look: str
    cached: bool = False


def _halves(x_SD):
    return x_SD.chunk(2, -1)


def _forward(x_SD, cache_SW):
    cos, sin = _halves(cache_SW)
    first, second = _halves(x_SD)
    return x_SD * cos + torch.cat((-second, first), -1) * sin


def _backward(dy_SD, cache_SW):
    x = torch.zeros_like(dy_SD, requires_grad=True)
    return torch.autograd.grad(_forward(x, cache_SW), x, dy_SD)[0]


EXERCISES = {
    1: Exercise(
        broken.swap_halves,
        lambda x: torch.cat(tuple(reversed(_halves(x))), -1),
        (((128, 64), 1), ((256, 32), 1)),
        "List, for each instruction, the columns that it writes.",
    ),
    2: Exercise(
        broken.double_rows,
        lambda x: 2 * x,
        (((258, 16), 1), ((256, 16), 1), ((130, 8), 1), ((1024, 4), 1)),
        "How many rows does one tile get, and how many may it get?",
    ),
    3: Exercise(
        broken.rotate_forward,
        _forward,
        (((128, 32), 1), ((256, 64), 1)),
        "Which half of x does the formula multiply by which sine?",
        cached=True,
    ),
    4: Exercise(
        broken.rotate_backward,
        _backward,
        (((128, 32), 1), ((256, 64), 1)),
        "Compare the signs with those of the transposed matrix.",
        cached=True,
    ),
    5: Exercise(
        broken.double_heads,
        lambda x: 2 * x,
        (((256, 3, 16), 1), ((256, 3, 16), 2), ((512, 5, 8), 2)),
        "By how many elements do two neighbouring positions of [S, H, D] differ?",
    ),
}


def check(number: int, kernel) -> None:
    """Print how an answer stands."""
    tell(*judge(number, kernel))


def tell(state: str, text: str) -> None:
    """Print what a judge returned."""
    print(f"{state}: {text}" if text else f"{state}.")


def judge(number: int, kernel) -> tuple[str, str]:
    """How an answer stands, and what is wrong with it."""
    exercise = EXERCISES[number]
    if kernel is None or kernel is ... or same(kernel, exercise.kernel):
        wrong = first_fault(exercise, exercise.kernel)
        return NOT_ATTEMPTED, f"the kernel is as it was; mend it and run its cell again.\n{wrong}"
    if wrong := first_fault(exercise, kernel):
        return NOT_YET, f"{wrong}\n{exercise.look}"
    return RIGHT, ""


def first_fault(exercise: Exercise, kernel) -> str:
    """What a kernel does wrong on the first trial that it does not get through, or nothing."""
    for shape, cores in exercise.trials:
        generator = torch.Generator().manual_seed(len(shape) + shape[0])
        arguments = [torch.randn(shape, generator=generator)]
        if exercise.cached:  # not true angles: halves that differ, so that no mix-up is hidden
            arguments.append(torch.randn(shape[0], 2 * shape[1], generator=generator))
        given = f"With x {list(shape)} on {cores} core{'s' * (cores > 1)}"
        try:
            with kernel_backend.as_if_lnc(cores):
                got = kernel_backend.simulated(kernel[cores])(*arguments)
        except Exception as error:  # an answer may fail in any way
            return f"{given} it stops: {first_lines(error)}"
        if wrong := difference(got, exercise.expected(*arguments)):
            return f"{given} {wrong}"
    return ""


def same(kernel, other) -> bool:
    """Whether two kernels are the same program, comments and docstrings aside."""
    try:
        return _program(kernel) == _program(other)
    except (OSError, TypeError, SyntaxError):  # no source to be had: somebody wrote something
        return False


def _program(kernel) -> str:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kernel)))
    function = ast.parse(source).body[0]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.dump(function)


def first_lines(error: Exception) -> str:
    return "\n".join(str(error).splitlines()[:2]) or type(error).__name__


def difference(got, expected: torch.Tensor) -> str:
    """Where two results differ, in words, or nothing."""
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return f"it returns {getattr(got, 'shape', got)}, not {list(expected.shape)}"
    differ = ~(got == expected)
    if not differ.any():
        return ""
    places = []
    names = ("rows", *(["heads"] if got.ndim == 3 else []), "columns")
    for name, found in zip(names, differ.nonzero().T, strict=True):
        seen = found.unique()
        count = f"{len(seen)} of {differ.shape[len(places)]}"
        places.append(f"{name} {seen.min()} to {seen.max()} ({count})")
    return f"elements differ in {', '.join(places)}, by up to {(got - expected).abs().max():.3g}"
