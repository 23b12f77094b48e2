"""What torchtitan needs before it can train on a CPU.

torchtitan is written for accelerators. On CPU it calls a few functions that `torch.cpu` lacks
and a reduction that Gloo lacks. `prepare()` supplies them. Who calls it decides by the profile, not
by what the machine has: a run of the `cpu` profile uses no GPU and no NeuronCore that is there.

Importing this module does not import torch, so that accelerators can be hidden before.
"""

import contextlib
import os
import resource
import types
from collections.abc import Mapping
from pathlib import Path

# Environment variables of a process that is to find no accelerator.
NO_ACCELERATOR = {
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `import torch` loads no torch_neuronx
}


def hide_accelerators() -> None:
    """Let this process find no accelerator; call it before torch is imported.

    For a process that launches others and computes on the CPU itself: a NeuronCore that it held
    would be lacking to its ranks until it ends.
    """
    os.environ.update(NO_ACCELERATOR)


def with_accelerators(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that may use a device, started by one that hides them from itself."""
    return {name: value for name, value in environ.items() if NO_ACCELERATOR.get(name) != value}


def prepare() -> None:
    """Make torchtitan run on the CPU in this process; call it before torchtitan is imported.

    Calling it again changes nothing.
    """
    hide_accelerators()
    import torch

    # torchtitan picks its device once, at import, and falls back to "cuda" when this says None.
    torch._utils._get_available_device_type = lambda: "cpu"
    _add_device_functions(torch.cpu)
    _reduce_by_sum()


def _add_device_functions(cpu: types.ModuleType) -> None:
    """Functions of `torch.cuda` that torchtitan expects of every device module."""
    # The metrics processor prints the device's name and looks its peak FLOP/s up by it.
    cpu.get_device_name = lambda device=None: "CPU"
    # Percentages of memory in the log are relative to this capacity, in bytes.
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    # Peak memory of a step, in bytes: there is no caching allocator, so the process's resident set.
    cpu.memory_stats = lambda device=None: {
        "active_bytes.all.peak": _peak_resident_bytes(),
        "reserved_bytes.all.peak": _peak_resident_bytes(),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    # Called after every logged step, so that the next peak is that of its own step.
    cpu.reset_peak_memory_stats = lambda device=None: _reset_peak_resident()
    # There is no cache to empty.
    cpu.empty_cache = lambda: None
    # `barrier(device_ids=[current_device()])` wants a number; torch.cpu returns the string "cpu".
    cpu.current_device = lambda: 0


def _peak_resident_bytes() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # No /proc (macOS): the peak since the process began, which cannot be reset; bytes there.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak_resident() -> None:
    # Not permitted in some containers: the peak then stays that of the whole run.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the high-water mark alone


def _reduce_by_sum() -> None:
    """Let FSDP reduce gradients with a plain sum.

    torchtitan divides by the global number of tokens itself and sets a divide factor of 1 on each
    FSDP module. FSDP turns a custom factor into PREMUL_SUM, which Gloo refuses; scaling apart from
    the sum gives the same numbers.
    """
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor
    if hasattr(set_factor, "as_released"):
        return

    def set_factor_and_sum(self, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    set_factor_and_sum.as_released = set_factor
    FSDPModule.set_gradient_divide_factor = set_factor_and_sum
