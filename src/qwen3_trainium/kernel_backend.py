"""Where a kernel runs: on a NeuronCore, under a simulator, or as its PyTorch reference.

    neuron              a tensor on `neuron`: the compiled kernel, through TorchNeuron's `nki_op`
    simulator:nki       a CPU tensor, where AWS's NKI is installed: `nki.simulate`
    simulator:nki_sim   a CPU tensor anywhere else: the simulator of this repository
    reference           any tensor, when QWEN3_TRAINIUM_KERNELS=reference asks for it

The path never changes silently: each kernel's first run in a process is logged as one
`[Kernel] …` line, and `ran` and `ran_in` tell it to a verdict.
"""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import nki_sim
from qwen3_trainium import neuron
from qwen3_trainium.errors import SettingError
from qwen3_trainium.neuron import LNC_VARIABLE

nki_sim.install()  # before a kernel file imports `nki`; leaves a real NKI alone

VARIABLE = "QWEN3_TRAINIUM_KERNELS"
REFERENCE = "reference"
FIRST_CHIP = Path("/dev/neuron0")  # what the driver makes of it
LINE = re.compile(r"\[Kernel\] (\w+(?: \([^)]*\))?) on ([\w:]+)")

_ran: dict[str, set[str]] = {}


def backend(tensor: torch.Tensor) -> str:
    """Where a kernel that is given `tensor` will run: one of the four names above.

    Raises SettingError for a device that has no kernels and for an unknown setting.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", REFERENCE):
        raise SettingError(f"{VARIABLE} is {wanted!r}: unset it, or set it to {REFERENCE!r}")
    if wanted == REFERENCE:
        return REFERENCE
    device = tensor.device.type
    if device == "neuron":
        return "neuron"
    if device == "cpu":
        return "simulator:nki" if nki_sim.real_nki() else "simulator:nki_sim"
    raise SettingError(
        f"no kernel runs on device {device!r}: move the tensor to neuron or cpu, or set "
        f"{VARIABLE}={REFERENCE}"
    )


def lnc() -> int:
    """Physical cores that act as one: NEURON_LOGICAL_NC_CONFIG, which `launch` gives its ranks.

    Without the variable, what the driver says; where there is no chip, 2 as on trn2 by default.
    A kernel is launched on as many cores; another number than the runtime's is an error there.
    Raises SettingError for another number than 1 or 2, and where neuron-ls gives no answer.
    """
    value = os.environ.get(LNC_VARIABLE) or str(_machine_lnc())
    if value not in ("1", "2"):
        raise SettingError(f"{LNC_VARIABLE} is {value!r}: set it to 1 or 2")
    return int(value)


@torch.compiler.assume_constant_result  # it may start a process, which no compiler can trace
def _machine_lnc() -> int:
    return _machine().lnc if FIRST_CHIP.exists() else 2


@functools.cache
def _machine() -> neuron.Machine:
    return neuron.read()


@contextlib.contextmanager
def as_if_lnc(cores: int) -> Iterator[None]:
    """Inside the block kernels run on 1 or 2 cores; for simulators, since a runtime has its own."""
    before = os.environ.get(LNC_VARIABLE)
    os.environ[LNC_VARIABLE] = str(cores)
    try:
        yield
    finally:
        if before is None:
            del os.environ[LNC_VARIABLE]
        else:
            os.environ[LNC_VARIABLE] = before


def run(
    kernel,
    *arguments,
    reference: Callable,
    note: str = "",
    cores: int | None = None,
    **constants,
):
    """Run `kernel[cores](*arguments, **constants)` where the first argument's device says.

    arguments   tensors, contiguous, and constants; the first is a tensor and decides where
    reference   a PyTorch function of the same signature, for that setting
    note        which variant of the kernel this is, for the log: "backward", "rows by position"
    cores       1 or 2; `lnc()` unless given
    constants   numbers and flags that are fixed when the kernel is compiled
    Raises SettingError for tensors on neuron in a process where only `nki_sim` is.
    """
    where = backend(arguments[0])
    if where == "neuron" and isinstance(kernel, nki_sim.Kernel):
        raise SettingError(
            "the tensors are on neuron, but no compiler for kernels is in this process, only the "
            "simulator: install AWS's nki 0.3 or newer, or move the tensors to cpu"
        )
    cores = cores or lnc()
    name = kernel_name(kernel)
    _tell(f"{name} ({note})" if note else name, where, cores)
    if where == REFERENCE:
        return reference(*arguments, **constants)
    launched = kernel[cores] if where == "neuron" else simulated(kernel[cores])
    return launched(*arguments, **constants)


def simulated(kernel) -> Callable:
    """A callable that runs a kernel, or `kernel[2]`, on CPU tensors under the simulator here."""
    if not nki_sim.real_nki():
        return nki_sim.simulate(kernel)
    import nki

    # Without this AWS's simulator models trn3, which has instructions that trn2 lacks.
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return nki.simulate(kernel)


def use_nki_sim() -> None:
    """Use our simulator in this process even where AWS's NKI is installed; it alone has traces.

    Call it before a kernel file is imported. For notebooks: what trains runs in other processes.
    """
    if not nki_sim.real_nki():
        return
    if loaded := [name for name in sys.modules if name.startswith(f"{__package__}.kernels.")]:
        raise SettingError(f"{loaded[0]} is imported already: call use_nki_sim before it")
    nki_sim.install(instead=True)


def kernel_name(kernel) -> str:
    """The name of a jitted kernel's function."""
    return getattr(kernel, "__name__", None) or kernel.fn.__name__


def operator(name: str, fake: Callable) -> Callable:
    """Register a function that calls `run` as the PyTorch operator `name`, e.g. "ns::rope".

    fake   the function's shapes, dtypes and strides: same signature, `torch.empty` results
    The function has annotated arguments, changes none of them and returns new tensors. The result
    takes `.register_autograd`. With TorchNeuron the operator is registered by its `nki_op`, which
    torch.compile's `neuron` backend recognises and which traces the function itself as the fake.
    """

    def register(function):
        # After `use_nki_sim` this process compiles no kernel, and an ordinary operator will do.
        if torch._C._get_privateuse1_backend_name() == "neuron" and nki_sim.real_nki():
            return _nki_op()(name, mutates_args={})(function)
        registered = torch.library.custom_op(name, function, mutates_args=())
        registered.register_fake(fake)
        return registered

    return register


def _nki_op():
    try:
        from torch_neuronx import nki_op
    except ImportError as error:
        raise SettingError(
            f"the device is neuron but torch_neuronx has no nki_op ({error}): install TorchNeuron "
            "2.14 (Neuron SDK 2.33)"
        ) from error
    return nki_op


def ran() -> dict[str, str]:
    """Kernels that this process has run, and where: {"rope_kernel": "simulator:nki_sim"}."""
    return {name: ", ".join(sorted(places)) for name, places in _ran.items()}


def ran_in(log: str) -> dict[str, str]:
    """The same, read from the text of a run's log; all ranks together."""
    found: dict[str, set[str]] = {}
    for name, where in LINE.findall(log):
        found.setdefault(name, set()).add(where)
    return {name: ", ".join(sorted(places)) for name, places in found.items()}


def _tell(name: str, where: str, cores: int) -> None:
    places = _ran.setdefault(name, set())
    if where not in places:
        places.add(where)
        logging.getLogger("qwen3_trainium.kernels").info(f"[Kernel] {name} on {where}, LNC {cores}")
