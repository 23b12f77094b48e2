"""Real runs on two ranks: killed, resumed, interrupted, failed; and refused before they start."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import toys

from qwen3_trainium import (
    export,
    guards,
    launch,
    neuron,
    preflight,
    profiles,
    runlog,
    verify,
)
from qwen3_trainium.errors import SettingError

SECRET = "hf_aSecretThatNoFileMayHold"
STEPS = 12  # with a checkpoint after step 6
KILLED_AT = 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def profile(toy_profile):
    return dataclasses.replace(toy_profile, steps=STEPS)


@pytest.fixture(scope="module")
def whole_run(profile, runs):
    """A run that nothing disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        return launch.launch(
            "hf_finetune",
            "published",
            profile,
            name="whole",
            runs=runs,
            arguments=["--save-initial"],
        )


def ranks_of(folder: Path) -> list[int]:
    """Processes that train into a run folder, torchrun itself left out."""
    found = subprocess.run(
        ["pgrep", "-f", f"qwen3_trainium.train.*{folder}"], capture_output=True, text=True
    ).stdout.split()
    return [
        pid
        for pid in map(int, found)
        if "torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def kill_one_rank_after(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    reached = re.compile(rf"INFO - step:\s+{step}\s")
    while time.monotonic() < deadline:
        log = folder / "log.txt"
        if log.exists() and reached.search(log.read_text(errors="replace")):
            os.kill(ranks_of(folder)[-1], signal.SIGKILL)
            return
        time.sleep(0.02)


def test_killed_run_resumes_where_it_was(whole_run, profile, runs, capsys):
    folder = runs / "hf_finetune" / "killed"
    killer = threading.Thread(target=kill_one_rank_after, args=(folder, KILLED_AT))
    killer.start()
    with pytest.raises(launch.RunError, match=r"SIGKILL|-9"):
        launch.launch("hf_finetune", "published", profile, name="killed", runs=runs)
    killer.join()
    kept = folder / "checkpoint" / "step-6"
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    lost = runlog.read(folder)
    assert lost.index.max() >= KILLED_AT, "the curve of a killed run is kept"

    # What a save cut off by the kill would have left: no metadata, so it is no checkpoint.
    half = folder / "checkpoint" / "step-9"
    half.mkdir()
    shutil.copy(next(kept.glob("*.distcp")), half)
    # And what a kill after the last save would have left: an export, from which no run goes on.
    shutil.copytree(whole_run.last_checkpoint, folder / "checkpoint" / f"step-{STEPS}")
    stale = {path.name for path in whole_run.last_checkpoint.iterdir()}

    run = launch.launch("hf_finetune", "published", profile, name="killed", runs=runs)
    assert "resuming after step 6" in capsys.readouterr().out
    assert f"Loading the checkpoint from {kept}" in (folder / "log.txt").read_text()
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    # Nothing saved is lost, and nothing is written into what was saved before.
    aside = folder / launch.SET_ASIDE
    assert sorted(path.name for path in aside.iterdir()) == [f"step-{STEPS}", "step-9"]
    assert {path.name for path in (aside / f"step-{STEPS}").iterdir()} == stale
    assert run.last_checkpoint == folder / "checkpoint" / f"step-{STEPS}"
    expected, resumed = runlog.read(whole_run.folder), runlog.read(run.folder)
    assert list(resumed.index) == list(range(1, STEPS + 1))
    columns = ["loss", "grad_norm", "learning_rate"]
    # Same ranks, same order of operations, same data: the same bits.
    assert resumed[columns].equals(expected[columns])
    events = sorted((run.folder / "tb").rglob("events.*"))
    assert len(events) == 2


def test_finished_run_is_not_written_again(whole_run, profile, runs):
    before = sorted(whole_run.folder.rglob("*"))
    longer = dataclasses.replace(profile, steps=2 * STEPS)
    with pytest.raises(SettingError, match="already exists") as refusal:
        launch.launch("hf_finetune", "published", longer, name="whole", runs=runs)
    assert f"its last save, of step {STEPS}, is an export of weights alone" in str(refusal.value)
    assert "last_save_model_only" in str(refusal.value)
    assert sorted(whole_run.folder.rglob("*")) == before


def test_overwriting_with_wrong_settings_loses_nothing(whole_run, profile, runs):
    before = sorted(whole_run.folder.rglob("*"))
    missing = dataclasses.replace(profile, model=str(runs / "nowhere"))
    with pytest.raises(SettingError):
        launch.launch("hf_finetune", "published", missing, name="whole", runs=runs, overwrite=True)
    assert sorted(whole_run.folder.rglob("*")) == before


def test_run_folder_tells_what_ran_and_no_secret(whole_run, profile, toy_release):
    assert profiles.load(whole_run.folder / "profile.yaml") == profile
    facts = guards.check_model_folder(toy_release)
    assert runlog.identity(whole_run.folder) == {"parameters": facts.n_params, "ranks": 2}
    state = json.loads((whole_run.folder / "run.json").read_text())
    assert state["status"] == "complete"
    installed = {name: importlib.metadata.version(name) for name in ("torch", "torchtitan")}
    assert state["ran_with"]["versions"].items() >= installed.items()
    assert state["ran_with"]["kernels"] == "by device"
    peak = runlog.read(whole_run.folder).memory_gib.max()
    assert state["peak_memory_gib"] == pytest.approx(peak, abs=0.006)  # the log has two digits
    for path in whole_run.folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_training_and_export_equal_plain_transformers(whole_run, profile, toy_release, tmp_path):
    from qwen3_trainium import batches

    config = launch.build_config("hf_finetune", "published", profile)
    metrics = runlog.read(whole_run.folder)
    start = verify.heldout_loss(toy_release, batches.of_run(config, ranks=2))
    assert metrics.loss[1] == pytest.approx(start, abs=1e-4)

    # The weights that step 1 starts from are the release's, bit for bit.
    initial = export.complete(whole_run.folder / "initial", toy_release, tmp_path / "initial")
    assert verify.tensor_changes(toy_release, initial).largest.max() == 0.0

    exported = export.complete(whole_run.last_checkpoint, toy_release, tmp_path / "export")
    heldout = batches.of_run(config, ranks=2, heldout=True, count=config.validator.steps)
    findings = verify.verify(exported, toy_release, heldout, metrics.heldout_loss[STEPS])
    assert [finding.id for finding in findings if not finding.passed] == []
    with pytest.raises(SettingError, match="already exists"):
        export.complete(whole_run.last_checkpoint, toy_release, tmp_path / "export")


def test_export_that_lacks_a_tensor_leaves_nothing(whole_run, toy_release, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(whole_run.last_checkpoint, saved)
    shard = sorted(saved.glob("*.safetensors"))[0]
    toys.edit_weights(saved, lambda tensors: tensors.pop(next(iter(tensors))), shard.name)
    with pytest.raises(SettingError):
        export.complete(saved, toy_release, tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_failure_shows_the_ranks_own_error_in_few_lines(profile, runs):
    with pytest.raises(launch.RunError) as failure:
        launch.launch(
            "hf_finetune",
            "published",
            profile,
            name="failed",
            runs=runs,
            arguments=["--training.gc_freq", "0"],
        )
    message = str(failure.value)
    assert "gc_freq must be a positive integer" in message
    assert len(message.splitlines()) <= 8
    assert "ChildFailedError" not in message


def test_interrupt_ends_every_rank(profile, tmp_path):
    profiles.save(profile, tmp_path / "profile.yaml")
    folder = tmp_path / "hf_finetune" / "published"
    program = (
        "import sys; from pathlib import Path; from qwen3_trainium import launch, profiles\n"
        "p = profiles.load(Path(sys.argv[1]) / 'profile.yaml')\n"
        "launch.launch('hf_finetune', 'published', p, runs=Path(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(ranks_of(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks_of(folder)) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert ranks_of(folder) == []


def refuse(profile, tmp_path, match: str, **arguments) -> None:
    """Launching raises one sentence, starts nothing and leaves no run folder."""
    with pytest.raises(SettingError, match=match) as refusal:
        launch.launch("hf_finetune", "published", profile, runs=tmp_path / "runs", **arguments)
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "runs").rglob("*.txt"))
    assert not (tmp_path / "runs" / "hf_finetune" / "published").exists()


def release_with(tmp_path, toy_profile, change) -> profiles.Profile:
    """The profile of a release that `change(folder)` has damaged."""
    folder = tmp_path / "release"
    shutil.copytree(toy_profile.model, folder)
    change(folder)
    return dataclasses.replace(toy_profile, model=str(folder))


def truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])


def corrupt(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[8:24] = b"\x00" * 16
    shard.write_bytes(data)


DAMAGES = {
    "missing shard": (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "00002"),
    "truncated": (truncate, "truncated or corrupt"),
    "corrupt": (corrupt, "truncated or corrupt"),
    "tokenizer larger than the vocabulary": (lambda folder: toys.tokenizer(folder, 99), "vocab"),
    "no weights at all": (
        lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")],
        "safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_release_is_refused(damage, toy_profile, tmp_path):
    change, match = DAMAGES[damage]
    refuse(release_with(tmp_path, toy_profile, change), tmp_path, match)


def test_dataset_without_text_is_refused(toy_profile, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"content": "no text here"}\n')
    profile = dataclasses.replace(toy_profile, dataset=str(tmp_path / "data"))
    refuse(profile, tmp_path, "text")


def test_more_ranks_than_the_machine_has_are_refused(toy_profile, tmp_path):
    profile = dataclasses.replace(toy_profile, ranks=4096, global_batch_size=4096)
    refuse(profile, tmp_path, "4096 ranks")


def test_ranks_are_counted_on_one_machine_of_several(toy_profile, tmp_path, monkeypatch):
    """16 ranks on two machines of two CPU cores are eight on each; on one they are too many."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    profile = dataclasses.replace(toy_profile, ranks=16, global_batch_size=16)
    refuse(profile, tmp_path, "16 ranks are more")
    check = ["hf_finetune", "published", profile, tmp_path / "run", []]
    built, machine = launch._check(*check, nodes=launch.node_count(["--nnodes", "2"]))
    assert (built.training.global_batch_size, machine) == (16, None)
    refuse(profile, tmp_path, "16 ranks cannot be shared by 3", torchrun=["--nnodes=3"])
    refuse(profile, tmp_path, "'1:2'", torchrun=["--nnodes=1:2"])
    for spelling in (["--nnodes=2", "--rdzv-id=1"], ["--rdzv-id=1", "--nnodes", "2"]):
        nodes = launch.node_count(spelling)
        command = launch._command("r", "c", profile, tmp_path, [], spelling, nodes)
        assert "--nproc-per-node=8" in command
        assert "--standalone" not in command


# What a run would only tell by its numbers, or when 64 processes have started.
WRONG_STARTS = {
    "no checkpoints, so no weights": (["--checkpoint.no-enable"], "checkpoint.enable is off"),
    "random under a published name": (
        ["--checkpoint.no-initial_load_in_hf"],
        "initial_load_in_hf is switched off",
    ),
    "weights that do not move": (["--training.dtype", "bfloat16"], "do not move .* 2e-05"),
    "no whole batch": (["--training.global_batch_size", "3"], "3 is no multiple of 2"),
    "no whole mesh": (["--parallelism.tensor_parallel_degree", "3"], "take 3 ranks together"),
    "another step than the launcher's": (["--checkpoint.load_step", "999"], "load_step is 999"),
}


@pytest.mark.parametrize("wrong", WRONG_STARTS)
def test_options_that_spoil_a_start_are_refused(wrong, toy_profile, tmp_path):
    options, match = WRONG_STARTS[wrong]
    refuse(toy_profile, tmp_path, match, arguments=options)


def test_batch_that_ranks_cannot_share_is_refused(toy_profile, tmp_path):
    refuse(dataclasses.replace(toy_profile, global_batch_size=3), tmp_path, "3 is no multiple of 2")


def test_memory_is_that_of_the_options(toy_profile, tmp_path, capsys):
    check = ["hf_finetune", "random", toy_profile, tmp_path / "run"]
    launch._check(*check, [], 1)
    assert "copies of the logits" not in capsys.readouterr().err
    large = ["--training.seq_len", "100000", "--training.local_batch_size", "4000"]
    launch._check(*check, [*large, "--training.global_batch_size", "8000"], 1)
    assert "copies of the logits" in capsys.readouterr().err


@pytest.mark.parametrize("ours", [["--name", "x", "r", "c"], ["r", "c", "--name", "x"]])
def test_command_passes_options_on(ours, monkeypatch):
    asked = {}

    def launched(recipe, config, profile, **options):
        asked.update(options, recipe=recipe, config=config)
        return launch.Run(profiles.ROOT / "runs" / "r" / "x", profile)

    monkeypatch.setattr(launch, "launch", launched)
    rest = ["--compile.enable", "--training.steps", "3"]
    assert launch.main([*ours, "--torchrun=--nnodes=2", "--", *rest]) == 0
    assert (asked["recipe"], asked["config"], asked["name"]) == ("r", "c", "x")
    assert asked["arguments"] == rest
    assert asked["torchrun"] == ["--nnodes=2"]


def test_other_versions_are_refused(toy_profile, tmp_path, monkeypatch):
    found = preflight.installed_versions()
    monkeypatch.setattr(preflight, "installed_versions", lambda: {**found, "torch": "2.13.0"})
    refuse(toy_profile, tmp_path, "torch is 2.13.0, where 2.14 is wanted")


def test_full_disk_is_refused(toy_profile, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(guards.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refuse(toy_profile, tmp_path, "free")


def test_unknown_recipe_and_config_are_refused(toy_profile, tmp_path):
    with pytest.raises(SettingError, match="hf_finetune"):
        launch.launch("hf_finetuning", "published", toy_profile, runs=tmp_path)
    with pytest.raises(SettingError, match="publish"):
        launch.launch("hf_finetune", "publish", toy_profile, runs=tmp_path)
    assert not list(tmp_path.rglob("*.txt"))


@pytest.mark.parametrize(
    ("option", "value"), [("--training.stepz", "3"), ("--training.steps", "three")]
)
def test_wrong_torchtitan_option_is_refused(option, value, toy_profile, tmp_path):
    refuse(toy_profile, tmp_path, option, arguments=[option, value])


def test_unfinished_run_refuses_other_settings(toy_profile, tmp_path):
    folder = tmp_path / "hf_finetune" / "published"
    folder.mkdir(parents=True)
    asked = {
        "recipe": "hf_finetune",
        "config": "published",
        "arguments": [],
        "profile": dataclasses.asdict(toy_profile),
    }
    record = {"asked": asked, "ran_with": launch._ran_with()}
    launch._write_state(folder, record, "failed")
    other = dataclasses.replace(toy_profile, steps=20)
    with pytest.raises(SettingError, match="began with steps 8, now 20"):
        launch.launch("hf_finetune", "published", other, runs=tmp_path)
    (folder / "checkpoint" / "step-4").mkdir(parents=True)
    # An export of weights has metadata in torchtitan's own format as well; it has no such state.
    (folder / "checkpoint" / "step-4" / ".metadata").write_bytes(b"model.norm.weight")
    assert launch._resumable_steps(folder) == []
    (folder / "checkpoint" / "step-4" / ".metadata").write_bytes(b"train_state")
    fewer = dataclasses.replace(toy_profile, ranks=1)
    with pytest.raises(SettingError, match="began on 2 ranks"):
        launch.launch("hf_finetune", "published", fewer, runs=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN3_TRAINIUM_KERNELS", "reference")
        with pytest.raises(SettingError, match="began with kernels 'by device', now 'reference'"):
            launch.launch("hf_finetune", "published", toy_profile, runs=tmp_path)
    record["ran_with"]["versions"]["torchtitan"] = "0.2.2"
    launch._write_state(folder, record, "failed")
    with pytest.raises(SettingError, match=r"began with torchtitan '0\.2\.2', now '0\.3\.0'"):
        launch.launch("hf_finetune", "published", toy_profile, runs=tmp_path)
    launch._write_state(folder, record, "running", os.getpid())
    with pytest.raises(SettingError, match="still running"):
        launch.launch("hf_finetune", "published", toy_profile, runs=tmp_path)


def test_compiled_graphs_outlive_a_run_on_neuron(toy_profile, tmp_path, monkeypatch):
    name = "TORCH_NEURONX_NEFF_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)
    neuron = dataclasses.replace(toy_profile, device="neuron")
    assert launch.environment(neuron, tmp_path)[name].startswith(str(profiles.ROOT))
    monkeypatch.setenv(name, "/shared/cache")
    assert launch.environment(neuron, tmp_path)[name] == "/shared/cache"
    monkeypatch.delenv(name)
    assert name not in launch.environment(toy_profile, tmp_path)


def test_lnc_is_told_to_ranks(toy_profile, tmp_path, monkeypatch):
    """By what neuron-ls says; our kernels would take 2 for granted on a machine set to 1."""
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    profile = dataclasses.replace(toy_profile, device="neuron")
    machine = neuron.Machine(chips=1, cores_per_chip=8, lnc=1, core_bytes=12 * 2**30)
    assert launch.environment(profile, tmp_path, machine)["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert "NEURON_LOGICAL_NC_CONFIG" not in launch.environment(toy_profile, tmp_path)


# A fake machine: there is no neuron-ls here.
ONE_CHIP = """#!/bin/sh
echo '[{"neuron_device": 0, "nc_count": 4, "logical_neuroncore_config": 2,
"memory_size": 103079215104, "neuron_processes": [OWNERS]}]'
"""
RIGHT = {
    "python": "3.12.1",
    **{"torch": "2.14.0", "torchtitan": "0.2.2+neuron.1", "transformers": "5.16.0"},
    **{"torch_neuronx": "2.14.3", "nki": "0.7.0"},
}


def test_cheap_part_of_the_preflight_stands_before_a_launch(toy_profile, tmp_path, monkeypatch):
    tool = tmp_path / "neuron-ls"
    tool.write_text(ONE_CHIP.replace("OWNERS", '{"pid": 4321, "command": "python train.py"}'))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    profile = dataclasses.replace(toy_profile, device="neuron")
    monkeypatch.setattr(preflight, "installed_sdk", dict)

    def refused(versions: dict, match: str) -> None:
        monkeypatch.setattr(preflight, "installed_versions", lambda: versions)
        refuse(profile, tmp_path, match)

    refused({**RIGHT, "torch_neuronx": "2.9.0.2.13"}, "legacy XLA product")
    refused({**RIGHT, "nki": "0.3.0"}, "NKI is 0.3.0")
    refused(RIGHT, r"cores in use is PID 4321 \(python\)")
    monkeypatch.setattr(preflight, "installed_sdk", lambda: {"runtime": "2.31.1"})
    refused(RIGHT, "Neuron runtime is 2.31.1")
    monkeypatch.setattr(preflight, "installed_sdk", dict)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")  # cores of its own: others have theirs
    _, machine = launch._check("hf_finetune", "published", profile, tmp_path / "run", [], nodes=1)
    assert machine.lnc == 2


# Stand-ins for torchrun and a rank that does not end when asked to.
DISOBEDIENT = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True); time.sleep(600)"
)
STARTER = f"""
import subprocess, sys, time
rank = subprocess.Popen(
    [sys.executable, "-c", {DISOBEDIENT!r}], stdout=subprocess.PIPE, start_new_session=True
)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(600)
"""


def end(rank: psutil.Process) -> None:
    """Leave nothing behind where a test fails."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.kill()


def test_rank_that_does_not_obey_is_ended_too(monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.5)
    torchrun = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    rank = psutil.Process(int(torchrun.stdout.readline()))
    try:
        launch._end(torchrun)
        assert torchrun.poll() is not None
        rank.wait(5)
    finally:
        end(rank)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a parent has died")
def test_rank_ends_when_torchrun_is_killed():
    rank_program = (
        "import time; from qwen3_trainium import launch\n"
        "launch.end_with_parent(); print('up', flush=True); time.sleep(600)"
    )
    torchrun = subprocess.Popen(
        [sys.executable, "-c", STARTER.replace(repr(DISOBEDIENT), repr(rank_program))],
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = psutil.Process(int(torchrun.stdout.readline()))
    try:
        torchrun.kill()
        torchrun.wait()
        rank.wait(5)
    finally:
        end(rank)


def test_time_left_leaves_out_the_first_step():
    """Two steps after the first took two seconds, so seven more take seven."""
    assert "known after" in launch._time_left(done=1, first=1, seconds=0.0, steps=10)
    assert launch._time_left(done=3, first=1, seconds=2.0, steps=10) == "about 7 s left"
    assert launch._time_left(done=8, first=7, seconds=1.0, steps=10) == "about 2 s left"
