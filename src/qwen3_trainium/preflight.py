"""Look at this machine before anything runs on it: `python -m qwen3_trainium check`.

Each line says what was found, what is wanted, and what to do. No device is initialised: facts come
from package metadata, neuron-ls, /proc, /sys and the environment. Works with no torch and nothing
of Neuron installed.
"""

import argparse
import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qwen3_trainium import assets, cpu, guards, neuron, profiles, versions, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import ROOT, Profile
from qwen3_trainium.versions import CPU, NEURON, NKI_OF_SDK

OK, WARN, FAIL, SKIP = "OK", "WARN", "FAIL", "SKIP"
# Component versions of each SDK release, from AWS's component release notes.
SDK_ROWS = {
    "2.29": {"compiler": "2.24", "runtime": "2.31", "driver": "2.26", "collectives": "2.31"},
    "2.30": {"compiler": "2.25", "runtime": "2.32", "driver": "2.28", "collectives": "2.31"},
    "2.31": {"compiler": "2.26", "runtime": "2.33", "driver": "2.29", "collectives": "2.33"},
    "2.32": {"compiler": "2.27", "runtime": "2.34", "driver": "2.30", "collectives": "2.34"},
    "2.33": {"compiler": "2.28", "runtime": "2.35", "driver": "2.31", "collectives": "2.35"},
}
SDK_PACKAGES = {
    "compiler": "neuronx-cc",
    "runtime": "aws-neuronx-runtime-lib",
    "driver": "aws-neuronx-dkms",
    "collectives": "aws-neuronx-collectives",
}
# torch-neuronx 2.14.3 on Ubuntu: (supported, wheel). "Supported" and "has a wheel" are two
# questions, and AWS's pages disagree about both: its release on GitHub has wheels for 26.04 only
# and supports 22.04, its documentation says a wheel for each Python and ends support of 22.04.
OS_SUPPORT = {
    "ubuntu 26.04": ("yes", "yes"),
    "ubuntu 24.04": ("yes", "by the documentation, not by the release page"),
    "ubuntu 22.04": ("by the release page, not by the documentation", "no"),
}
PYTHONS_OF_TORCH_NEURONX = ("3.12", "3.13", "3.14")
# The last torch that the XLA product called torch-neuronx was made for.
LAST_LEGACY_XLA = (2, 9)
ENVIRONMENT = "make the environment of environment.yml, or activate the AMI's"
NOT_NEURON = "the cpu profile uses nothing of Neuron"
HUB_TIMEOUT_S = 10
IMPORT_TIMEOUT_S = 120  # a cold import of torch and transformers from a slow disk


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing looked at. `status` is OK, WARN, FAIL or SKIP; `do` is empty when all is well."""

    status: str
    name: str
    found: str
    wanted: str = ""
    do: str = ""


def report(profile: Profile | str) -> list[Line]:
    """Everything worth knowing before this profile's lessons run, most basic first."""
    profile = profiles.load(profile) if isinstance(profile, str) else profile
    found = installed_versions()
    lines = check_versions(found, profile.device)
    lines.append(check_symbols(profile.device))
    if profile.device == "neuron":
        lines += check_sdk(installed_sdk())
        lines.append(check_nki(found.get("nki")))
        lines += check_os(os_release(), "torch_neuronx" in found)
        machine, cores = look_at_cores(profile)
        lines += cores
    else:
        machine = None
        names = ("torch_neuronx", "Neuron SDK", "NKI", "operating system", "NeuronCores")
        lines += [Line(SKIP, name, NOT_NEURON) for name in names]
        lines.append(
            _guarded(
                "ranks",
                f"room for {profile.ranks} processes",
                lambda: guards.check_ranks(profile.ranks, "cpu"),
                f"{os.cpu_count()} CPU cores",
            )
        )
    lines += check_room(profile, machine)
    return [*lines, check_model(profile), check_dataset(profile)]


def installed_versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on, by import name; absent packages are left out."""
    return versions.installed("torch", "torchtitan", "transformers", "torch_neuronx", "nki")


def check_versions(found: dict[str, str], device: str) -> list[Line]:
    """Compare versions (import name → version) with the tested set. Imports nothing.

    torch and torchtitan reach into each other's private parts, so another minor of torch or any
    other torchtitan fails; another patch of transformers is a warning.
    """
    tested = CPU if device == "cpu" else NEURON
    lines = [_python(found.get("python", platform.python_version()), device)]
    for name in ("torch", "torchtitan", "transformers"):
        lines.append(_version(name, found.get(name), tested[name], device))
    if device == "neuron":
        # The guide names a branch of torchtitan, so that the commit is what can be repeated.
        commit = found.get("torchtitan_commit", "unknown: not installed from a repository")
        lines.append(Line(OK, "torchtitan commit", commit))
        lines.append(_torch_neuronx(found.get("torch_neuronx"), found.get("torch")))
    return lines


def _python(found: str, device: str) -> Line:
    if device == "cpu":
        enough = _numbers(found, 2) >= (3, 11)
        do = "" if enough else "make the virtual environment with a newer Python"
        return Line(OK if enough else FAIL, "python", found, "3.11 or newer", do)
    right = ".".join(found.split(".")[:2]) in PYTHONS_OF_TORCH_NEURONX
    wanted = f"{PYTHONS_OF_TORCH_NEURONX[0]} to {PYTHONS_OF_TORCH_NEURONX[-1]}"
    do = "" if right else f"torch-neuronx has wheels for no other Python: {ENVIRONMENT}"
    return Line(OK if right else FAIL, "python", found, wanted, do)


def _version(name: str, found: str | None, wanted: str, device: str) -> Line:
    do = "run `make run`, which installs it" if device == "cpu" else ENVIRONMENT
    if found is None:
        return Line(FAIL, name, "not installed", wanted, do)
    # The fork's label (0.2.2+neuron.1) says which torchtitan it is; torch's (2.14.1+cpu) does not.
    exact = name != "torch"
    if found == wanted or (not exact and _same(found, wanted, 2)):
        return Line(OK, name, found, wanted)
    if name == "transformers" and _same(found, wanted, 2):
        return Line(WARN, name, found, wanted, "nothing, but this patch is not tested")
    return Line(FAIL, name, found, wanted, do)


def _torch_neuronx(found: str | None, torch: str | None) -> Line:
    """Two products share this name: a legacy one on XLA, and the `neuron` device that we need."""
    name, wanted = "torch_neuronx", NEURON["torch_neuronx"]
    if found is None:
        return Line(FAIL, name, "not installed", wanted, ENVIRONMENT)
    if _numbers(found, 2) <= LAST_LEGACY_XLA:
        do = f"uninstall it, a fresh environment is safest: {ENVIRONMENT}"
        return Line(FAIL, name, f"{found}, the legacy XLA product", wanted, do)
    if torch is None or not _same(found, torch, 2):
        do = f"install the family of one minor: {ENVIRONMENT}"
        return Line(FAIL, name, f"{found} beside torch {torch}", f"{wanted}, torch 2.14", do)
    same = _same(found, wanted, 3)
    return Line(OK if same else WARN, name, found, wanted, "" if same else "not tested with it")


def _same(a: str, b: str, parts: int) -> bool:
    return _numbers(a, parts) == _numbers(b, parts)


def _numbers(version: str, parts: int) -> tuple[int, ...]:
    """Leading numbers of a version, up to `parts` of them: ("2.14.1+cpu", 2) gives (2, 14)."""
    numbers = []
    for part in version.partition("+")[0].split(".")[:parts]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_symbols(device: str) -> Line:
    """Import every torchtitan name that this project uses; the missing ones come in one line.

    In a process of its own that ends at once, so that whatever device an import touches is free
    again; on a CPU, and in a lesson that has loaded torch already, here: it needs them anyway.
    """
    name, wanted = "torchtitan symbols", "all importable"
    if not importlib.util.find_spec("torch") or not importlib.util.find_spec("torchtitan"):
        return Line(SKIP, name, "torch or torchtitan is not installed", wanted)
    symbols = used_symbols()
    if device == "cpu" and "torch" in sys.modules:
        missing = missing_symbols(symbols, device)
    else:
        command = [sys.executable, "-c", PROBE, json.dumps(symbols), device]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=IMPORT_TIMEOUT_S,
                env=cpu.with_accelerators(os.environ),
            )
            missing = json.loads(done.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            found, do = "the import ended without an answer", "import it by hand"
            return Line(FAIL, name, found, wanted, do)
    if missing:
        do = "install the torchtitan that the tested set names"
        return Line(FAIL, name, f"missing: {', '.join(missing)}", wanted, do)
    return Line(OK, name, f"{len(symbols)} of {len(symbols)}", wanted)


PROBE = """
import json, sys
from qwen3_trainium.preflight import missing_symbols
print(json.dumps(missing_symbols(json.loads(sys.argv[1]), sys.argv[2])))
"""


def missing_symbols(symbols: list[tuple[str, str]], device: str) -> list[str]:
    """Those of the (module, name) pairs that cannot be imported in this process."""
    if device == "cpu":
        cpu.prepare()
    missing = []
    for module, name in symbols:
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except Exception:  # an import may fail in any way, and all of them mean the same here
            missing.append(f"{module}.{name}")
    return missing


def used_symbols() -> list[tuple[str, str]]:
    """(module, name) of each torchtitan name in our code, read from the source itself.

    Both `from torchtitan.x import y` and `compat.symbol("torchtitan.x", "y")` count; an import
    inside `try` is optional by intention and does not.
    """
    found = set()
    for file in [*Path(__file__).parent.glob("*.py"), *(ROOT / "configs").glob("*.py")]:
        tree = ast.parse(file.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        tried = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in tried:
                found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Call) and _called(node) == "symbol" and len(node.args) == 2:
                found.add(tuple(_text(argument, constants) for argument in node.args))
    return sorted(pair for pair in found if pair[0].partition(".")[0] == "torchtitan")


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """The string that an argument is: a literal, a module constant, or an f-string of both."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return str(constants.get(node.id, ""))
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    return ""


def installed_sdk() -> dict[str, str]:
    """Versions of the SDK's components by the names of SDK_PACKAGES; absent ones are left out.

    The driver's is that of the *loaded* module: after an upgrade without a reload, the package is
    newer than what runs.
    """
    found = {name: _system_version(package) for name, package in SDK_PACKAGES.items()}
    try:
        found["compiler"] = importlib.metadata.version(SDK_PACKAGES["compiler"])
    except importlib.metadata.PackageNotFoundError:
        found.pop("compiler")
    loaded = Path("/sys/module/neuron/version")
    if loaded.is_file():
        found["driver"] = loaded.read_text().strip()
    return {name: version for name, version in found.items() if version}


def _system_version(package: str) -> str:
    for command in (
        ["dpkg-query", "--show", "--showformat=${Version}", package],
        ["rpm", "--query", "--queryformat=%{VERSION}", package],
    ):
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode == 0:
                return done.stdout.strip()
    return ""


def check_sdk(found: dict[str, str]) -> list[Line]:
    """Compare compiler, runtime, driver and collectives with the tested SDK, a line for each.

    One component of another release is enough for a run that compiles and then cannot load.
    """
    sdk, lines = NEURON["neuron_sdk"], []
    for name, wanted in SDK_ROWS[sdk].items():
        package = SDK_PACKAGES[name]
        wanted_text = f"{wanted} (SDK {sdk})"
        if name not in found:
            do = f"install {package} of SDK {sdk}, or run in its container"
            lines.append(Line(WARN, f"Neuron {name}", "not found", wanted_text, do))
            continue
        same = _same(found[name], wanted, 2)
        of = [release for release, row in SDK_ROWS.items() if _same(found[name], row[name], 2)]
        seen = f"{found[name]} (SDK {of[-1] if of else 'unknown'})"
        if same:
            lines.append(Line(OK, f"Neuron {name}", found[name], wanted_text))
            continue
        do = f"bring {package} to SDK {sdk} together with {', '.join(SDK_PACKAGES.values())}"
        lines.append(Line(FAIL, f"Neuron {name}", seen, wanted_text, do))
    return lines


def check_nki(found: str | None) -> Line:
    """Compare NKI with what the tested SDK ships; `found` None is "not installed"."""
    nki, sdk = NEURON["nki"], NEURON["neuron_sdk"]
    wanted = f"{nki} (SDK {sdk})"
    if found is None:
        return Line(FAIL, "NKI", "not installed", wanted, ENVIRONMENT)
    if _same(found, nki, 2):
        return Line(OK, "NKI", found, wanted)
    of = [release for release, shipped in NKI_OF_SDK.items() if _same(found, shipped, 2)]
    seen = f"{found} (SDK {of[0] if of else 'unknown'})"
    return Line(FAIL, "NKI", seen, wanted, f"install nki {nki}.*")


def os_release(path: Path = Path("/etc/os-release")) -> str:
    """Name and version of the operating system, such as "ubuntu 24.04"."""
    if not path.is_file():
        return platform.system().lower()
    pairs = (line.partition("=") for line in path.read_text().splitlines())
    values = {key: value.strip().strip('"') for key, _, value in pairs}
    return f"{values.get('ID', 'linux')} {values.get('VERSION_ID', '')}".strip()


def check_os(found: str, torch_neuronx_installed: bool) -> list[Line]:
    """Two lines: is the system supported, and is there a wheel. Neither alone fails a machine."""
    supported, wheel = OS_SUPPORT.get(found, ("not in AWS's matrix", "unknown"))
    do = "" if supported == "yes" else "use an AMI or container with Ubuntu 24.04 or 26.04"
    lines = [
        Line(
            WARN if do else OK,
            "operating system",
            f"{found}: supported: {supported}",
            "supported: yes",
            do,
        )
    ]
    if torch_neuronx_installed:
        return [*lines, Line(OK, "torch_neuronx wheel", "installed already", "yes")]
    do = "" if wheel == "yes" else "if pip finds nothing, build torch-neuronx from source"
    return [*lines, Line(WARN if do else OK, "torch_neuronx wheel", wheel, "yes", do)]


def look_at_cores(profile: Profile) -> tuple[neuron.Machine | None, list[Line]]:
    """The Neuron machine (None when it cannot be read) and lines on cores, ranks and owners."""
    try:
        machine = neuron.read()
    except SettingError as error:
        found, do = _halves(error)
        return None, [Line(FAIL, "NeuronCores", found, f"{profile.ranks} logical cores", do)]
    lines = [Line(OK, "NeuronCores", neuron.describe(machine), f"{profile.ranks} logical cores")]
    variables = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG")
    said = [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    wanted = "unset, or as many cores as ranks"
    lines.append(
        _guarded(
            "core variables",
            wanted,
            lambda: neuron.usable_cores(machine),
            ", ".join(said) or "unset",
        )
    )
    lines.append(
        _guarded(
            "ranks",
            f"a core for each of {profile.ranks} processes",
            lambda: guards.check_ranks(profile.ranks, "neuron", machine),
            f"{machine.cores} logical cores",
        )
    )
    return machine, [*lines, check_owners(machine)]


def check_owners(machine: neuron.Machine) -> Line:
    """Cores that a process holds stay taken until it ends; the line names it."""
    if not machine.owners:
        return Line(OK, "cores in use", "none", "none")
    # A command line may hold a token: only the program's name is shown.
    owners = [f"PID {pid} ({Path(command.split()[0]).name})" for pid, command in machine.owners]
    do = "end that job or shut down that notebook kernel; its cores are free when it has ended"
    return Line(FAIL, "cores in use", ", ".join(owners), "none", do)


def check_room(profile: Profile, machine: neuron.Machine | None) -> list[Line]:
    """Disk and memory for the profile's model, from its config.json or its released numbers."""
    model = model_facts(profile)
    if model is None:
        reason = f"the size of {profile.model} is known after lesson 00"
        return [Line(SKIP, name, reason) for name in ("disk", "memory")]
    needed = guards.run_bytes(model.n_params)
    if not model.bytes:
        needed += model.n_params * 2  # the download, in bfloat16
    disk = _guarded(
        "disk",
        f"{needed / 2**30:.1f} GiB free",
        lambda: guards.check_disk(ROOT, needed),
        f"{shutil.disk_usage(ROOT).free / 2**30:.1f} GiB free",
    )
    if profile.device == "neuron" and machine is None:
        return [disk, Line(SKIP, "memory", "no NeuronCore was found", "room on each core")]
    room = machine.core_bytes if machine else guards.host_memory()
    share = guards.training_bytes(model, profile.ranks) + guards.logits_bytes(
        model, profile.seq_len, profile.local_batch_size
    )
    memory = _guarded(
        "memory",
        f"{share / 2**30:.2f} GiB for each of {profile.ranks} ranks, and activations",
        lambda: guards.check_memory(
            model,
            profile.ranks,
            profile.device,
            profile.seq_len,
            profile.local_batch_size,
            machine,
        ),
        f"{room / 2**30:.0f} GiB " + ("a logical core" if machine else "of host memory"),
    )
    return [disk, memory]


def model_facts(profile: Profile) -> weights.ModelFacts | None:
    """Facts of the profile's model as far as they are known here, None for one not yet made."""
    folder = assets.model_folder(profile)
    if folder.is_dir():
        try:
            return guards.check_model_folder(folder)
        except SettingError:
            return None  # `check_model` says what is wrong with it
    config = weights.PUBLISHED.get(profile.model)
    return weights.facts(config) if config else None


def check_model(profile: Profile) -> Line:
    """The model is here and whole, or can be made, or the hub can be reached.

    A token's presence is shown as yes or no; its value is never read into a line.
    """
    name, wanted = "model", f"{profile.model} here or within reach"
    folder = assets.model_folder(profile)
    if folder.is_dir():
        return _guarded(name, wanted, lambda: guards.check_model_folder(folder), "here and whole")
    if profile.model == "tiny-qwen3":
        return Line(OK, name, "not made yet: lesson 00 makes it", wanted)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        do = "unset HF_HUB_OFFLINE, or put the model folder in place"
        return Line(FAIL, name, "not here, and HF_HUB_OFFLINE is set", wanted, do)
    try:
        from huggingface_hub import HfApi, get_token

        token = "yes" if get_token() else "no"
        HfApi().model_info(profile.model, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever the hub's client raises, the answer is the same
        do = "check the network, or put the model folder in place"
        return Line(FAIL, name, f"not here, hub: {type(error).__name__}", wanted, do)
    return Line(OK, name, f"not here yet, hub reached (token: {token})", wanted)


def check_dataset(profile: Profile) -> Line:
    """The text to train on is here, or is made, or will be streamed from the hub."""
    name, wanted = "dataset", f"{profile.dataset} here or within reach"
    if profile.dataset == "pydoc":
        return Line(OK, name, "made from the standard library's documentation", wanted)
    try:
        folder = assets.train_folder(profile)
    except SettingError as error:
        found, do = _halves(error)
        return Line(FAIL, name, found, wanted, do)
    if folder is None:
        do = "set TORCHTITAN to a checkout of torchtitan if the hub cannot be reached"
        return Line(WARN, name, "no checkout holds it: streamed from the hub", wanted, do)
    return _guarded(name, wanted, lambda: guards.check_dataset_folder(folder), "here and whole")


def _guarded(name: str, wanted: str, guard: Callable[[], object], found: str) -> Line:
    """A guard's answer as a line: its error fails, a list of warnings warns."""
    try:
        answer = guard()
    except SettingError as error:
        wrong, do = _halves(error)
        return Line(FAIL, name, wrong, wanted, do)
    if isinstance(answer, list) and answer:
        return Line(WARN, name, "; ".join(answer), wanted)
    return Line(OK, name, found, wanted)


def _halves(error: SettingError) -> tuple[str, str]:
    """(what is wrong, what to do) of an error's one sentence, without this machine's paths."""
    wrong, _, do = str(error).rpartition(": ")
    return wrong.replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), "this repository"), do


def text(lines: list[Line]) -> str:
    """The lines for a terminal or a notebook's output, with a summary below."""
    width = max(len(line.name) for line in lines)
    shown = []
    for line in lines:
        row = f"[{line.status:4}] {line.name:{width}}  {line.found}"
        row += f" · wanted: {line.wanted}" if line.wanted else ""
        row += f" · do: {line.do}" if line.do else ""
        shown.append(row)
    counts = {status: sum(line.status == status for line in lines) for status in (OK, WARN, FAIL)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([*shown, summary])


def main(argv: list[str]) -> int:
    """The command; returns 1 when a line says FAIL."""
    parser = argparse.ArgumentParser(prog="python -m qwen3_trainium check", description=__doc__)
    parser.add_argument("--profile", default=profiles.detect(), help="default: the detected one")
    lines = report(parser.parse_args(argv).profile)
    print(text(lines))
    return int(any(line.status == FAIL for line in lines))
