"""The reduced mixture-of-experts model: its model folder, and where its tokens went.

On the instance it is Qwen3-30B-A3B cut to 4 layers, 64 experts and top-4, all widths as published.
On a CPU the counts are the same and the widths small. Both start from random weights: nobody
published a model of these counts.
"""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qwen3_trainium import assets, compat, data, tiny, weights
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


def grouped_experts(block):
    """The experts of a native MoE block: its module, or the config of it.

    Since July 2026 torchtitan's experts lie beside the dispatcher in `routed_experts`, before that
    they held it. Raises SettingError for a block that has neither.
    """
    if hasattr(block, "routed_experts"):
        return block.routed_experts.inner_experts
    if hasattr(block, "experts"):
        return block.experts
    raise SettingError(
        f"{type(block).__qualname__} of the installed torchtitan has its experts neither in "
        f"routed_experts nor in experts: install {compat.TESTED}"
    )


# ------------------------------------------------------------------ where tokens went
def record_routing(trainer) -> None:
    """Write what the router did into the run folder, step by step: rank 0's tokens, and the bias.

    torchtitan counts tokens for its balancing and clears the counts in the optimizer step, so they
    are read just before it; the bias is what the step left behind. A checkpoint in Hugging Face
    form has no place for the bias. Does nothing for a model without experts.
    """
    layers = moe_layers(trainer.model_parts)
    if not layers or os.environ.get("RANK", "0") != "0":
        return
    path = Path(trainer.config.dump_folder) / ROUTING
    step = trainer.optimizers.step

    def step_and_write(*arguments, **keywords):
        counted = {
            layer: (_buffer(block.moe, "tokens_per_expert") / times_counted(block)).long().tolist()
            for layer, block in layers.items()
        }
        result = step(*arguments, **keywords)
        with path.open("a") as file:
            for layer, block in layers.items():
                line = {"step": trainer.step, "layer": layer, "tokens": counted[layer]}
                bias_E = _buffer(block.moe, "expert_bias")
                if bias_E is not None:
                    line["bias"] = bias_E.tolist()
                file.write(json.dumps(line) + "\n")
        return result

    trainer.optimizers.step = step_and_write


def _buffer(moe, name: str):
    """This rank's part of a MoE block's buffer; torchtitan's lines name it with or without _E."""
    value = getattr(moe, f"{name}_E", getattr(moe, name, None))
    return value.to_local() if hasattr(value, "to_local") else value


def moe_layers(model_parts) -> dict[int, object]:
    """Transformer blocks with experts, by number."""
    return {
        int(name): block
        for part in model_parts
        for name, block in _named(getattr(part, "layers", None))
        if getattr(block, "moe_enabled", False)
    }


def _named(layers):
    """(name, block) of a ModuleDict or a ModuleList; the Transformers backend has either."""
    return layers.named_children() if hasattr(layers, "named_children") else ()


def times_counted(block) -> int:
    """2 where activation checkpointing runs a block's forward pass twice, and so counts twice."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    return 2 if getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT else 1


def routing(folder: Path, what: str = "tokens") -> np.ndarray:
    """What a run's router did, [steps, layers, E], from its folder.

    what   "tokens" of rank 0 that each expert got, or the balancing "bias" after each step
    """
    path = Path(folder) / ROUTING
    if not path.is_file():
        raise SettingError(f"{folder.name} has no {ROUTING}: it is no run of a model with experts")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line["step"], line["layer"]): line[what] for line in lines}  # last attempt wins
    steps, layers = (sorted({key[i] for key in found}) for i in (0, 1))
    return np.array([[found[step, layer] for layer in layers] for step in steps])


@contextlib.contextmanager
def biased(model, bias_LE: np.ndarray) -> Iterator[None]:
    """A Transformers model that chooses experts with torchtitan's balancing bias, in the block.

    bias_LE   of each layer and expert. It decides who is chosen; the weights of the chosen come
              from the scores without it. Without this, an export chooses by the scores alone.
    """
    import torch

    def route(router, bias_E, hidden_states):
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = hidden_states @ router.weight.T
        scores = logits.float().softmax(-1)
        chosen = (scores + bias_E).topk(router.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    routers = [layer.mlp.gate for layer in model.model.layers]
    for router, bias_E in zip(routers, torch.as_tensor(bias_LE), strict=True):
        router.forward = functools.partial(route, router, bias_E.float())
    try:
        yield
    finally:
        for router in routers:
            del router.forward


# ------------------------------------------------------------------ the same weights elsewhere
def random_weights(folder: Path, seed: int = 0, **changes) -> Path:
    """Random weights in Hugging Face form, made by Transformers' own class; returns `folder`.

    changes   to `model_config(small=True)`. Weights are larger than at a usual start, so that
              experts and router matter to the logits.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    described = model_config(small=True, initializer_range=0.08, **changes)
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            known = {k: v for k, v in described.items() if k not in ("architectures", "dtype")}
            model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**known))
        with written_beside(folder) as partial:
            model.save_pretrained(partial)
            (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return folder


@contextlib.contextmanager
def choices(model) -> Iterator[list]:
    """In the block, collect which experts the routers of a model choose.

    Each forward pass adds one int tensor [tokens, top_k], ascending, for each layer in order.
    """
    found: list = []
    # Class of the router, and where in its result the experts' numbers are.
    places = {"TokenChoiceTopKRouter": 1, "Qwen3MoeTopKRouter": 2}

    def keep(router, arguments, result):
        chosen = result[places[type(router).__name__]]
        found.append(chosen.flatten(0, -2).sort(dim=-1).values)

    hooks = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if type(module).__name__ in places
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
