"""The guide's second recipe: Qwen3 through torchtitan's native model.

    torchrun … -m qwen3_trainium.train --module configs.native --config published

Starts from torchtitan's `qwen3_32b`, the builder that the guide starts from, and replaces its
model spec: no 32B model is trained. One builder serves a laptop and the instance.
"""

from pathlib import Path

from configs import _common
from configs._common import NKI_ROPE, SDPA, SDPA_CAUSAL
from qwen3_trainium import assets, compat, profiles, spec, tiny
from qwen3_trainium.profiles import Profile

# Ranks that share one layer's matrices; the others shard data. 4 × 16 on the instance keeps a
# tensor-parallel group within one Trainium2 chip, which has four logical cores at LNC=2.
TENSOR_PARALLEL = {"cpu": 2, "neuron": 4}


def build(profile: Profile, *, published: bool, folder: Path, attention: str = SDPA):
    """torchtitan config of one run.

    published   True starts from the safetensors in `folder`, False from random weights
    folder      Hugging Face model folder: tokenizer, config.json and, if published, weights
    attention   import path of the override that replaces FlexAttention
    Raises SettingError when the spec is not the model that the folder's config.json describes.
    """
    config = compat.native_config()
    config.model_spec = tiny_spec() if profile.device == "cpu" else spec_4b_instruct_2507()
    spec.require_match(config.model_spec.model, folder)
    # Tensor parallelism splits the loss by vocabulary, so the loss must know the model's own.
    compat.set_fields(config.loss.loss_fn, global_vocab_size=config.model_spec.model.vocab_size)
    # FlexAttention has no backward on CPU and no kernel on Neuron.
    compat.set_fields(config.override, imports=[attention])
    _common.set_run(config, profile, folder, published=published)
    # The schedule of the first recipe, so that the two can be compared; 600 steps of warm-up, as
    # shipped for 3,000, would be the whole of a short run.
    compat.set_fields(config.lr_scheduler, warmup_steps=2, decay_ratio=0.8)
    set_mesh(config, profile, tensor_parallel=1)
    return config


def spec_4b_instruct_2507():
    """torchtitan's 4B with the numbers in which Qwen3-4B-Instruct-2507 differs from Qwen3-4B.

    https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507/blob/main/config.json
    """
    model_spec = compat.native_spec("4B")
    for layer in model_spec.model.layers:
        # As shipped 1e6 and 40,960. Of the positions, a run keeps `seq_len` in memory.
        compat.set_fields(layer.attention.rope, theta=5_000_000.0, max_seq_len=262_144)
    return model_spec


def tiny_spec():
    """torchtitan's 4B with the widths of the tiny checkpoint; every part of it is there."""
    return _common.resized(
        compat.native_spec("4B"),
        "tiny",
        tiny.CONFIG,
        compat.symbol("torchtitan.models.qwen3", "_build_qwen3_layers"),
        hidden_dim=tiny.CONFIG["intermediate_size"],
    )


def set_mesh(config, profile: Profile, *, tensor_parallel: int) -> None:
    """Ranks as `tensor_parallel` × the rest, which shards parameters and data.

    The text of a step is the same on every mesh and for every number of ranks: it is read in as
    many streams as the global batch has local batches.
    """
    from qwen3_trainium.streams import StreamDataLoader

    compat.set_fields(config.parallelism, tensor_parallel_degree=tensor_parallel)
    data_ranks = profile.ranks // tensor_parallel
    streams = profile.global_batch_size // profile.local_batch_size
    for section in (config, config.validator):
        loader = section.dataloader
        section.dataloader = StreamDataLoader.Config(
            dataset=loader.dataset, dataset_path=loader.dataset_path, streams=streams
        )
    # Counted per rank: fewer data-parallel ranks read more batches each.
    steps = _common.HELDOUT_STEPS[profile.device] * streams // data_ranks
    compat.set_fields(config.validator, steps=steps)


def published():
    """Fine-tune the profile's published weights, fully sharded over all ranks."""
    profile = profiles.current()
    return build(profile, published=True, folder=assets.model_folder(profile))


def random():
    """The same run from torchtitan's own random weights."""
    profile = profiles.current()
    return build(profile, published=False, folder=assets.model_folder(profile))


def tensor_parallel():
    """The published run on a two-dimensional mesh: tensor parallel × fully sharded."""
    profile = profiles.current()
    config = published()
    set_mesh(config, profile, tensor_parallel=TENSOR_PARALLEL[profile.device])
    return config


def published_causal():
    """The published run with causal attention alone: documents of a sequence see each other."""
    profile = profiles.current()
    return build(
        profile, published=True, folder=assets.model_folder(profile), attention=SDPA_CAUSAL
    )


def published_nki_rope():
    """The published run with every layer's rotary embedding by the NKI kernel."""
    from qwen3_trainium import nki_rope

    nki_rope.require_length(profiles.current().seq_len)
    config = published()
    config.override.imports.append(NKI_ROPE)
    return config
