"""What torchtitan needs before it can train on a machine with no accelerator.

torchtitan is written for accelerators. On CPU it calls a few functions that `torch.cpu` lacks
and a reduction that Gloo lacks. `prepare()` supplies them; it does nothing where PyTorch finds an
accelerator, so that nothing below is active on Trainium or on a GPU.
"""

import contextlib
import os
import resource
import types
from pathlib import Path

import torch


def has_accelerator() -> bool:
    """Whether PyTorch names a device other than the CPU; initialises none."""
    return torch._utils._get_available_device_type() not in (None, "cpu")


def prepare() -> bool:
    """Make torchtitan run on this machine's CPU; call it before torchtitan is imported.

    Returns whether anything was done: False where an accelerator is present.
    """
    if has_accelerator():
        return False
    # torchtitan picks its device once, at import, and falls back to "cuda" when this says None.
    torch._utils._get_available_device_type = lambda: "cpu"
    _add_device_functions(torch.cpu)
    _reduce_by_sum()
    return True


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

    def set_factor_and_sum(self, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum
