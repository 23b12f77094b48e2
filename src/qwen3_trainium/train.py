"""What torchrun starts on every rank: prepare the device, call torchtitan, check before step 1.

    torchrun … -m qwen3_trainium.train [--save-initial] --module configs.NAME --config NAME …

Everything but `--save-initial` is torchtitan's own command line.
"""

import functools
import sys
import time
import types
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule

from qwen3_trainium import cpu, moe

SAVE_INITIAL = "--save-initial"  # write the weights that step 1 starts from, for comparison
INITIAL = "initial"  # folder of them, in the run folder


@record  # the failing rank's own error reaches the launcher
def main() -> None:
    on_cpu = cpu.prepare()
    from torchtitan import train

    if on_cpu:
        _wait_less(sys.modules[train.Trainer.__module__])
    save_initial = SAVE_INITIAL in sys.argv
    if save_initial:
        sys.argv.remove(SAVE_INITIAL)
    train.Trainer.train = _checked(train.Trainer.train, save_initial=save_initial)
    _flush_metrics()
    train.main()


def _checked(train, *, save_initial: bool):
    """Wrap `Trainer.train` so that the model is checked between loading and the first step."""

    @functools.wraps(train)
    def checked_train(trainer) -> None:
        load = trainer.checkpointer.load

        def load_and_check(step: int = -1) -> bool:
            loaded = load(step)
            for model in trainer.model_parts:
                require_sound(model, "before the first step")
            if save_initial and trainer.step == 0:
                _save_initial(trainer)
            moe.record_routing(trainer)
            return loaded

        trainer.checkpointer.load = load_and_check
        train(trainer)
        for model in trainer.model_parts:
            require_sound(model, "after the last step")

    return checked_train


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
    """Stop a run whose rotary frequencies or tied head are wrong.

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
    logger.info(f"[Check] {when}: {rotary_count} rotary module(s) right, head tied as configured")


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
