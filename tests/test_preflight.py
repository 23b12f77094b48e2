"""Preflight on machines that are not here: every line is a pure function of what was found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import toys

from qwen3_trainium import neuron, preflight, profiles, versions
from qwen3_trainium.errors import SettingError

SAMPLES = Path(__file__).parent / "data" / "neuron_ls"
GIB = 2**30
# The guide's machine, by the names of package metadata.
GUIDE = {
    "python": "3.12.3",
    "torch": "2.14.0",
    "torchtitan": "0.2.2+neuron.1",
    "torchtitan_commit": "0123456789abcdef0123456789abcdef01234567",
    "transformers": "5.16.0",
    "torch_neuronx": "2.14.3.0.12",
    "nki": "0.7.0",
}
SDK = {
    "compiler": "2.28.7631.0",
    "runtime": "2.35.30.0",
    "driver": "2.31.7.0",
    "collectives": "2.35.43.0",
}


@pytest.fixture(autouse=True)
def _no_core_variables(monkeypatch):
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def failing(lines):
    return {line.name: line for line in lines if line.status == preflight.FAIL}


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


# --- Versions ---------------------------------------------------------------------------------


def test_guide_versions_pass_on_neuron_and_the_pinned_ones_on_cpu():
    assert {line.status for line in preflight.check_versions(GUIDE, "neuron")} == {"OK"}
    cpu = {"python": "3.11.7", "torch": "2.14.1+cpu", "torchtitan": "0.3.0"}
    cpu["transformers"] = versions.CPU["transformers"]
    assert {line.status for line in preflight.check_versions(cpu, "cpu")} == {"OK"}


@pytest.mark.parametrize(
    ("change", "name", "fragment"),
    [
        ({"torch": "2.13.0"}, "torch_neuronx", "beside torch 2.13.0"),
        ({"torch": "2.13.0"}, "torch", "2.13.0"),
        ({"torch_neuronx": "2.9.0.2.13"}, "torch_neuronx", "legacy XLA"),
        ({"torch_neuronx": "2.13.3.0"}, "torch_neuronx", "beside torch 2.14.0"),
        ({"torch_neuronx": None}, "torch_neuronx", "not installed"),
        ({"python": "3.11.7"}, "python", "3.11"),
        ({"python": "3.15.0"}, "python", "3.15"),
        ({"torchtitan": "0.3.0"}, "torchtitan", "0.3.0"),
        ({"torchtitan": "0.2.2"}, "torchtitan", "0.2.2"),
        ({"transformers": "5.24.0"}, "transformers", "5.24.0"),
        ({"torch": None}, "torch", "not installed"),
    ],
)
def test_wrong_version_fails_on_neuron(change, name, fragment):
    found = {key: value for key, value in {**GUIDE, **change}.items() if value}
    line = failing(preflight.check_versions(found, "neuron"))[name]
    assert fragment in line.found
    assert line.wanted
    assert line.do


def test_the_commit_of_the_moving_branch_is_shown():
    lines = by_name(preflight.check_versions(GUIDE, "neuron"))
    assert lines["torchtitan commit"].found == GUIDE["torchtitan_commit"]


def test_previous_minor_of_torch_fails_on_cpu():
    found = {"python": "3.11.7", "torch": "2.13.0", "torchtitan": "0.3.0", "transformers": "5.16.0"}
    assert set(failing(preflight.check_versions(found, "cpu"))) == {"torch"}
    found |= {"torch": "2.14.0", "python": "3.10.2"}
    assert set(failing(preflight.check_versions(found, "cpu"))) == {"python"}


def test_another_patch_of_transformers_only_warns():
    lines = preflight.check_versions({**GUIDE, "transformers": "5.16.3"}, "neuron")
    assert [line.name for line in lines if line.status == "WARN"] == ["transformers"]
    assert not failing(lines)


# --- SDK, NKI, operating system ---------------------------------------------------------------


def test_sdk_row_of_the_guide_passes():
    assert {line.status for line in preflight.check_sdk(SDK)} == {"OK"}
    assert versions.NEURON["neuron_sdk"] in preflight.SDK_ROWS
    assert set(preflight.SDK_ROWS) == set(versions.NKI_OF_SDK)


@pytest.mark.parametrize(
    ("component", "version", "package"),
    [
        ("driver", "2.29.0.0", "aws-neuronx-dkms"),  # two releases older than the runtime
        ("compiler", "2.30.1.0", "neuronx-cc"),  # two releases newer than the runtime
        ("collectives", "2.33.10.0", "aws-neuronx-collectives"),
    ],
)
def test_one_component_of_another_release_fails(component, version, package):
    lines = failing(preflight.check_sdk({**SDK, component: version}))
    assert set(lines) == {f"Neuron {component}"}
    assert version in lines[f"Neuron {component}"].found
    assert package in lines[f"Neuron {component}"].do


def test_absent_component_warns():
    found = {key: value for key, value in SDK.items() if key != "driver"}
    (line,) = [line for line in preflight.check_sdk(found) if line.status != "OK"]
    assert (line.status, line.name) == ("WARN", "Neuron driver")


@pytest.mark.parametrize(
    ("found", "status"), [("0.7.1", "OK"), ("0.6.0", "FAIL"), (None, "FAIL"), ("0.9.0", "FAIL")]
)
def test_nki_belongs_to_the_sdk(found, status):
    line = preflight.check_nki(found)
    assert line.status == status
    if found == "0.6.0":
        assert "SDK 2.32" in line.found


@pytest.mark.parametrize(
    ("system", "statuses"),
    [
        ("ubuntu 26.04", ["OK", "OK"]),
        ("ubuntu 24.04", ["OK", "WARN"]),
        ("ubuntu 22.04", ["WARN", "WARN"]),
        ("debian 12", ["WARN", "WARN"]),
    ],
)
def test_supported_and_wheel_are_two_lines(system, statuses):
    assert [line.status for line in preflight.check_os(system, False)] == statuses
    assert preflight.check_os(system, True)[1].found == "installed already"


def test_os_release_is_read(tmp_path):
    (tmp_path / "os-release").write_text('NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n')
    assert preflight.os_release(tmp_path / "os-release") == "ubuntu 24.04"


# --- NeuronCores ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "chips", "cores", "lnc", "core_gib"),
    [
        ("trn2.48xlarge-lnc2.json", 16, 64, 2, 24),
        ("trn2.48xlarge-lnc1.json", 16, 128, 1, 12),
        ("trn2.3xlarge-lnc2.json", 1, 4, 2, 24),
        ("trn2.3xlarge-lnc1.json", 1, 8, 1, 12),
    ],
)
def test_neuron_ls_samples(file, chips, cores, lnc, core_gib):
    machine = neuron.parse(sample(file))
    assert (machine.chips, machine.cores, machine.lnc) == (chips, cores, lnc)
    assert machine.core_bytes == core_gib * GIB
    assert machine.owners == ()


def test_chips_and_cores_have_one_name_each():
    assert neuron.logical_cores(16, 8, 2) == 64  # trn2.48xlarge, the guide's ranks
    assert neuron.logical_cores(16, 8, 1) == 128
    assert neuron.logical_cores(1, 8, 2) == 4  # trn2.3xlarge
    with pytest.raises(SettingError, match="LNC 3"):
        neuron.logical_cores(16, 8, 3)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"nc_count": 4}]', "null", "no devices"])
def test_output_that_is_not_as_documented_is_refused(text):
    with pytest.raises(SettingError, match="neuron-ls --json-output printed"):
        neuron.parse(text)


def test_broken_and_missing_tool(monkeypatch, tmp_path):
    with pytest.raises(SettingError, match="aws-neuronx-dkms"):
        neuron.parse(sample("broken.txt"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(neuron, "TOOL", str(tmp_path / "nowhere"))
    with pytest.raises(SettingError, match="not installed"):
        neuron.read()


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """`tool(script)` puts a neuron-ls that runs this shell script first on the PATH."""

    def install(script: str) -> None:
        path = tmp_path / "neuron-ls"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_tool_is_run_and_its_failure_told(tool, monkeypatch):
    tool(f"cat {SAMPLES}/trn2.48xlarge-lnc2.json")
    assert neuron.read().cores == 64
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    machine = neuron.read()
    assert (machine.cores, machine.lnc, machine.core_bytes) == (128, 1, 12 * GIB)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(SettingError, match="NEURON_LOGICAL_NC_CONFIG"):
        neuron.read()
    tool("echo no neuron device found >&2; exit 1")
    with pytest.raises(SettingError, match="no neuron device found"):
        neuron.read()


def test_visible_cores():
    assert neuron.parse_cores("0-3") == [0, 1, 2, 3]
    assert neuron.parse_cores("5") == [5]
    assert neuron.parse_cores("0,2,4-5") == [0, 2, 4, 5]
    for wrong in ("", "a", "3-1", "0-", "-3", "0-3,2"):
        with pytest.raises(SettingError, match="NEURON_RT_VISIBLE_CORES"):
            neuron.parse_cores(wrong)


def test_variables_of_the_runtime():
    machine = neuron.parse(sample("trn2.48xlarge-lnc2.json"))
    visible = {"NEURON_RT_VISIBLE_CORES": "0-15", "NEURON_RT_NUM_CORES": "4"}
    assert neuron.usable_cores(machine, {}) == 64
    assert neuron.usable_cores(machine, {"NEURON_RT_NUM_CORES": "0"}) == 64
    assert neuron.usable_cores(machine, {"NEURON_RT_NUM_CORES": "4"}) == 4
    assert neuron.usable_cores(machine, visible) == 16
    with pytest.raises(SettingError, match="there are 64 logical cores"):
        neuron.usable_cores(machine, {"NEURON_RT_NUM_CORES": "65"})
    with pytest.raises(SettingError, match="names core 64, but the last logical core here is 63"):
        neuron.usable_cores(machine, {"NEURON_RT_VISIBLE_CORES": "60-64"})


def test_owner_of_cores_is_named_by_pid_without_its_arguments():
    machine = neuron.parse(sample("trn2.48xlarge-busy.json"))
    line = preflight.check_owners(machine)
    assert line.status == "FAIL"
    assert line.found == "PID 268911 (neuron-bench)"
    assert "kill" not in line.do


# --- The whole report -------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Without the import of torchtitan in a process of its own, which one test makes."""
    line = preflight.Line("OK", "torchtitan symbols", "not imported here")
    monkeypatch.setattr(preflight, "check_symbols", lambda device: line)


def by_name(lines):
    return {line.name: line for line in lines}


def test_cpu_report_skips_what_is_of_neuron(quick):
    lines = by_name(preflight.report("cpu"))
    for name in ("torch_neuronx", "Neuron SDK", "NKI", "operating system", "NeuronCores"):
        assert lines[name].status == "SKIP"
        assert lines[name].found == preflight.NOT_NEURON
    assert lines["ranks"].status in ("OK", "WARN")
    assert {line.status for line in lines.values()} <= {"OK", "WARN", "SKIP"}


def test_report_on_the_guides_machine(quick, tool, monkeypatch, tmp_path):
    tool(f"cat {SAMPLES}/trn2.48xlarge-lnc2.json")
    monkeypatch.setattr(preflight, "installed_versions", lambda: GUIDE)
    monkeypatch.setattr(preflight, "installed_sdk", lambda: SDK)
    monkeypatch.setattr(preflight.guards, "host_memory", lambda: 2000 * GIB)
    monkeypatch.setattr(preflight.assets, "model_folder", lambda profile: tmp_path / "nowhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = by_name(preflight.report("trn2"))
    assert lines["NeuronCores"].found.endswith("LNC 2, logical cores 64")
    for name in ("NeuronCores", "core variables", "ranks", "cores in use", "memory", "NKI"):
        assert lines[name].status == "OK", lines[name]
    assert lines["model"].status == "FAIL"
    assert "HF_HUB_OFFLINE" in lines["model"].found
    # 2 checkpoints of 12 bytes a parameter, an export of 4 written twice, a download of 2.
    assert lines["disk"].wanted == f"{4_022_468_096 * 34 / GIB:.1f} GiB free"


def test_report_with_nothing_of_neuron_installed_fails_and_does_not_break(
    quick, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(neuron, "TOOL", str(tmp_path / "nowhere"))
    monkeypatch.setattr(preflight, "installed_versions", lambda: {"python": "3.12.3"})
    assert preflight.main(["--profile", "trn2"]) == 1
    printed = capsys.readouterr().out
    for name in ("torch ", "torch_neuronx", "NeuronCores"):
        assert f"[FAIL] {name}" in printed
    assert str(profiles.ROOT) not in printed


def test_command_passes_on_cpu(quick, capsys):
    assert preflight.main(["--profile", "cpu"]) == 0
    assert "0 FAIL" in capsys.readouterr().out


def test_unknown_profile_is_refused():
    with pytest.raises(SettingError, match="'trn3' is unknown"):
        preflight.main(["--profile", "trn3"])


def test_damaged_model_folder_fails_the_model_line(quick, tmp_path):
    folder = toys.qwen3(tmp_path / "model")
    profile = profiles.load("cpu", model=str(folder))
    assert preflight.check_model(profile).found == "here and whole"
    (folder / "model.safetensors").write_bytes(b"")
    line = preflight.check_model(profile)
    assert line.status == "FAIL"
    assert "truncated or corrupt" in line.found


def test_token_is_shown_as_yes_or_no(monkeypatch, tmp_path):
    import huggingface_hub

    secret = "hf_" + "x" * 30
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(preflight.assets, "model_folder", lambda profile: tmp_path / "nowhere")
    line = preflight.check_model(profiles.load("trn2"))
    assert line.status == "OK"
    assert "token: yes" in line.found
    assert secret not in preflight.text([line])


def test_dataset_that_is_unknown_or_has_no_text(tmp_path):
    assert preflight.check_dataset(profiles.load("cpu")).status == "OK"
    assert preflight.check_dataset(profiles.load("cpu", dataset="c5")).status == "FAIL"
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n')
    line = preflight.check_dataset(profiles.load("cpu", dataset=str(tmp_path)))
    assert line.status == "FAIL"
    assert "line 1 of" in line.found


STUBBED = """
import sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[3:]:
    sys.modules[name] = None  # as if it were not installed
from qwen3_trainium import preflight
lines = preflight.report(sys.argv[2])
assert not {"torch", "torchtitan", "torch_neuronx"} & {k for k, v in sys.modules.items() if v}
print([line.status for line in lines if line.name == "torchtitan symbols"])
"""


@pytest.mark.parametrize("profile", ["cpu", "trn2"])
def test_report_imports_no_torch_and_initialises_no_device(profile, tmp_path):
    """A notebook that starts torchrun must not own cores itself: its ranks would find none."""
    (tmp_path / "torch_neuronx.py").write_text("raise SystemExit('a device was initialised')")
    command = [sys.executable, "-c", STUBBED, str(tmp_path), profile, "torch", "torchtitan"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "['SKIP']", done.stderr


# --- torchtitan's names -----------------------------------------------------------------------


def test_used_symbols_are_read_from_our_source():
    symbols = preflight.used_symbols()
    backend = "torchtitan.experiments.transformers_modeling_backend"
    assert (backend, "HFTransformerModel") in symbols  # from … import …
    assert (backend, "model_registry") in symbols  # compat.symbol(HF_BACKEND, …)
    assert (f"{backend}.config_registry", "transformers_modeling_backend_full") in symbols
    # A name that a variable carries reads as empty: the preflight could not look for it.
    assert all(module and name for module, name in symbols)


def test_every_symbol_of_the_installed_torchtitan_is_found():
    line = preflight.check_symbols("cpu")
    assert line.status == "OK", line.found


def test_missing_symbols_come_in_one_line(monkeypatch):
    wanted = [("torchtitan.no_such", "a"), ("torchtitan.tools.utils", "b"), ("json", "dumps")]
    monkeypatch.setattr(preflight, "used_symbols", lambda: wanted)
    line = preflight.check_symbols("cpu")
    assert line.status == "FAIL"
    assert line.found == "missing: torchtitan.no_such.a, torchtitan.tools.utils.b"


def test_symbols_line_is_skipped_without_torch(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert preflight.check_symbols("cpu").status == "SKIP"


def test_samples_say_where_they_are_from():
    readme = sample("README.md")
    for file in SAMPLES.glob("trn2.*.json"):
        json.loads(file.read_text())
        assert file.name in readme or file.name.replace("trn2.3xlarge", "") in readme
