"""Lesson 04's training runs beside the one with our kernels, and how near their losses must be."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from qwen3_trainium import kernel_backend, launch
from qwen3_trainium.launch import Run
from qwen3_trainium.profiles import Profile

KERNELS = ("grouped_experts_kernel", "grouped_experts_backward_kernel")
# name: (difference of the first loss, of any of ten), in nats a token, by device.
#
# Both float32, kernels and their references differ in the order of sums alone: a loss of 8 has a
# spacing of 2⁻²⁰, and ten are allowed. torchtitan's experts round to bfloat16, which sends a few
# tokens to another expert: over 24 random starts that moved the first loss by 2e-6 (root of the
# mean square), by 9e-6 in the lesson's own. Gate and up exchanged moved it by 5e-5, and by 8e-5
# there: the tolerance of the first loss lies between. After it AdamW turns the sign of a tiny
# gradient into a whole step: ten steps on two texts gave 1.0e-4 and 2.6e-4, as much as gate and up
# exchanged (2.6e-4), and 3.6e-3 with the experts left out. Six times 1e-4 tells the last alone.
# Not tried on neuron, where all is bfloat16: a token's loss is off by about 0.01 at random, a mean
# over 131,072 of them by 3e-5, and thirty of these are allowed at first. Experts left out move it
# by 4e-3.
REFERENCE, STOCK, OTHER = "reference", "torchtitan", "other"
BOUNDS = {
    "cpu": {REFERENCE: (1e-5, 1e-5), STOCK: (3e-5, 6e-4), OTHER: (3e-5, 6e-4)},
    "neuron": {REFERENCE: (1e-3, 0.05), STOCK: (1e-3, 0.05), OTHER: (1e-3, 0.05)},
}


def others(
    settings: Profile, other_experts: str | None, *, overwrite: bool
) -> tuple[dict[str, Run], dict[str, str]]:
    """The recipe with the kernels' references, torchtitan's experts, and `other_experts`.

    other_experts   import path of one more override of the experts, or None
    Returns the finished runs by name, and why each of the rest was left out. On a CPU a run that
    fails raises launch.RunError; so does one of `other_experts` anywhere.
    """
    runs, left_out = {}, {}
    if settings.device == "neuron":
        left_out[REFERENCE] = (
            "the references are for a CPU: on neuron every number of rows that an expert gets "
            "would be one more shape to compile"
        )
    else:
        with by_reference():
            runs[REFERENCE] = launch.launch(
                "moe_nki", "nki", settings, name="reference", overwrite=overwrite
            )
    try:
        runs[STOCK] = launch.launch("moe_nki", "stock_experts", settings, overwrite=overwrite)
    except launch.RunError as error:
        if settings.device != "neuron":
            raise
        # Seen in an open version of torch_neuronx: its torch._grouped_mm takes groups of rows
        # that begin at multiples of 128, and torchtitan's do not.
        left_out[STOCK] = f"torchtitan's experts do not train here: {' '.join(str(error).split())}"
    if other_experts is None:
        installed = "installed" if find_spec("torchtitan_neuron") else "not installed"
        left_out[OTHER] = (
            f"torchtitan_neuron is {installed}, other_experts not given: nothing compared"
        )
    else:
        replaced = launch.build_config("moe_nki", "stock_experts", settings).override.imports
        runs[OTHER] = launch.launch(
            *("moe_nki", "stock_experts", settings),
            name="other",
            arguments=["--override.imports", *replaced, other_experts],
            overwrite=overwrite,
        )
    return runs, left_out


@contextlib.contextmanager
def by_reference() -> Iterator[None]:
    """Inside the block, runs that are launched use the kernels' PyTorch references."""
    before = os.environ.get(kernel_backend.VARIABLE)
    os.environ[kernel_backend.VARIABLE] = kernel_backend.REFERENCE
    try:
        yield
    finally:
        if before is None:
            del os.environ[kernel_backend.VARIABLE]
        else:
            os.environ[kernel_backend.VARIABLE] = before


def not_by_kernel(ran: Mapping[str, str], kernels=KERNELS) -> list[str]:
    """Those of `kernels` that did not run as kernels in one place, and where they ran instead.

    ran   what `kernel_backend.ran` or `ran_in` returns
    """
    places = {name: ran.get(name, "nothing") for name in kernels}
    return [
        f"{name} ran on {place}"
        for name, place in places.items()
        if place in ("nothing", kernel_backend.REFERENCE) or ", " in place
    ]
