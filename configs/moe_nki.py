"""The guide's third recipe: Qwen3 mixture of experts, its experts computed by NKI kernels.

    torchrun … -m qwen3_trainium.train --module configs.moe_nki --config nki

Starts from torchtitan's `qwen3_30b_a3b`, cut to 4 layers, 64 experts and top-4. All ranks shard
all parameters and each rank computes all experts: the number of experts is a number in the model,
not a number of devices. Router, balancing, dispatch and combination are torchtitan's own.
"""

from collections.abc import Sequence
from pathlib import Path

from configs import _common
from configs._common import NKI_EXPERTS, NKI_ROPE, SDPA
from qwen3_trainium import compat, moe, profiles, spec, weights
from qwen3_trainium.profiles import Profile


def build(
    profile: Profile,
    *,
    overrides: Sequence[str],
    folder: Path | None = None,
    published: bool = False,
    described: dict | None = None,
):
    """torchtitan config of one run.

    overrides   import paths of what is replaced. FlexAttention has no backward on CPU and no
                kernel on Neuron, so one for attention is always among them
    folder      Hugging Face model folder; `moe.model_folder`, without weights, unless given
    published   True starts from the safetensors in `folder`, False from random weights
    described   config.json of the model to build; that of the reduced model unless given
    Raises SettingError when that is not the model that the folder's own config.json describes, and
    for what the kernels among `overrides` cannot compute.
    """
    folder = folder or moe.model_folder(profile)
    config = compat.moe_config()
    config.model_spec = model_spec(described or moe.model_config(small=profile.device == "cpu"))
    spec.require_match(config.model_spec.model, folder)
    compat.set_fields(config.loss.loss_fn, global_vocab_size=config.model_spec.model.vocab_size)
    compat.set_fields(config.override, imports=list(overrides))
    _common.set_run(config, profile, folder, published=published)
    # Every rank owns a slice of every expert; none owns an expert. Eager, as in the guide.
    compat.set_fields(config.parallelism, expert_parallel_degree=1)
    compat.set_fields(config.compile, enable=False)
    compat.set_fields(config.lr_scheduler, warmup_steps=2, decay_ratio=0.8)
    # Neither device has CUDA graphs, and torchtitan's sentence about them would come before ours
    # about expert parallelism.
    if hasattr(config.training, "disable_cuda_graphs"):
        compat.set_fields(config.training, disable_cuda_graphs=True)
    check(config)
    return config


def check(config) -> None:
    """SettingError for what the kernels cannot compute; `launch` calls it again with options."""
    from qwen3_trainium import nki_experts, nki_rope

    replaced = [name if isinstance(name, str) else name[0] for name in config.override.imports]
    if NKI_ROPE in replaced:
        nki_rope.require_length(config.training.seq_len)
    if NKI_EXPERTS in replaced:
        nki_experts.require(config)


def model_spec(described: dict):
    """torchtitan's 30B-A3B with the counts and widths of a config.json."""
    facts = weights.facts(described)
    moe.require_counts(facts.experts, facts.top_k)
    # The builder sets what Qwen3 asks for: softmax, the chosen weights normalised, and balancing
    # by a bias in place of an auxiliary loss.
    return _common.resized(
        compat.native_spec("30B-A3B"),
        "30B-A3B-reduced",
        described,
        compat.symbol("torchtitan.models.qwen3", "_build_qwen3_moe_layers"),
        moe_hidden_dim=facts.expert_ffn,
        num_experts=facts.experts,
        top_k=facts.top_k,
        moe_comm_backend="standard",
    )


def nki():
    """Experts and rotary embedding by NKI kernels."""
    return build(profiles.current(), overrides=[SDPA, NKI_ROPE, NKI_EXPERTS])


def stock_experts():
    """The same run with torchtitan's own experts, which compute in bfloat16 whatever they get."""
    return build(profiles.current(), overrides=[SDPA, NKI_ROPE])
