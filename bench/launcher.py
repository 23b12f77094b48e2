"""Tokens a second of the tiny model: this launcher, bare torchtitan, and transformers.Trainer.

One run, one machine, one config: two ranks over Gloo, the same batches. Launcher and bare
torchtitan alternate, because what else the machine does changes; of each step time the median
counts, first steps left out. Exits non-zero when the launcher is more than 3 % slower than bare
torchtitan. The numbers are ratios of this run; they say nothing of Trainium.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from qwen3_trainium import assets, launch, profiles, runlog, tiny
from qwen3_trainium.profiles import Profile

STEPS = 60
ROUNDS = 3
MOST_SLOWER = 0.03

# What `-m qwen3_trainium.train` is without our checks before step 1 and flushed metrics.
BARE = "from qwen3_trainium import cpu; cpu.prepare(); from torchtitan.train import main; main()"


def options(folder: Path) -> list[str]:
    """Training alone is measured: no checkpoints, no held-out text."""
    return [
        *("--module", "configs.hf_finetune", "--config", "published", "--dump_folder", str(folder)),
        *("--checkpoint.interval", "1000", "--checkpoint.load_only", "--validator.no-enable"),
    ]


def through_launcher(profile: Profile, folder: Path) -> float:
    arguments = options(folder)[6:]
    run = launch.launch("hf_finetune", "published", profile, runs=folder, arguments=arguments)
    return median_step(run.folder)


def through_bare_torchtitan(profile: Profile, folder: Path) -> float:
    folder.mkdir(parents=True)
    profiles.save(profile, folder / "profile.yaml")
    program = folder / "bare.py"
    program.write_text(BARE)
    torchrun(profile, folder, [str(program), *options(folder)])
    return median_step(folder)


def through_trainer(profile: Profile, folder: Path) -> float:
    folder.mkdir(parents=True)
    profiles.save(profile, folder / "profile.yaml")
    torchrun(profile, folder, [__file__, "--trainer", str(folder)])
    times = [float(line) for line in (folder / "seconds.txt").read_text().split()]
    return statistics.median(times[1:])


def torchrun(profile: Profile, folder: Path, program: list[str]) -> None:
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                f"--nproc-per-node={profile.ranks}",
                *program,
            ],
            env=launch.environment(profile, folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def median_step(folder: Path) -> float:
    return runlog.sustained(runlog.read(folder)).seconds.median()


def train_with_trainer(folder: Path) -> None:
    """One rank of transformers.Trainer on the batches that torchtitan's loader gives it."""
    import time

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from qwen3_trainium import batches

    profile = profiles.load(folder / "profile.yaml")
    config = launch.build_config("hf_finetune", "published", profile)
    rank = int(os.environ["RANK"])
    every = batches.of_run(config, ranks=profile.ranks, count=STEPS)
    rows = [
        # Trainer shifts labels itself, so they are the inputs; it packs without a document mask.
        {"input_ids": batch["input_ids"][0], "labels": batch["input_ids"][0]}
        for pair in zip(*(every[i * STEPS : (i + 1) * STEPS] for i in range(2)), strict=True)
        for batch in pair
    ]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.perf_counter() - self.began)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(config.hf_assets_path, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=profile.local_batch_size,
        max_steps=STEPS,
        learning_rate=2e-5,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    if rank == 0:
        (folder / "seconds.txt").write_text("\n".join(map(str, times)))


def main() -> int:
    profile = dataclasses.replace(profiles.load("cpu"), steps=STEPS)
    release = assets.model_folder(profile)
    if not release.exists():
        run = launch.launch("hf_finetune", "pretrain", tiny.pretraining(profile), overwrite=True)
        tiny.publish(run, assets.scaffold(), release)
    tokens = profile.seq_len * profile.global_batch_size
    seconds: dict[str, list[float]] = {"launcher": [], "bare torchtitan": []}
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(ROUNDS):
            seconds["bare torchtitan"].append(
                through_bare_torchtitan(profile, Path(scratch) / f"bare{i}")
            )
            seconds["launcher"].append(through_launcher(profile, Path(scratch) / f"ours{i}"))
        trainer = through_trainer(profile, Path(scratch) / "trainer")
    best = {name: min(values) for name, values in seconds.items()}
    for name, value in {**best, "transformers.Trainer": trainer}.items():
        print(f"{name:22} {tokens / value:8,.0f} tokens/s   median step {value * 1e3:.0f} ms")
    slower = best["launcher"] / best["bare torchtitan"] - 1
    verdict = "within" if slower <= MOST_SLOWER else "MORE than"
    print(f"launcher against bare torchtitan: {slower:+.1%}, {verdict} {MOST_SLOWER:.0%}")
    return int(slower > MOST_SLOWER)


if __name__ == "__main__":
    if "--trainer" in sys.argv:
        train_with_trainer(Path(sys.argv[-1]))
    else:
        sys.exit(main())
