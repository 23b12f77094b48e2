"""What torchrun starts on every rank: prepare the device, call torchtitan, check before step 1.

    torchrun … -m qwen3_trainium.train [--save-initial] --module configs.NAME --config NAME …

Everything but `--save-initial` is torchtitan's own command line.
"""

import functools
import gc
import math
import sys
import time
import types
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule

from qwen3_trainium import cpu, launch, moe, profiles, spec, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import Profile

SAVE_INITIAL = "--save-initial"  # write the weights that step 1 starts from, for comparison
INITIAL = "initial"  # folder of them, in the run folder


@record  # the failing rank's own error reaches the launcher
def main() -> None:
    launch.end_with_parent()
    gc.disable()  # as the trainer does, but before the imports: a seventh of a rank's start
    on_cpu = _prepare(profiles.current())
    from torchtitan import train

    if on_cpu:
        _wait_less(sys.modules[train.Trainer.__module__])
    save_initial = SAVE_INITIAL in sys.argv
    if save_initial:
        sys.argv.remove(SAVE_INITIAL)
    train.Trainer.train = _checked(train.Trainer.train, save_initial=save_initial)
    _flush_metrics()
    train.main()


def _prepare(profile: Profile) -> bool:
    """Prepare the device that the profile names; returns whether that is the CPU.

    A dry run computes on the CPU whatever its profile. SettingError when PyTorch lacks the device.
    """
    if profile.device == "cpu" or "fake_backend" in sys.argv:
        cpu.prepare()
        return True
    found = torch._utils._get_available_device_type()
    if found != profile.device:
        raise SettingError(
            f"profile {profile.profile} trains on {profile.device}, but PyTorch finds "
            f"{found or 'no accelerator'} in its ranks: run `python -m qwen3_trainium check`"
        )
    return False


def _checked(train, *, save_initial: bool):
    """Wrap `Trainer.train` so that the model is checked between loading and the first step."""

    @functools.wraps(train)
    def checked_train(trainer) -> None:
        load = trainer.checkpointer.load

        def load_and_check(step: int = -1) -> bool:
            loaded = load(step)
            for model in trainer.model_parts:
                require_described(model, Path(trainer.config.hf_assets_path))
                require_sound(model, "before the first step")
            if save_initial and trainer.step == 0:
                _save_initial(trainer)
            checkpoint = trainer.config.checkpoint
            if checkpoint.enable and checkpoint.initial_load_in_hf and trainer.step == 0:
                _judge_first_loss(trainer)
            moe.record_routing(trainer)
            return loaded

        trainer.checkpointer.load = load_and_check
        train(trainer)
        for model in trainer.model_parts:
            require_sound(model, "after the last step")

    return checked_train


def _judge_first_loss(trainer) -> None:
    """Let a run of published weights stop at step 1 where its loss shows that none were loaded."""
    log = trainer.metrics_processor.log
    described = weights.read_json(Path(trainer.config.hf_assets_path) / "config.json")

    @functools.wraps(log)
    def log_and_judge(step: int, loss: float, *args, **kwargs) -> None:
        log(step, loss, *args, **kwargs)
        if step == 1:
            require_learned(loss, described["vocab_size"])

    trainer.metrics_processor.log = log_and_judge


def require_learned(loss: float, vocab: int) -> None:
    """Stop a run whose first loss is that of weights which know nothing of the text.

    Whoever holds all of V tokens for equally likely has a loss of ln V. Random weights prefer some
    tokens, none with reason, which can only cost: their expected loss is higher still.
    """
    if loss > math.log(vocab):
        raise RuntimeError(
            f"the loss of step 1 is {loss:.2f}, worse than the {math.log(vocab):.2f} of guessing "
            f"among {vocab:,} tokens, so the published weights were not loaded or belong to "
            "another config or tokenizer: download the model folder again, or start the recipe's "
            "random config if that is what you want"
        )


def _wait_less(trainer_module) -> None:
    """Let rank 0 wait a fifth of a second for the others at the end, in place of two seconds.

    Upstream gives ranks on other machines time to finish; on one machine they end together.
    """
    trainer_module.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: time.sleep(min(seconds, 0.2))
    )


def _flush_metrics() -> None:
    """Write each step's metrics at once, so that a killed run leaves its curve behind."""
    from torchtitan.components.metrics import TensorBoardLogger

    log = TensorBoardLogger.log

    def log_and_flush(self, metrics: dict, step: int) -> None:
        log(self, metrics, step)
        self.writer.flush()

    TensorBoardLogger.log = log_and_flush


def require_sound(model, when: str) -> None:
    """Stop a run whose rotary frequencies or tied head are wrong, or not where they are looked for.

    Raises RuntimeError, on every rank, naming what was found.
    """
    from torchtitan.tools.logging import logger

    from qwen3_trainium import rotary

    if wrong := rotary.problem(model):
        raise RuntimeError(wrong)
    if tie_is_broken(model):
        raise RuntimeError(
            f"lm_head.weight and the embeddings' weight are two parameters {when}, although the "
            "config ties them: their updates would part; check the sharding of the model"
        )
    rotary_count = len(rotary.rotary_modules(model)) + len(rotary.native_modules(model))
    if not rotary_count:
        raise RuntimeError(
            f"no rotary module was found {when}, so its frequencies cannot be proven right: teach "
            "qwen3_trainium.rotary the names that this torchtitan or override gives them"
        )
    logger.info(f"[Check] {when}: {rotary_count} rotary module(s) right, head tied as configured")


def require_described(model, folder: Path) -> None:
    """Stop a run whose Transformers model was built with other numbers than `folder` describes.

    The backend lays settings of its own over config.json, and weights load into a model of another
    rotary base or epsilon without a word. A native spec is compared before, by `spec`. Raises
    RuntimeError naming the numbers that differ.
    """
    config = getattr(getattr(model, "model", None), "config", None)
    if config is None:
        return
    # Its own to_dict leaves most of it out.
    built = spec.checkpoint_facts({**vars(config), "architectures": config.architectures})
    said = spec.checkpoint_facts(weights.read_json(folder / "config.json"))
    del said["positions"]  # the backend keeps as many as a run's sequences need
    if wrong := {name: (built[name], said[name]) for name in said if built[name] != said[name]}:
        differ = ", ".join(f"{name} {a!r} against {b!r}" for name, (a, b) in wrong.items())
        raise RuntimeError(
            f"the model is not the one that {folder.name} describes, built against config.json: "
            f"{differ}; take the setting that changes it out of the recipe"
        )


def tie_is_broken(model) -> bool:
    """Whether a config ties the head to the embeddings and the model holds two parameters."""
    config = getattr(getattr(model, "model", model), "config", None)
    # Transformers' name of the setting, and the native model's.
    names = ("tie_word_embeddings", "enable_weight_tying")
    if not any(getattr(config, name, False) for name in names):
        return False
    # A forward pass without a backward leaves FSDP's modules holding gathered copies, of which
    # only one name may be set: compare the parameters that training keeps.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model.lm_head.weight is not model.tok_embeddings.weight


def _save_initial(trainer) -> None:
    """Save the starting weights through torchtitan's own Hugging Face export."""
    checkpointer = trainer.checkpointer
    checkpointer.dcp_save(
        checkpointer.states["model"].state_dict(),
        checkpoint_id=str(Path(trainer.config.dump_folder) / INITIAL),
        async_mode="disabled",
        to_hf=True,
    )


if __name__ == "__main__":
    main()
