"""One set of weights through three programs: do they compute the same model?

Plain Transformers is the reference; torchtitan's Transformers backend and its native model are
built as its trainer builds them (meta device, empty memory, initialised, then loaded), each from
the config of its recipe.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from qwen3_trainium import rotary
from qwen3_trainium.attention import document_mask
from qwen3_trainium.verify import IGNORED_LABEL


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and how to run it.

    forward   (model, batch) → logits [B, S, V]; a batch is what `batches.of_run` yields
    blocks    model → its transformer blocks in order, whose outputs can be compared
    to_hf     state dict in the model's own keys → the same tensors by Hugging Face's keys
    """

    name: str
    model: nn.Module
    forward: Callable[[nn.Module, dict], torch.Tensor]
    blocks: Callable[[nn.Module], Iterable[nn.Module]]
    to_hf: Callable[[dict], dict]


@dataclasses.dataclass(frozen=True)
class Trace:
    """One forward pass. `blocks`: the output [B, S, D] of each transformer block."""

    logits: torch.Tensor
    blocks: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step; gradients (after clipping) and weights by Hugging Face's keys."""

    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Program:
    """Plain `Qwen3ForCausalLM`, as a user loads it; PyTorch's own attention operator."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    if wrong := rotary.problem(model):
        raise RuntimeError(f"{wrong}; another program in this process replaced its initialisation")

    def forward(model, batch):
        return model(
            input_ids=batch["input_ids"],
            position_ids=batch["positions"],
            attention_mask=document_mask(batch["positions"]),
            use_cache=False,
        ).logits

    return Program(
        "Transformers", model.eval(), forward, lambda model: model.model.layers, _as_stored
    )


def initialised(config, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """The model of a recipe's config as a trainer has it before loading: (model, its model spec).

    config   what a config function of `configs.hf_finetune` or `configs.native` returns
    """
    from torchtitan.config.override import apply_overrides
    from torchtitan.tools.utils import set_default_dtype

    config = copy.deepcopy(config)  # a trainer, too, changes the config that it builds from
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"), set_default_dtype(dtype):
        model = spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model, spec


def torchtitan(name: str, config, dtype: torch.dtype = torch.float32) -> Program:
    """The model of a recipe's config with the weights of its folder."""
    model, spec = initialised(config, dtype)
    adapter = spec.state_dict_adapter(spec.model, config.hf_assets_path)
    found = model.load_state_dict(
        adapter.from_hf(stored(Path(config.hf_assets_path))), strict=False
    )
    # The bias that balances experts has no place in a Hugging Face checkpoint and starts at zero.
    missing = [key for key in found.missing_keys if not key.endswith("expert_bias_E")]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"{name}: keys of one side only: {missing + found.unexpected_keys}")

    def forward(model, batch):
        positions = batch["positions"]
        masks = model.get_attention_masks(positions)
        return model(batch["input_ids"], positions=positions, attention_masks=masks)

    return Program(
        name, model.eval(), forward, lambda model: list(_values(model.layers)), adapter.to_hf
    )


def _values(layers):
    return layers.values() if hasattr(layers, "values") else layers


def _as_stored(state: dict) -> dict:
    """A plain Transformers state dict by the keys that a checkpoint has on disk.

    A tied head has no key of its own; experts, which Transformers 5 keeps fused in memory
    (`gate_up_proj` [E, 2F, D], gate first), are stored one by one.
    """
    embedding = state["model.embed_tokens.weight"]
    head = state.get("lm_head.weight")
    tied = head is not None and head.data_ptr() == embedding.data_ptr()
    found = {}
    for key, value in state.items():
        prefix, _, name = key.rpartition(".")
        if tied and key == "lm_head.weight":
            continue
        if name == "gate_up_proj":
            for e, (gate, up) in enumerate(each.chunk(2) for each in value):
                found[f"{prefix}.{e}.gate_proj.weight"] = gate
                found[f"{prefix}.{e}.up_proj.weight"] = up
        elif name == "down_proj":
            found |= {f"{prefix}.{e}.down_proj.weight": each for e, each in enumerate(value)}
        else:
            found[key] = value
    return found


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder, by Hugging Face's keys."""
    return {
        key: value
        for shard in sorted(Path(folder).glob("*.safetensors"))
        for key, value in load_file(shard).items()
    }


def most_packed(rows: Iterable[dict], count: int) -> list[dict]:
    """The batches in which most documents begin: where masks and positions matter."""
    return sorted(rows, key=lambda row: -int((row["positions"] == 0).sum()))[:count]


def joined(rows: list[dict]) -> dict:
    """Several batches as one, their rows one below the other."""
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def trace(program: Program, batch: dict) -> Trace:
    """Run one batch without gradients and keep what each block hands on."""
    outputs: list[torch.Tensor] = []

    def keep(module, arguments, output):
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())

    hooks = [block.register_forward_hook(keep) for block in program.blocks(program.model)]
    try:
        with torch.no_grad():
            logits = program.forward(program.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(logits, outputs)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats a token, float32, over the tokens that have a label."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL
    )


def step(program: Program, batch: dict, config) -> Step:
    """One step of a copy of the model with the recipe's own optimizer and gradient clipping."""
    model = copy.deepcopy(program.model).train()
    value = loss(program.forward(model, batch), batch["labels"])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
    gradients = _by_hf_keys(program, model, lambda parameter: parameter.grad)
    config.optimizer.build(model_parts=[model]).step()
    return Step(value.item(), gradients, round_trip(dataclasses.replace(program, model=model)))


def _by_hf_keys(program: Program, model: nn.Module, read) -> dict[str, torch.Tensor]:
    """Something of every parameter, passed through the adapter as if it were the weights."""
    carrier = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, other in zip(carrier.parameters(), model.parameters(), strict=True):
            parameter.copy_(read(other))
    return round_trip(dataclasses.replace(program, model=carrier))


def round_trip(program: Program) -> dict[str, torch.Tensor]:
    """The model's weights by Hugging Face's keys, as an export would store them."""
    return {key: value.detach() for key, value in program.to_hf(program.model.state_dict()).items()}


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max |a − b|, in float64 so that the comparison itself rounds nothing away."""
    return (ours.double() - theirs.double()).abs().max().item()


def gradient_difference(ours: Step, theirs: Step) -> float:
    """Largest difference of a gradient's element, relative to that tensor's largest element."""
    return max(
        largest_difference(ours.gradients[key], gradient) / gradient.abs().max().item()
        for key, gradient in theirs.gradients.items()
    )


def weight_difference(ours: Step, theirs: Step) -> float:
    """Largest difference of a weight after the step."""
    return max(
        largest_difference(ours.weights[key], weight) for key, weight in theirs.weights.items()
    )


def gradient_bound(tokens: int, widest: int, layers: int) -> float:
    """How far two right float32 programs may differ in `gradient_difference`.

    A sum of K products is off by about √K·2⁻²⁴ of its size, and a weight's gradient sums over
    `tokens`; of what flows into it, each of the 2·layers residual additions on the way forward,
    and again on the way back, brings the error of a matrix product over at most `widest` terms,
    and independent errors add as the root of their number. Four of them make a bound that random
    rounding does not exceed.
    """
    one_sum = max(tokens, widest) ** 0.5 * 2**-24
    return 4 * one_sum * (4 * layers) ** 0.5


def update_bound(ours: Step, theirs: Step, config) -> float:
    """How far weights may differ after the first step of AdamW, given the two gradients.

    From empty moments AdamW moves a weight by lr·u with u = g / (|g| + eps). Both programs round
    the weight twice, after decay and after the update: at most 2·2·2⁻²⁴ of the largest weight. To
    that comes lr times the largest difference of u, which is large only where a gradient is lost
    in rounding; `gradient_difference` is checked by itself.
    """
    kwargs = config.optimizer.param_groups[0].optimizer_kwargs

    def direction(gradient):
        return gradient.double() / (gradient.double().abs() + kwargs["eps"])

    largest = max(weight.abs().max().item() for weight in theirs.weights.values())
    turned = max(
        largest_difference(direction(ours.gradients[key]), direction(gradient))
        for key, gradient in theirs.gradients.items()
    )
    return 2**-22 * largest + kwargs["lr"] * turned


def different_tensors(ours: dict, theirs: dict) -> list[str]:
    """Keys that only one side has, or whose dtype, shape or bits differ."""
    return sorted(
        key
        for key in ours.keys() | theirs.keys()
        if key not in ours
        or key not in theirs
        or ours[key].dtype != theirs[key].dtype
        or not torch.equal(ours[key], theirs[key])
    )
