"""Start a run with torchrun, show where it is, and say in a few lines why it failed.

A run lives in one folder: `profile.yaml`, `run.json` (what was asked, how it ended), `log.txt`,
torchtitan's own `config.json`, `tb/` and `checkpoint/`. A finished folder is never written again;
an unfinished one is continued from its last complete checkpoint.
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

from qwen3_trainium import assets, compat, files, guards, logs, profiles, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import ROOT, Profile
from qwen3_trainium.statusline import StatusLine

RUNS = ROOT / "runs"
# torchtitan's line of a step: "step:  3  loss:  8.32302  grad_norm: …  tps: 1,892 …"
STEP = re.compile(
    r"\[rank0\]:.* INFO - step:\s*(\d+)\s+loss:\s*([-\d.]+|nan|inf).*\btps:\s*([\d,]+)"
)
CHECKPOINT = re.compile(r"step-(\d+)")
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


def finished(recipe: str, config: str, profile: Profile, runs: Path = RUNS) -> Run | None:
    """An earlier run that ended well with this very profile and today's weights, or None."""
    folder = Path(runs) / recipe / config
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
    if step not in (kept := _resumable_steps(run.folder)):
        raise SettingError(
            f"{run.folder.name} keeps no full checkpoint of step {step}: choose one of {kept}"
        )
    if folder.exists():
        shutil.rmtree(folder)
    with files.written_beside(folder) as partial:
        checkpoint = Path("checkpoint") / f"step-{step}"
        shutil.copytree(run.folder / checkpoint, partial / checkpoint)
        asked = json.loads((run.folder / "run.json").read_text())["asked"]
        _write_state(partial, asked, "interrupted")
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
    step = _step_to_resume(folder, asked, overwrite=overwrite)
    command = _command(recipe, config, profile, folder, arguments, torchrun)
    built = _check(recipe, config, profile, folder, arguments)
    if step:
        _require_same_ranks(folder, built, profile)
    # From here on nothing is wrong with what was asked: only now is an old run removed.
    if step is None and folder.exists():
        shutil.rmtree(folder)
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
    code = _run(command, environment(profile, folder), folder, asked, status)
    if code:
        _write_state(folder, asked, "failed")
        text = (folder / "log.txt").read_text(errors="replace")
        summary = logs.summarise(_last_attempt(text))
        raise RunError(f"{recipe}.{config} failed with exit code {code}\n{summary}")
    _write_state(folder, asked, "complete")
    return Run(folder, profile)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwen3_trainium launch", description=__doc__)
    parser.add_argument("recipe", help="module under configs/, e.g. hf_finetune")
    parser.add_argument("config", help="config function in it, e.g. published")
    parser.add_argument("--profile", default=profiles.detect(), help="default: the detected one")
    parser.add_argument("--name", help="run folder runs/RECIPE/NAME; default: the config's name")
    parser.add_argument("--overwrite", action="store_true", help="remove a finished run first")
    parser.add_argument(
        "--torchrun", action="append", default=[], help="an option for torchrun, e.g. --nnodes=2"
    )
    parser.add_argument("arguments", nargs="*", help="after --: torchtitan's own options")
    args = parser.parse_args(argv)
    try:
        run = launch(
            args.recipe,
            args.config,
            profiles.load(args.profile),
            name=args.name,
            arguments=args.arguments,
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
    """Steps that hold optimizer and data state: torchtitan's own format, not an export."""
    return [
        step
        for step in _steps(folder)
        if (folder / "checkpoint" / f"step-{step}" / ".metadata").exists()
    ]


def _step_to_resume(folder: Path, asked: dict, *, overwrite: bool) -> int | None:
    """The step after which an unfinished run goes on, or None for a new run; changes nothing."""
    state_file = folder / "run.json"
    state = json.loads(state_file.read_text()) if state_file.exists() else None
    if state and state["status"] == "running" and _alive(state["pid"]):
        raise SettingError(
            f"{folder.name} is still running as process {state['pid']}: wait for it, or end it"
        )
    if state and state["status"] != "complete" and not overwrite:
        _require_same(state["asked"], asked, folder)
        return max(_resumable_steps(folder), default=0)
    guards.check_run_folder(folder, overwrite)
    return None


def _require_same(before: dict, now: dict, folder: Path) -> None:
    """A run is continued with the settings it began with; only the number of ranks may change."""
    may_change = {"ranks", "local_batch_size"}
    for key in before["profile"].keys() - may_change:
        if before["profile"][key] != now["profile"].get(key):
            raise SettingError(
                f"{folder.name} began with {key} {before['profile'][key]!r}, now "
                f"{now['profile'].get(key)!r} is asked: use that value, another name, or overwrite"
            )
    for key in ("recipe", "config", "arguments"):
        if before[key] != now[key]:
            raise SettingError(
                f"{folder.name} began with {key} {before[key]!r}, now {now[key]!r} is asked: use "
                "that, another name, or overwrite"
            )


def _require_same_ranks(folder: Path, built, profile: Profile) -> None:
    """Refuse to continue on other ranks where the saved position in the text belongs to a rank."""
    before = json.loads((folder / "run.json").read_text())["asked"]["profile"]["ranks"]
    if before != profile.ranks and not hasattr(built.dataloader, "streams"):
        raise SettingError(
            f"{folder.name} began on {before} ranks and its recipe deals the text out to ranks: "
            f"resume it on {before}, or use a recipe that reads streams, such as native"
        )


def _check(recipe: str, config: str, profile: Profile, folder: Path, arguments: Sequence[str]):
    """Everything that can be known to be wrong before 64 processes are started.

    Returns the torchtitan config that the ranks will build.
    """
    for warning in guards.check_ranks(profile.ranks, profile.device):
        print(f"warning: {warning}", file=sys.stderr)
    built = build_config(recipe, config, profile)
    if options := [argument for argument in arguments if argument not in OUR_OPTIONS]:
        built = _with_options(recipe, config, profile, options)
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
    guards.check_disk(folder, run_bytes(model.n_params))
    for warning in guards.check_memory(
        model,
        profile.ranks,
        profile.device,
        profile.seq_len,
        local_batch_size=profile.local_batch_size,
    ):
        print(f"warning: {warning}", file=sys.stderr)
    return built


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


def run_bytes(n_params: int) -> int:
    """Disk room for a run: two checkpoints (float32 weights and two moments) and one export,
    written twice while its shards are joined."""
    return n_params * 4 * (2 * 3 + 2)


def build_config(recipe: str, config: str, profile: Profile):
    """Call a config function as a rank of `profile` will; returns the torchtitan config."""
    from qwen3_trainium import cpu

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


def _command(recipe, config, profile, folder, arguments, torchrun) -> list[str]:
    nodes = [int(m[1]) for a in torchrun if (m := re.fullmatch(r"--nnodes=(\d+)", a))] or [1]
    if profile.ranks % nodes[0]:
        raise SettingError(
            f"{profile.ranks} ranks cannot be shared by {nodes[0]} machines: use a multiple"
        )
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(torchrun or ["--standalone"]),  # --standalone takes a free port of this machine
        f"--nproc-per-node={profile.ranks // nodes[0]}",
        *("--role", "rank", "--tee", "3"),  # every line of the log begins with its rank
        *("-m", "qwen3_trainium.train"),
        *("--module", f"configs.{recipe}", "--config", config),
        *("--dump_folder", str(folder)),
        *arguments,
    ]


def environment(profile: Profile, folder: Path) -> dict[str, str]:
    """Environment variables of a run's ranks, on top of this process's own."""
    values = dict(os.environ)
    path = [str(ROOT), *filter(None, [values.get("PYTHONPATH")])]
    values["PYTHONPATH"] = os.pathsep.join(path)  # so that `configs` is found from anywhere
    values[profiles.PROFILE_VARIABLE] = str(folder / "profile.yaml")
    values["PYTHONUNBUFFERED"] = "1"
    if profile.device == "cpu":
        cores = os.cpu_count() or 1
        values["OMP_NUM_THREADS"] = str(max(1, cores // profile.ranks))
        values.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        values["HF_DATASETS_CACHE"] = str(ROOT / ".cache" / "datasets")
    else:
        # One lasting place for compiled graphs, so that the next run of the same recipe finds them;
        # the default lies under /tmp, which a restarted instance has lost.
        cache = str(ROOT / ".cache" / "neff")
        values.setdefault("TORCH_NEURONX_NEFF_CACHE_DIR", cache)
    return values


def _run(command, environment, folder: Path, asked: dict, status: StatusLine) -> int:
    """Run torchrun, copy its output to log.txt, keep the status line going; returns its code."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # its own group, so that an interrupt ends every rank
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    _write_state(folder, asked, "running", process.pid)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    profile = asked["profile"]
    try:
        with (folder / "log.txt").open("a") as log:
            log.write(f"{ATTEMPT}{' '.join(command)}\n")
            _follow(lines, log, status, f"{asked['recipe']}.{asked['config']}", profile)
        return process.wait()
    except BaseException:
        _end(process)
        _write_state(folder, asked, "interrupted")
        raise


ATTEMPT = "=== launch: "  # begins each launch's part of a log


def _last_attempt(text: str) -> str:
    return text[text.rfind(ATTEMPT) :]


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _follow(lines, log, status: StatusLine, title: str, profile: dict) -> None:
    started = step_began = time.monotonic()
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
            first = first or (done, loss)
            left = (profile["steps"] - done) * (now - step_began)
            step_began = now
            status.show(
                f"{title}: step {done}/{profile['steps']}  loss {float(loss):.3f}  "
                f"{speed * profile['ranks']:,} tokens/s  about {left:.0f} s left"
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


def _end_with_parent() -> None:
    # Linux: the launcher gets SIGTERM when the notebook's kernel dies, and ends its ranks.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _end(process: subprocess.Popen) -> None:
    """End torchrun and every rank: first by request, then by force."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # torchrun passes it on to its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_state(folder: Path, asked: dict, status: str, pid: int | None = None) -> None:
    state = {"status": status, "pid": pid, "asked": asked}
    files.write_text(folder / "run.json", json.dumps(state, indent=2) + "\n")
