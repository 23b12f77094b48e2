"""Rank 0 of the instance's 64, on this machine: `python -m qwen3_trainium dry-run`.

torchtitan's fake communication backend answers every collective without moving data. Shapes,
sharding, the optimizer and the config are real; losses mean nothing. It shows that a recipe is
built and steps at its real width; it shows nothing of Trainium.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from qwen3_trainium import assets, cpu, data, kernel_backend, launch, profiles, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.files import written_beside
from qwen3_trainium.profiles import Profile

RELEASE = "Qwen/Qwen3-4B-Instruct-2507"
OVERRIDE = re.compile(r"\[Override\] qwen3_trainium\.overrides\.(\w+): ")
PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")


def real_width_folder() -> Path:
    """A model folder of the real architecture with the tiny tokenizer and no weights."""
    folder = data.CACHE / "dry-run" / RELEASE.split("/")[1]
    if not folder.exists():
        scaffold = assets.scaffold()
        with written_beside(folder) as partial:
            config = {"model_type": "qwen3", **weights.PUBLISHED[RELEASE]}
            (partial / "config.json").write_text(json.dumps(config, indent=2))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (partial / name).write_text((scaffold / name).read_text())
    return folder


def profile_for(folder: Path, *, steps: int, seq_len: int) -> Profile:
    """The `trn2` profile with a model and a text that lie on this machine."""
    return dataclasses.replace(
        profiles.load("trn2"),
        model=str(folder),
        dataset=str(data.make() / "train"),
        steps=steps,
        seq_len=seq_len,
    )


def dry_run(recipe: str, config: str, profile: Profile, folder: Path, arguments=()) -> dict:
    """Run rank 0 of `profile.ranks` fake ones in `folder`; returns what its log says.

    Returns {"parameters": int, "steps": int, "seconds": float, "overrides": {name: modules}}.
    Raises launch.RunError with the rank's own error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profiles.save(profile, folder / "profile.yaml")
    environment = launch.environment(profile, folder)
    environment |= {
        **cpu.NO_ACCELERATOR,
        **{"NGPU": str(profile.ranks), "WORLD_SIZE": str(profile.ranks)},
        **{"RANK": "0", "LOCAL_RANK": "0"},
        **{"OMP_NUM_THREADS": str(os.cpu_count() or 1), "HF_HUB_OFFLINE": "1"},
        # A simulator at full width would take hours; that kernels are in place shows in the log.
        kernel_backend.VARIABLE: kernel_backend.REFERENCE,
    }
    command = [
        *(sys.executable, "-m", "qwen3_trainium.train"),
        *("--module", f"configs.{recipe}", "--config", config, "--dump_folder", str(folder)),
        *("--comm.mode", "fake_backend"),
        # Nothing worth saving comes out of collectives that move no data.
        *("--checkpoint.no-enable", "--validator.no-enable"),
        *arguments,
    ]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = (folder / "log.txt").read_text(errors="replace")
    if code:
        raise launch.RunError(f"dry run of {recipe}.{config} failed\n{launch.logs.summarise(text)}")
    size = PARAMETERS.search(text)
    return {
        "parameters": int(size[1].replace(",", "")) if size else 0,
        "steps": len(re.findall(r"INFO - step:", text)),
        "seconds": time.monotonic() - started,
        "overrides": dict(collections.Counter(OVERRIDE.findall(text))),
    }


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A config, the model folder it is given, and what its log must say.

    seq_len      short, because a CPU computes what a NeuronCore would
    parameters   torchtitan's own count
    overrides    {name: modules replaced}, kernels as their PyTorch references
    """

    recipe: str
    config: str
    seq_len: int
    parameters: int
    overrides: dict[str, int]
    folder: Callable[[], Path] = real_width_folder


DRY_RUNS = {
    "hf_finetune": DryRun("hf_finetune", "random", 64, 4_022_468_096, {}),
    "native": DryRun("native", "random", 64, 4_022_468_096, {"sdpa": 36}),
    # 4 × 16: tensor parallel within a chip, fully sharded across chips.
    "native-tp": DryRun("native", "tensor_parallel", 64, 4_022_468_096, {"sdpa": 36}),
    "moe": DryRun(
        *("moe_nki", "nki", 256, 1_906_330_624),
        {"nki_experts": 4, "nki_rope": 4, "sdpa": 4},
    ),
}


def faults(wanted: DryRun, found: dict, steps: int) -> list[str]:
    """What a dry run's log says otherwise than it must, one sentence each."""
    expected = {
        "parameters": wanted.parameters,
        "overrides": wanted.overrides,
        "steps": steps,
    }
    return [
        f"{name} must be {value}, found {found[name]}"
        for name, value in expected.items()
        if found[name] != value
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwen3_trainium dry-run", description=__doc__)
    parser.add_argument("--only", help=f"one of {', '.join(DRY_RUNS)}")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args(argv)
    if args.only and args.only not in DRY_RUNS:
        raise SettingError(f"dry run {args.only!r} is unknown: choose from {', '.join(DRY_RUNS)}")
    failed = False
    for name in [args.only] if args.only else DRY_RUNS:
        wanted = DRY_RUNS[name]
        profile = profile_for(wanted.folder(), steps=args.steps, seq_len=wanted.seq_len)
        print(
            f"{name}: rank 0 of {profile.ranks}, real widths, sequence {profile.seq_len} …",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as scratch:
            found = dry_run(wanted.recipe, wanted.config, profile, Path(scratch))
        replaced = ", ".join(f"{n} × {what}" for what, n in sorted(found["overrides"].items()))
        print(
            f"{name}: {found['parameters']:,} parameters, {replaced or 'nothing'} replaced, "
            f"kernels as their PyTorch references, {found['steps']} steps in "
            f"{found['seconds']:.0f} s on this CPU; not verified on hardware"
        )
        for fault in faults(wanted, found, args.steps):
            failed = True
            print(f"{name}: WRONG: {fault}")
    return int(failed)
