"""The reduced mixture-of-experts model: its model folder, and where its tokens went.

On the instance it is Qwen3-30B-A3B cut to 4 layers, 64 experts and top-4, all widths as published.
On a CPU the counts are the same and the widths small. Both start from random weights: nobody
published a model of these counts.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from qwen3_trainium import assets, data, tiny, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.files import written_beside
from qwen3_trainium.profiles import Profile

RELEASE = "Qwen/Qwen3-30B-A3B"
# The guide's cut, so that the model fits one instance; not a number of devices.
COUNTS = {"num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 4}
# Sizes all unequal, so that no transposed matrix fits by chance; the published value beside it.
SMALL = {
    "hidden_size": 64,  # 2048
    "num_attention_heads": 4,  # 32
    "num_key_value_heads": 2,  # 4
    "head_dim": 32,  # 128: not 64 / 4
    "intermediate_size": 160,  # 6144, of dense layers, of which there are none
    "moe_intermediate_size": 48,  # 768
    "vocab_size": tiny.VOCAB,  # 151936
    "max_position_embeddings": 2048,  # 40960
    "dtype": "float32",  # bfloat16
}
REST = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "router_aux_loss_coef": 0.001,
}
ROUTING = "routing.jsonl"  # in a run folder: tokens of every expert, by step and layer


def model_config(*, small: bool, **changes) -> dict:
    """config.json of the reduced model; `changes` win over everything."""
    widths = {**SMALL, "bos_token_id": 0, "eos_token_id": 2} if small else {}
    return {**weights.PUBLISHED[RELEASE], **REST, **COUNTS, **widths, **changes}


def model_folder(profile: Profile) -> Path:
    """Config and tokenizer of the reduced model, without weights: what a random start needs.

    The tokenizer is that of the profile's dense model, which is the same in every Qwen3.
    """
    small = profile.device == "cpu"
    source = assets.scaffold() if small else assets.model_folder(profile)
    folder = data.CACHE / f"moe-{source.name}"
    config = json.dumps(model_config(small=small), indent=2) + "\n"
    if (folder / "config.json").is_file() and (folder / "config.json").read_text() == config:
        return folder
    if not (source / "tokenizer.json").is_file():
        raise SettingError(
            f"{source} has no tokenizer.json: run lesson 00, which makes or downloads it"
        )
    if folder.exists():
        shutil.rmtree(folder)  # of another version of this file
    with written_beside(folder) as partial:
        (partial / "config.json").write_text(config)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (source / name).is_file():
                shutil.copy2(source / name, partial / name)
    return folder


def require_counts(experts: int, top_k: int) -> None:
    """Raise SettingError for a router that cannot choose as many experts as it is asked to."""
    if not 1 <= top_k <= experts:
        raise SettingError(
            f"top_k is {top_k}, but there are {experts} experts to choose from: "
            f"set it to 1 … {experts}"
        )


# ------------------------------------------------------------------ where tokens went
def record_routing(trainer) -> None:
    """Write how many tokens each expert got, step by step, into the run folder; rank 0's tokens.

    torchtitan counts them for its balancing and clears the counts in the optimizer step, so they
    are read just before it. Does nothing for a model without experts.
    """
    layers = moe_layers(trainer.model_parts)
    if not layers or os.environ.get("RANK", "0") != "0":
        return
    path = Path(trainer.config.dump_folder) / ROUTING
    step = trainer.optimizers.step

    def write_then_step(*arguments, **keywords):
        with path.open("a") as file:
            for layer, block in layers.items():
                counted = block.moe.tokens_per_expert_E
                counted = counted.to_local() if hasattr(counted, "to_local") else counted
                tokens = (counted / times_counted(block)).long().tolist()
                line = {"step": trainer.step, "layer": layer, "tokens": tokens}
                file.write(json.dumps(line) + "\n")
        return step(*arguments, **keywords)

    trainer.optimizers.step = write_then_step


def moe_layers(model_parts) -> dict[int, object]:
    """Transformer blocks with experts, by number."""
    return {
        int(name): block
        for part in model_parts
        for name, block in getattr(part, "layers", {}).items()
        if getattr(block, "moe_enabled", False)
    }


def times_counted(block) -> int:
    """2 where activation checkpointing runs a block's forward pass twice, and so counts twice."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    return 2 if getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT else 1


def routing(folder: Path) -> np.ndarray:
    """Tokens of rank 0 that each expert got, int [steps, layers, E], from a run folder."""
    path = Path(folder) / ROUTING
    if not path.is_file():
        raise SettingError(f"{folder.name} has no {ROUTING}: it is no run of a model with experts")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line["step"], line["layer"]): line["tokens"] for line in lines}  # last attempt wins
    steps, layers = (sorted({key[i] for key in found}) for i in (0, 1))
    return np.array([[found[step, layer] for layer in layers] for step in steps])
