"""Start a run with torchrun, show where it is, and say in a few lines why it failed.

A run lives in one folder: `profile.yaml`, `run.json` (what was asked, under which versions, how it
ended), `log.txt`, torchtitan's own `config.json`, `tb/` and `checkpoint/`. A finished folder is
never written again; an unfinished one is continued from its last complete checkpoint, and what was
saved after that is kept in `set-aside/`.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import importlib
import io
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from qwen3_trainium import (
    assets,
    compat,
    cpu,
    files,
    guards,
    logs,
    neuron,
    preflight,
    profiles,
    weights,
)
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import ROOT, Profile
from qwen3_trainium.statusline import StatusLine

RUNS = ROOT / "runs"
# torchtitan's line of a step: "step:  3  loss:  8.32302  grad_norm: …  tps: 1,892 …"
STEP = re.compile(
    r"\[rank0\]:.* INFO - step:\s*(\d+)\s+loss:\s*([-\d.]+|nan|inf).*\btps:\s*([\d,]+)"
)
MEMORY = re.compile(r" - INFO - step:.*\bmemory:\s*([\d.]+)GiB")
CHECKPOINT = re.compile(r"step-(\d+)")
TRAINING_STATE = b"train_state"  # torchtitan's name of what only a full checkpoint holds
SET_ASIDE = "set-aside"  # folder, in the run folder, of saves later than the one resumed from
OUR_OPTIONS = ("--save-initial",)  # what `train` takes on top of torchtitan's options
GRACE = 10  # seconds that ranks get to end before they are killed


class RunError(RuntimeError):
    """A rank failed. The message holds its own error, not torchrun's report of it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    profile: Profile

    @property
    def last_checkpoint(self) -> Path:
        """The folder that torchtitan wrote last."""
        return self.folder / "checkpoint" / f"step-{max(_steps(self.folder))}"


def finished(recipe: str, config: str, profile: Profile) -> Run | None:
    """An earlier run that ended well with this very profile and today's weights, or None."""
    folder = RUNS / recipe / config
    state_file = folder / "run.json"
    if not state_file.exists():
        return None
    state = json.loads(state_file.read_text())
    weights_made = (assets.model_folder(profile) / "config.json").stat().st_mtime
    if (
        state["status"] != "complete"
        or state["asked"]["profile"] != dataclasses.asdict(profile)
        or state_file.stat().st_mtime < weights_made
    ):
        return None
    return Run(folder, profile)


def stopped_after(run: Run, step: int, name: str, *, overwrite: bool = False) -> Path:
    """A copy of a run as it would lie there had its machine stopped after `step`'s checkpoint.

    The copy is called `name`, beside `run`; launching the same config under that name resumes it.
    Raises SettingError when the name is taken or the run kept no full checkpoint of that step.
    """
    folder = run.folder.with_name(name)
    guards.check_run_folder(folder, overwrite)
    if step not in (steps := _resumable_steps(run.folder)):
        raise SettingError(
            f"{run.folder.name} keeps no full checkpoint of step {step}: choose one of {steps}"
        )
    if folder.exists():
        shutil.rmtree(folder)
    with files.written_beside(folder) as partial:
        checkpoint = Path("checkpoint") / f"step-{step}"
        shutil.copytree(run.folder / checkpoint, partial / checkpoint)
        before = json.loads((run.folder / "run.json").read_text())
        kept = {key: before[key] for key in ("asked", "ran_with") if key in before}
        _write_state(partial, kept, "interrupted")
    return folder


def launch(
    recipe: str,
    config: str,
    profile: Profile,
    *,
    name: str | None = None,
    runs: Path = RUNS,
    arguments: Sequence[str] = (),
    torchrun: Sequence[str] = (),
    overwrite: bool = False,
) -> Run:
    """Run `configs.<recipe>`'s config function on the profile's ranks and wait for it.

    recipe, config   module under `configs` and function in it
    name             run folder `runs/<recipe>/<name>`; the config's name unless given
    arguments        for `qwen3_trainium.train` and torchtitan, e.g. ["--compile.enable"]
    torchrun         for several machines, e.g. ["--nnodes=2", "--rdzv-endpoint=HOST:PORT", …]
    overwrite        remove a finished run of this name first

    Raises SettingError before anything is started, RunError with the failing rank's error.
    """
    folder = Path(runs) / recipe / (name or config)
    asked = {
        "recipe": recipe,
        "config": config,
        "arguments": list(arguments),
        "profile": dataclasses.asdict(profile),
    }
    cpu.hide_accelerators()  # before torch is imported
    record = {"asked": asked, "ran_with": _ran_with()}
    nodes = node_count(torchrun)
    step = _step_to_resume(folder, record, overwrite=overwrite)
    built, machine = _check(recipe, config, profile, folder, arguments, nodes)
    if step:
        _require_same_ranks(folder, built, profile)
    if machine:
        record["ran_with"]["lnc"] = machine.lnc
    # From here on nothing is known to be wrong with what was asked: only now is a run removed.
    if step is None and folder.exists():
        shutil.rmtree(folder)
    if step is not None:
        _set_aside_after(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    profiles.save(profile, folder / "profile.yaml")

    status = StatusLine()
    if step is not None:
        status.say(
            f"{folder.name}: unfinished run found; resuming after step {step}, its last complete "
            "checkpoint"
            if step
            else f"{folder.name}: unfinished run without a checkpoint found; starting at step 1"
        )
    # torchtitan would take the latest save, which may be an export that it cannot resume from.
    resume = ["--checkpoint.load_step", str(step)] if step else []
    command = _command(recipe, config, profile, folder, [*arguments, *resume], torchrun, nodes)
    variables = environment(profile, folder, machine)
    code = _run(command, variables, folder, record, status)
    text = logs.last_launch((folder / "log.txt").read_text(errors="replace"))
    record["peak_memory_gib"] = max(map(float, MEMORY.findall(text)), default=None)
    _write_state(folder, record, "failed" if code else "complete")
    if code:
        summary = logs.summarise(text)
        raise RunError(f"{recipe}.{config} failed with exit code {code}\n{summary}")
    return Run(folder, profile)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qwen3_trainium launch",
        description=__doc__,
        epilog="After -- come torchtitan's own options, e.g. -- --compile.enable",
    )
    parser.add_argument("recipe", help="module under configs/, e.g. hf_finetune")
    parser.add_argument("config", help="config function in it, e.g. published")
    parser.add_argument("--profile", default=profiles.detect(), help="default: the detected one")
    parser.add_argument("--name", help="run folder runs/RECIPE/NAME; default: the config's name")
    parser.add_argument("--overwrite", action="store_true", help="remove a finished run first")
    parser.add_argument(
        "--torchrun", action="append", default=[], help="an option for torchrun, e.g. --nnodes=2"
    )
    # Split here, because argparse takes no such rest after an option of ours.
    end = argv.index("--") if "--" in argv else len(argv)
    args, arguments = parser.parse_args(argv[:end]), argv[end + 1 :]
    try:
        run = launch(
            args.recipe,
            args.config,
            profiles.load(args.profile),
            name=args.name,
            arguments=arguments,
            torchrun=args.torchrun,
            overwrite=args.overwrite,
        )
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"run folder: {run.folder.relative_to(ROOT)}")
    return 0


def _steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a run folder: those whose metadata was written.

    The metadata is written last, so a save that was cut off has none.
    """
    return [
        int(CHECKPOINT.fullmatch(path.name)[1])
        for path in (folder / "checkpoint").glob("step-*")
        if CHECKPOINT.fullmatch(path.name)
        and ((path / ".metadata").exists() or any(path.glob("*.safetensors")))
    ]


def _resumable_steps(folder: Path) -> list[int]:
    """Steps from which a run can go on: those saved with optimizer and position in the text.

    torchtitan's metadata names what a checkpoint holds. An export has none, and a last save of the
    model alone names no training state.
    """

    def holds_training_state(step: int) -> bool:
        metadata = folder / "checkpoint" / f"step-{step}" / ".metadata"
        return metadata.exists() and TRAINING_STATE in metadata.read_bytes()

    return [step for step in _steps(folder) if holds_training_state(step)]


def _step_to_resume(folder: Path, record: dict, *, overwrite: bool) -> int | None:
    """The step after which an unfinished run goes on, or None for a new run; changes nothing."""
    state_file = folder / "run.json"
    state = json.loads(state_file.read_text()) if state_file.exists() else None
    if state and state["status"] == "running" and _alive(state["pid"]):
        raise SettingError(
            f"{folder.name} is still running as process {state['pid']}: wait for it, or end it"
        )
    if state and state["status"] != "complete" and not overwrite:
        _require_same(state, record, folder)
        return max(_resumable_steps(folder), default=0)
    if state and not overwrite:
        last = max(_steps(folder), default=0)
        export = (
            ""
            if last in _resumable_steps(folder)
            else (
                f", and its last save, of step {last}, is an export of weights alone "
                "(checkpoint.last_save_model_only), which cannot be continued"
            )
        )
        raise SettingError(
            f"run folder {folder} already exists and its run is finished{export}: choose another "
            "name, or pass --overwrite"
        )
    guards.check_run_folder(folder, overwrite)
    return None


def _set_aside_after(folder: Path, step: int) -> None:
    """Move saves later than `step` out of the way of the run that goes on from there.

    Neither an export nor a save that was cut off can be resumed from, and the run will reach their
    steps again: torchtitan would then write into them, and join shards of both into one export.
    """
    checkpoints = folder / "checkpoint"
    for path in checkpoints.glob("step-*"):
        if not (match := CHECKPOINT.fullmatch(path.name)) or int(match[1]) <= step:
            continue
        target = folder / SET_ASIDE / path.name
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{path.name}-{number}")
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    # Older torchtitan takes a checkpoint folder, even an empty one, for a run to resume, and then
    # does not load the published weights.
    if checkpoints.is_dir() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


def _ran_with() -> dict:
    """What a run's numbers depend on besides its settings: versions and the path of kernels."""
    from qwen3_trainium import kernel_backend  # imports torch

    return {
        "versions": {**preflight.installed_versions(), **preflight.installed_sdk()},
        "kernels": os.environ.get(kernel_backend.VARIABLE) or "by device",
    }


def _require_same(before: dict, now: dict, folder: Path) -> None:
    """A run is continued with the settings it began with; only the number of ranks may change."""
    may_change = {"ranks", "local_batch_size"}

    def settings(record: dict) -> dict:
        asked, ran_with = record["asked"], record.get("ran_with", {})
        profile = {k: v for k, v in asked["profile"].items() if k not in may_change}
        return {
            **profile,
            **{key: asked[key] for key in ("recipe", "config", "arguments")},
            "torchtitan": ran_with.get("versions", {}).get("torchtitan"),
            "kernels": ran_with.get("kernels"),
        }

    began, asked = settings(before), settings(now)
    for key, value in began.items():
        if value is not None and value != asked.get(key):
            raise SettingError(
                f"{folder.name} began with {key} {value!r}, now {asked.get(key)!r} is asked: use "
                "that value, another name, or overwrite"
            )


def _require_same_ranks(folder: Path, built, profile: Profile) -> None:
    """Refuse to continue on other ranks where the saved position in the text belongs to a rank."""
    before = json.loads((folder / "run.json").read_text())["asked"]["profile"]["ranks"]
    if before != profile.ranks and not hasattr(built.dataloader, "streams"):
        raise SettingError(
            f"{folder.name} began on {before} ranks and its recipe deals the text out to ranks: "
            f"resume it on {before}, or use a recipe that reads streams, such as native"
        )


def _check(
    recipe: str,
    config: str,
    profile: Profile,
    folder: Path,
    arguments: Sequence[str],
    nodes: int,
):
    """Refuse what can be told before 64 processes are started and load a model.

    Versions, cores, the config with its options, the model folder, text, disk, training state.
    Returns the torchtitan config that the ranks will build, and the Neuron machine or None.
    """
    machine = neuron.read() if profile.device == "neuron" else None
    _check_machine(profile, machine)
    if profile.ranks % nodes:
        raise SettingError(
            f"{profile.ranks} ranks cannot be shared by {nodes} machines: use a multiple"
        )
    for warning in guards.check_ranks(profile.ranks // nodes, profile.device, machine):
        print(f"warning: {warning}", file=sys.stderr)
    built = as_recipe = build_config(recipe, config, profile)
    if options := [argument for argument in arguments if argument not in OUR_OPTIONS]:
        built = _with_options(recipe, config, profile, options)
    if check := getattr(sys.modules[f"configs.{recipe}"], "check", None):
        check(built)  # what the recipe's own parts cannot take
    guards.check_training(built, as_recipe, profile.ranks)
    assets = Path(built.hf_assets_path)
    if built.checkpoint.initial_load_in_hf:
        model = guards.check_model_folder(assets)
    else:
        description = weights.read_json(assets / "config.json")
        model = weights.facts(description)
        guards.check_tokenizer(assets, description)
    for loader in (
        built.dataloader,
        built.validator.dataloader if built.validator.enable else None,
    ):
        if loader is not None and loader.dataset_path:
            guards.check_dataset_folder(loader.dataset_path)
    guards.check_disk(folder, guards.run_bytes(model.n_params))
    for warning in guards.check_memory(
        model,
        profile.ranks,
        profile.device,
        built.training.seq_len,
        built.training.local_batch_size,
        machine,
        nodes=nodes,
    ):
        print(f"warning: {warning}", file=sys.stderr)
    return built, machine


def _check_machine(profile: Profile, machine: neuron.Machine | None) -> None:
    """The cheap part of the preflight, from metadata alone: its first failure is refused."""
    found = preflight.installed_versions()
    lines = preflight.check_versions(found, profile.device)
    if machine:
        lines += preflight.check_sdk(preflight.installed_sdk())
        lines.append(preflight.check_nki(found.get("nki")))
        # A job that was given cores of its own shares the machine by intention.
        if "NEURON_RT_VISIBLE_CORES" not in os.environ:
            lines.append(preflight.check_owners(machine))
    for line in lines:
        if line.status == preflight.FAIL:
            raise SettingError(
                f"{line.name} is {line.found}, where {line.wanted} is wanted: {line.do}"
            )


def _with_options(recipe: str, config: str, profile: Profile, options: list[str]):
    """The config after torchtitan's own parser has read `options`; a wrong one is refused."""
    manager = compat.symbol("torchtitan.config", "ConfigManager")()
    said = io.StringIO()
    try:
        with profiles.using(profile), contextlib.redirect_stderr(said):
            return manager.parse_args(
                ["--module", f"configs.{recipe}", "--config", config, *options]
            )
    except SystemExit:  # tyro prints what is wrong in a box, and ends the process
        box = said.getvalue().partition("╮")[2].partition("─" * 20)[0]  # its first section
        reason = " ".join(box.replace("│", " ").split())
        raise SettingError(
            f"torchtitan refuses {' '.join(options)} ({reason}): see its config classes"
        ) from None


def build_config(recipe: str, config: str, profile: Profile):
    """Call a config function as a rank of `profile` will; returns the torchtitan config."""
    cpu.hide_accelerators()  # this process computes nothing on a device: its ranks do
    if profile.device == "cpu":
        cpu.prepare()  # before the config imports torchtitan
    try:
        module = importlib.import_module(f"configs.{recipe}")
    except ModuleNotFoundError as error:
        if error.name != f"configs.{recipe}":
            raise
        found = ", ".join(sorted(path.stem for path in (ROOT / "configs").glob("[a-z]*.py")))
        raise SettingError(f"recipe {recipe!r} is unknown: choose one of {found}") from None
    function = getattr(module, config, None)
    if not callable(function):
        raise SettingError(f"configs.{recipe} has no config function {config!r}: see configs/")
    with profiles.using(profile):
        return function()


def node_count(torchrun: Sequence[str]) -> int:
    """The number of machines that torchrun's options name, in either of its spellings; else 1."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--nnodes", default="1")
    said = options.parse_known_args(list(torchrun))[0].nnodes
    if not said.isdigit() or said == "0":
        raise SettingError(
            f"--nnodes is {said!r}: give one number of machines, since a run whose ranks come and "
            "go has no fixed batch"
        )
    return int(said)


def _command(recipe, config, profile, folder, arguments, torchrun, nodes) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(torchrun or ["--standalone"]),  # --standalone takes a free port of this machine
        f"--nproc-per-node={profile.ranks // nodes}",
        *("--role", "rank", "--tee", "3"),  # every line of the log begins with its rank
        *("-m", "qwen3_trainium.train"),
        *("--module", f"configs.{recipe}", "--config", config),
        *("--dump_folder", str(folder)),
        *arguments,
    ]


def environment(
    profile: Profile, folder: Path, machine: neuron.Machine | None = None
) -> dict[str, str]:
    """Environment variables of a run's ranks, on top of this process's own.

    machine   the Neuron machine, whose LNC is told to the runtime and to our kernels alike
    """
    values = cpu.with_accelerators(os.environ)
    path = [str(ROOT), *filter(None, [values.get("PYTHONPATH")])]
    values["PYTHONPATH"] = os.pathsep.join(path)  # so that `configs` is found from anywhere
    values[profiles.PROFILE_VARIABLE] = str(folder / "profile.yaml")
    values["PYTHONUNBUFFERED"] = "1"
    if profile.device == "cpu":
        cores = os.cpu_count() or 1
        values["OMP_NUM_THREADS"] = str(max(1, cores // profile.ranks))
        values.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        values["HF_DATASETS_CACHE"] = str(ROOT / ".cache" / "datasets")
        values.update(cpu.NO_ACCELERATOR)
    else:
        # One lasting place for compiled graphs, so that the next run of the same recipe finds them;
        # the default lies under /tmp, which a restarted instance has lost.
        cache = str(ROOT / ".cache" / "neff")
        values.setdefault("TORCH_NEURONX_NEFF_CACHE_DIR", cache)
        if machine:
            values[neuron.LNC_VARIABLE] = str(machine.lnc)
    return values


def _run(command, environment, folder: Path, record: dict, status: StatusLine) -> int:
    """Run torchrun, copy its output to log.txt, keep the status line going; returns its code."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that an interrupt reaches this process alone, which ends it
        preexec_fn=end_with_parent,
    )
    _write_state(folder, record, "running", process.pid)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    asked = record["asked"]
    try:
        with (folder / "log.txt").open("a") as log:
            log.write(f"{logs.LAUNCH}{' '.join(command)}\n")
            title = f"{asked['recipe']}.{asked['config']}"
            _follow(lines, log, status, title, asked["profile"])
        return process.wait()
    except BaseException:
        _end(process)
        _write_state(folder, record, "interrupted")
        raise


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _follow(lines, log, status: StatusLine, title: str, profile: dict) -> None:
    started = time.monotonic()
    first = done = loss = None
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            line = ""
        if line is None:
            break
        log.write(line)
        log.flush()
        if match := STEP.search(line):
            now = time.monotonic()
            done, loss, speed = int(match[1]), match[2], int(match[3].replace(",", ""))
            first = first or (done, loss, now)
            status.show(
                f"{title}: step {done}/{profile['steps']}  loss {float(loss):.3f}  "
                f"{speed * profile['ranks']:,} tokens/s  "
                f"{_time_left(done, first[0], now - first[2], profile['steps'])}"
            )
        elif done is None:
            waiting = "compiling at the first step" if profile["device"] == "neuron" else "starting"
            status.show(
                f"{title}: {profile['ranks']} ranks {waiting}, "
                f"{time.monotonic() - started:.0f} s so far"
            )
    if done is not None:
        status.end(
            f"{title}: steps {first[0]}-{done} of {profile['steps']} on {profile['ranks']} "
            f"rank(s), loss {float(first[1]):.3f} → {float(loss):.3f}"
        )
    else:
        status.end(f"{title}: ended before its first step")


def _time_left(done: int, first: int, seconds: float, steps: int) -> str:
    """From the steps after a launch's first, which alone holds start-up and compilation."""
    if done == first:
        return "time left is known after the next step"
    return f"about {(steps - done) * seconds / (done - first):.0f} s left"


def end_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it dies, however it dies.

    torchrun ends with the notebook's kernel, and ranks with torchrun. Linux alone can do this.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _end(process: subprocess.Popen) -> None:
    """End torchrun and every rank: first by request, then by force."""
    # Ranks have sessions of their own, so no signal to a group reaches them; and once torchrun is
    # gone nobody knows them any more. psutil kills none that took over a process number.
    ranks = []
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # torchrun passes it on to its ranks
    try:
        psutil.wait_procs(ranks, timeout=GRACE)
    finally:  # also after a second interrupt
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        process.wait()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_state(folder: Path, record: dict, status: str, pid: int | None = None) -> None:
    """Write run.json: the status, and of `record` what was asked, what ran and how it ended."""
    state = {"status": status, "pid": pid, **record}
    files.write_text(folder / "run.json", json.dumps(state, indent=2) + "\n")
