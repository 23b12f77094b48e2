"""What a native model spec says about the model, beside what a checkpoint's config.json says.

torchtitan's native Qwen3 takes its numbers from a spec in code. Weights that fit a spec in every
shape still load into a wrong model when a number that has no shape differs: a rotary base, an
epsilon. So all are compared before a run, and a difference is refused.
"""

from pathlib import Path

from qwen3_trainium import moe
from qwen3_trainium.errors import SettingError
from qwen3_trainium.weights import facts, read_json

NO_SCALING = "none"
MOE_FACTS = ("experts", "top_k", "expert_ffn", "norm_topk_prob")


def spec_facts(model) -> dict:
    """Facts of a torchtitan `Qwen3Model.Config`, by the names that `checkpoint_facts` uses.

    Every layer is read; where layers differ, the fact is the sorted list of what they say.
    """

    def each_layer(read):
        found = {read(layer) for layer in model.layers}
        return found.pop() if len(found) == 1 else sorted(found, key=str)

    return {
        "layers": len(model.layers),
        "dim": model.dim,
        "heads": each_layer(lambda layer: layer.attention.n_heads),
        "kv_heads": each_layer(lambda layer: layer.attention.n_kv_heads),
        "head_dim": each_layer(lambda layer: layer.attention.head_dim),
        **_feed_forward_facts(model, each_layer),
        "vocab": model.vocab_size,
        "tied": model.enable_weight_tying,
        "eps": each_layer(
            lambda layer: (
                layer.attention_norm.eps
                if layer.attention_norm.eps
                == layer.ffn_norm.eps
                == layer.attention.qk_norm.eps
                == model.norm.eps
                else "several"
            )
        ),
        "theta": each_layer(lambda layer: layer.attention.rope.theta),
        "positions": each_layer(lambda layer: layer.attention.rope.max_seq_len),
        "rope_scaling": each_layer(lambda layer: layer.attention.rope.scaling),
    }


def _feed_forward_facts(model, each_layer) -> dict:
    """Widths of the feed-forward part; of its experts where layers have them."""
    if all(layer.moe is None for layer in model.layers):
        return {"ffn": each_layer(lambda layer: layer.feed_forward.w1.out_features)}

    def of_moe(read):
        return each_layer(lambda layer: read(layer.moe) if layer.moe is not None else 0)

    return {
        "experts": of_moe(lambda block: block.num_experts),
        "top_k": of_moe(lambda block: block.router.top_k),
        "expert_ffn": of_moe(lambda block: moe.grouped_experts(block).hidden_dim),
        "norm_topk_prob": of_moe(
            lambda block: block.router.route_norm and block.router.score_func == "softmax"
        ),
    }


def checkpoint_facts(config: dict) -> dict:
    """The same facts out of a Hugging Face config.json. SettingError when one is missing."""
    model = facts(config)
    if not config.get("max_position_embeddings"):
        raise SettingError(
            "config.json must give max_position_embeddings: use the config.json that was released "
            "with the checkpoint"
        )
    # Transformers 4 writes rope_scaling, 5 writes rope_parameters; "default" scales nothing.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {
        **{name: getattr(model, name) for name in ("layers", "dim", "heads", "kv_heads")},
        **{name: getattr(model, name) for name in ("head_dim", "vocab", "tied", "eps")},
        **{name: getattr(model, name) for name in (MOE_FACTS if model.experts else ("ffn",))},
        "theta": model.theta,
        "positions": config["max_position_embeddings"],
        "rope_scaling": NO_SCALING if kind == "default" else kind,
    }


def differences(model, config: dict) -> dict[str, tuple]:
    """Facts in which spec and config.json differ: name → (spec's value, checkpoint's value)."""
    ours, theirs = spec_facts(model), checkpoint_facts(config)
    return {
        name: (ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    }


def require_match(model, folder: Path) -> None:
    """Refuse to train `folder`'s weights in a model of other numbers; names both values."""
    if wrong := differences(model, read_json(folder / "config.json")):
        said = ", ".join(f"{name} {a!r} against {b!r}" for name, (a, b) in wrong.items())
        raise SettingError(
            f"the model spec does not describe the weights in {folder.name}, spec against "
            f"config.json: {said}; correct the spec in the recipe, or name its weights"
        )
