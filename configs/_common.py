"""What every recipe sets the same way: sizes, text, optimizer, checkpoints, metrics."""

import dataclasses
from pathlib import Path

from qwen3_trainium import assets, compat, weights
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import Profile

# torchtitan's pre-training rate for its full-size configs, and its rate for fine-tuning real
# weights (transformers_modeling_backend_sft_full). At 8e-4 ten steps would undo published weights.
RANDOM_LEARNING_RATE = 8e-4
PUBLISHED_LEARNING_RATE = 2e-5
# Batches of held-out text that a rank reads for its loss: 2,048 tokens in all on cpu, 131,072 on
# trn2, where plain Transformers has to read the same ones on the host.
HELDOUT_STEPS = {"cpu": 4, "neuron": 1}
# Seconds that a rank waits for the others in one collective, before the first step is over and
# after it, in place of torchtitan's 300 and 100. In the first step each rank compiles, and the
# slowest can need most of an hour longer than the one that finds its graphs in the cache. Later
# few ranks join the files of the export, 8 GB read and written, while the others wait. None of it
# was measured: not verified on hardware.
TIMEOUTS = {"neuron": {"init_timeout_seconds": 7200, "train_timeout_seconds": 900}}
# Import paths of the overrides that recipes switch on, apart from `qwen3_trainium.overrides` since
# a recipe must be importable before torchtitan is.
SDPA = "qwen3_trainium.overrides.sdpa"
SDPA_CAUSAL = "qwen3_trainium.overrides.sdpa_causal"
NKI_ROPE = "qwen3_trainium.overrides.nki_rope"
NKI_EXPERTS = "qwen3_trainium.overrides.nki_experts"


def set_run(config, profile: Profile, folder: Path, *, published: bool) -> None:
    """Set every field of a run that depends on the profile and not on how the model is built.

    published   True starts from the safetensors in `folder`, False from random weights
    folder      Hugging Face model folder: architecture, tokenizer and, if published, weights
    """
    config.hf_assets_path = str(folder)
    on_cpu = profile.device == "cpu"
    compat.set_fields(
        config.training,
        local_batch_size=profile.local_batch_size,
        global_batch_size=profile.global_batch_size,
        seq_len=profile.seq_len,
        steps=profile.steps,
        # float32 on CPU so that losses can be compared to the digit; bfloat16 compute elsewhere
        # with float32 master weights, since bfloat16 weights alone do not move at these rates.
        mixed_precision_param="float32" if on_cpu else "bfloat16",
    )
    # All ranks in one fully sharded data-parallel group: -1 takes what the others leave.
    compat.set_fields(config.parallelism, data_parallel_shard_degree=-1, tensor_parallel_degree=1)
    set_data(config, profile)

    rate = PUBLISHED_LEARNING_RATE if published else RANDOM_LEARNING_RATE
    config.optimizer = compat.symbol("torchtitan.components.optimizer", "default_adamw")(lr=rate)
    # The schedule belongs to the whole run: a run stopped early and resumed keeps its rates.
    compat.set_fields(config.lr_scheduler, total_steps=profile.steps)

    compat.set_fields(
        config.checkpoint,
        enable=True,  # without it `hf_assets_path` would give the tokenizer alone, no weights
        initial_load_in_hf=published,
        interval=max(1, profile.steps // 2),  # full state, from which a killed run resumes
        last_save_model_only=True,  # the last one is the export: weights in safetensors …
        last_save_in_hf=True,
        export_dtype=saved_dtype(folder),  # … in the dtype that the folder's config names
        keep_latest_k=2,
    )
    compat.set_fields(
        config.metrics, log_freq=1, enable_tensorboard=True, disable_color_printing=True
    )
    compat.set_fields(config.comm, **TIMEOUTS.get(profile.device, {}))
    # Fixed, so that a random start can be repeated; written beside the run, so that it can be read.
    compat.set_fields(config.debug, seed=0, print_config=False, save_config_file="config.json")


def set_data(config, profile: Profile) -> None:
    """The same loader for training and held-out text: JSON lines with a `text` field."""
    loader = compat.symbol("torchtitan.hf_datasets.text_datasets", "HuggingFaceTextDataLoader")
    train = assets.train_folder(profile)
    if train is None:  # no torchtitan checkout on this machine: stream the full set
        config.dataloader = loader.Config(dataset="c4")
    else:
        config.dataloader = loader.Config(dataset="c4_test", dataset_path=str(train))
    heldout = str(assets.heldout_folder(profile))
    compat.set_fields(
        config.validator,
        enable=True,
        freq=profile.steps,  # after the first step and after the last
        steps=HELDOUT_STEPS[profile.device],
        dataloader=loader.Config(dataset="c4_test", dataset_path=heldout),
    )


def saved_dtype(folder: Path) -> str:
    """The dtype of a model folder's weights, by its config.json (Transformers 4 and 5 names)."""
    if not (folder / "config.json").is_file():
        raise SettingError(
            f"model folder {folder} is not here: run lesson 00, which makes or fetches it"
        )
    config = weights.read_json(folder / "config.json")
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def resized(model_spec, flavor: str, described: dict, build_layers, **sizes):
    """A native model spec with the sizes of a config.json; every part of the shipped one is kept.

    described     the config.json's contents
    build_layers  torchtitan's function for the layers, and in `sizes` what it alone takes
    """
    facts = weights.facts(described)
    shipped = model_spec.model
    rope = dataclasses.replace(
        shipped.layers[0].attention.rope,
        dim=facts.head_dim,
        theta=facts.theta,
        max_seq_len=described["max_position_embeddings"],
    )
    model = dataclasses.replace(
        shipped,
        dim=facts.dim,
        vocab_size=facts.vocab,
        norm=dataclasses.replace(shipped.norm, normalized_shape=facts.dim),
        tok_embeddings=dataclasses.replace(
            shipped.tok_embeddings, num_embeddings=facts.vocab, embedding_dim=facts.dim
        ),
        lm_head=dataclasses.replace(
            shipped.lm_head, in_features=facts.dim, out_features=facts.vocab
        ),
        layers=build_layers(
            n_layers=facts.layers,
            dim=facts.dim,
            n_heads=facts.heads,
            n_kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            attn_backend="flex",
            rope=rope,
            **sizes,
        ),
    )
    return dataclasses.replace(model_spec, flavor=flavor, model=model)
