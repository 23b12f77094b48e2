"""Trainium hardware in words and numbers, read without initialising any of it.

chip             what neuron-ls calls a "neuron device"; a trn2.48xlarge has 16
physical core    a NeuronCore of the silicon; a Trainium2 chip has 8
LNC              how many physical cores act as one: 2 by default on Trainium2, or 1
logical core     what software sees as one NeuronCore, and what one training rank owns
"""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from qwen3_trainium.errors import SettingError

TOOL = "/opt/aws/neuron/bin/neuron-ls"
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
TIMEOUT_S = 30  # the tool answers at once; a wedged driver must not hold up a preflight
# Group sizes that collectives support, by logical cores of the instance: AWS's documentation gives
# those of trn1 (2 cores a chip) and of trn2 at LNC=2. For LNC=1 it gives none; we take the same
# powers of two.
TRN1_GROUPS = (1, 2, 8, 16, 32)
TRN2_GROUPS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The Neuron side of one machine; all counts but `chips` are of logical cores.

    `core_bytes` is a logical core's share of its chip's memory. `owners` are (pid, command) of
    processes that hold cores now.
    """

    chips: int
    cores_per_chip: int
    lnc: int
    core_bytes: int
    owners: tuple[tuple[int, str], ...] = ()

    @property
    def cores(self) -> int:
        return self.chips * self.cores_per_chip


def logical_cores(chips: int, physical_cores_per_chip: int, lnc: int) -> int:
    """Logical cores of a machine: logical_cores(16, 8, 2) == 64, one rank each."""
    if lnc < 1 or physical_cores_per_chip % lnc:
        raise SettingError(
            f"LNC {lnc} does not divide {physical_cores_per_chip} physical cores a chip: use 1 or 2"
        )
    return chips * physical_cores_per_chip // lnc


def parse(text: str) -> Machine:
    """The machine that `neuron-ls --json-output` describes.

    `nc_count` there counts *logical* cores of a chip (4 on Trainium2 at LNC=2, 8 at LNC=1).
    Raises SettingError when the text is not what AWS documents.
    """
    try:
        chips = json.loads(text)
        counts = {chip["nc_count"] for chip in chips}
        lncs = {chip.get("logical_neuroncore_config") or 1 for chip in chips}
        sizes = {chip["memory_size"] for chip in chips}
        (count,), (lnc,), (size,) = counts, lncs, sizes
        owners = {
            (process["pid"], process["command"])
            for chip in chips
            for process in chip.get("neuron_processes") or []
        }
        return Machine(len(chips), count, lnc, size // count, tuple(sorted(owners)))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise SettingError(
            f"neuron-ls --json-output printed {_shortened(text)}, which describes no equal chips: "
            "run neuron-ls by hand and reload or reinstall the driver aws-neuronx-dkms"
        ) from None


def read() -> Machine:
    """Ask neuron-ls. SettingError when it is missing, fails or prints what cannot be understood."""
    tool = shutil.which("neuron-ls") or TOOL
    if not Path(tool).exists():
        raise SettingError(
            "neuron-ls is not installed, so no NeuronCore can be found: use the cpu profile, or "
            "install aws-neuronx-tools"
        )
    command = [tool, "--json-output"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingError(
            f"neuron-ls gave no answer ({type(error).__name__}): check the driver aws-neuronx-dkms"
        ) from None
    if done.returncode:
        raise SettingError(
            f"neuron-ls failed with {_shortened(done.stderr or done.stdout)}: "
            "check the driver aws-neuronx-dkms"
        )
    return configured(parse(done.stdout), os.environ)


def configured(machine: Machine, environ: Mapping[str, str]) -> Machine:
    """The machine as a process started with `environ` sees it.

    The runtime groups cores by NEURON_LOGICAL_NC_CONFIG, whatever the tool printed; the memory of
    a chip is shared by more logical cores then, or by fewer.
    """
    lnc = environ.get(LNC_VARIABLE) or str(machine.lnc)
    if lnc not in ("1", "2"):
        raise SettingError(f"{LNC_VARIABLE} is {lnc!r}: set it to 1 or 2")
    physical = machine.cores_per_chip * machine.lnc
    cores = logical_cores(1, physical, int(lnc))
    return dataclasses.replace(
        machine,
        cores_per_chip=cores,
        lnc=int(lnc),
        core_bytes=machine.core_bytes * machine.cores_per_chip // cores,
    )


def _shortened(text: str) -> str:
    first = " ".join(text.split())[:80]
    return repr(first) if first else "nothing"


def parse_cores(text: str) -> list[int]:
    """Cores that NEURON_RT_VISIBLE_CORES names: "0-3" or "0,2,4-5", inclusive."""
    cores = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SettingError(
                f"NEURON_RT_VISIBLE_CORES is {text!r}: write a core or a range such as 0-3"
            )
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) < len(cores):
        raise SettingError(
            f"NEURON_RT_VISIBLE_CORES {text!r} is an empty range or names a core twice: "
            "write rising ranges that do not overlap"
        )
    return cores


def usable_cores(machine: Machine, environ: Mapping[str, str] = os.environ) -> int:
    """Logical cores that a job started from here may use, after the runtime's own variables.

    NEURON_RT_VISIBLE_CORES takes precedence over NEURON_RT_NUM_CORES, whose 0 means all.
    """
    if visible := environ.get("NEURON_RT_VISIBLE_CORES"):
        cores = parse_cores(visible)
        if max(cores) >= machine.cores:
            raise SettingError(
                f"NEURON_RT_VISIBLE_CORES {visible!r} names core {max(cores)}, but the last "
                f"logical core here is {machine.cores - 1}: choose lower ones"
            )
        return len(cores)
    wanted = environ.get("NEURON_RT_NUM_CORES") or "0"
    if not wanted.isdigit() or int(wanted) > machine.cores:
        raise SettingError(
            f"NEURON_RT_NUM_CORES is {wanted!r}, but there are {machine.cores} logical cores: "
            "use a number up to that"
        )
    return int(wanted) or machine.cores


def group_sizes(cores: int, lnc: int, cores_per_chip: int) -> list[int]:
    """Rank counts that collectives support on an instance of `cores` logical cores."""
    trn1 = cores_per_chip == 2 and lnc == 1
    return [size for size in (TRN1_GROUPS if trn1 else TRN2_GROUPS) if size <= cores]


def describe(machine: Machine) -> str:
    physical = machine.cores * machine.lnc
    return (
        f"chips {machine.chips}, physical cores {physical}, LNC {machine.lnc}, "
        f"logical cores {machine.cores}"
    )
