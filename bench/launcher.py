"""Tokens a second of the tiny model: this launcher, bare torchtitan, and transformers.Trainer.

One run, one machine, two ranks over Gloo. All three train the same weights on the same batches,
documents kept apart, float32, without activation checkpointing; their first losses are compared, so
that unlike work is not timed. What still differs is printed. Launcher and bare torchtitan
alternate, because what else the machine does changes; of the times from step to step the median
counts, the first left out. Exits non-zero when the launcher is more than 3 % slower than bare
torchtitan, or when first losses differ. The numbers are ratios of this run; they say nothing of
Trainium.
"""

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qwen3_trainium import assets, batches, launch, profiles, runlog, tiny, verify
from qwen3_trainium.attention import document_mask
from qwen3_trainium.profiles import Profile

STEPS = 60
ROUNDS = 3
MOST_SLOWER = 0.03
DIFFERS = """\
of transformers.Trainer: DistributedDataParallel, which copies parameters to every rank, in place of
FSDP, which shards them; no TensorBoard events; batches come ready made, not from text; no weight
decay on norms; no warm-up. Of bare torchtitan: no checks before step 1, metrics not flushed."""

# What `-m qwen3_trainium.train` is without our checks before step 1 and flushed metrics.
BARE = "from qwen3_trainium import cpu; cpu.prepare(); from torchtitan.train import main; main()"


# Training alone is measured: no checkpoints, no held-out text, nothing computed twice.
OPTIONS = (
    *("--checkpoint.interval", "1000", "--checkpoint.load_only", "--validator.no-enable"),
    "activation_checkpoint:None",
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run: the median time of a step in seconds, and the loss of step 1."""

    seconds: float
    first_loss: float


def through_launcher(profile: Profile, folder: Path) -> Measured:
    run = launch.launch("hf_finetune", "published", profile, runs=folder, arguments=OPTIONS)
    return of_torchtitan(run.folder)


def through_bare_torchtitan(profile: Profile, folder: Path) -> Measured:
    folder.mkdir(parents=True)
    profiles.save(profile, folder / "profile.yaml")
    program = folder / "bare.py"
    program.write_text(BARE)
    config = ["--module", "configs.hf_finetune", "--config", "published"]
    torchrun(profile, folder, [str(program), *config, "--dump_folder", str(folder), *OPTIONS])
    return of_torchtitan(folder)


def of_torchtitan(folder: Path) -> Measured:
    metrics = runlog.read(folder)
    return Measured(runlog.sustained(metrics).seconds.median(), metrics.loss[1])


def through_trainer(profile: Profile, folder: Path) -> Measured:
    folder.mkdir(parents=True)
    profiles.save(profile, folder / "profile.yaml")
    torchrun(profile, folder, [__file__, "--trainer", str(folder)])
    found = json.loads((folder / "measured.json").read_text())
    return Measured(statistics.median(found["seconds"]), found["first_loss"])


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


def train_with_trainer(folder: Path) -> None:
    """One rank of transformers.Trainer on the batches that torchtitan's loader gives it."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    profile = profiles.load(folder / "profile.yaml")
    config = launch.build_config("hf_finetune", "published", profile)
    ended: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ended.append(time.perf_counter())

        def on_log(self, args, state, control, logs, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        config.hf_assets_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=profile.local_batch_size,
        max_steps=profile.steps,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        learning_rate=2e-5,
        adam_beta2=0.95,
        weight_decay=0.1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    rows = trainer_rows(config, profile)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    if os.environ["RANK"] == "0":
        seconds = [after - before for before, after in itertools.pairwise(ended)]
        measured = {"seconds": seconds, "first_loss": losses[0]}
        (folder / "measured.json").write_text(json.dumps(measured))


def trainer_rows(config, profile: Profile) -> list[dict]:
    """torchtitan's batches in the order in which Trainer deals rows out: to each rank in turn."""
    every = batches.of_run(config, ranks=profile.ranks, count=profile.steps)
    by_rank = [every[i : i + profile.steps] for i in range(0, len(every), profile.steps)]
    return [
        {
            "input_ids": batch["input_ids"][0],
            "position_ids": batch["positions"][0],
            "attention_mask": document_mask(batch["positions"])[0],
            # torchtitan's labels are shifted already; Trainer counts tokens in `labels`.
            "labels": batch["labels"][0],
            "shift_labels": batch["labels"][0],
        }
        for step in zip(*by_rank, strict=True)
        for batch in step
    ]


def main() -> int:
    profile = dataclasses.replace(profiles.load("cpu"), steps=STEPS)
    release = assets.model_folder(profile)
    if not release.exists():
        run = launch.launch("hf_finetune", "pretrain", tiny.pretraining(profile), overwrite=True)
        tiny.publish(run, assets.scaffold(), release)
    tokens = profile.seq_len * profile.global_batch_size
    runs: dict[str, list[Measured]] = {"launcher": [], "bare torchtitan": []}
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(ROUNDS):
            bare = through_bare_torchtitan(profile, Path(scratch) / f"bare{i}")
            runs["bare torchtitan"].append(bare)
            runs["launcher"].append(through_launcher(profile, Path(scratch) / f"ours{i}"))
        runs["transformers.Trainer"] = [through_trainer(profile, Path(scratch) / "trainer")]
    best = {name: min(run.seconds for run in found) for name, found in runs.items()}
    losses = {name: found[0].first_loss for name, found in runs.items()}
    for name, seconds in best.items():
        print(
            f"{name:22} {tokens / seconds:8,.0f} tokens/s   median step {seconds * 1e3:.0f} ms   "
            f"first loss {losses[name]:.5f}"
        )
    print(f"What differs {DIFFERS}")
    alike = max(losses.values()) - min(losses.values()) <= verify.FLOAT32_TOLERANCE
    if not alike:
        print("first losses differ: the programs did not do the same work")
    slower = best["launcher"] / best["bare torchtitan"] - 1
    verdict = "within" if slower <= MOST_SLOWER else "MORE than"
    print(f"launcher against bare torchtitan: {slower:+.1%}, {verdict} {MOST_SLOWER:.0%}")
    return int(slower > MOST_SLOWER or not alike)


if __name__ == "__main__":
    if "--trainer" in sys.argv:
        train_with_trainer(Path(sys.argv[-1]))
    else:
        sys.exit(main())
