"""What a Hugging Face Qwen3 folder holds, read without torch: config, safetensors headers, sizes.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON (each tensor's dtype,
shape and byte range), then the data. Headers alone show a file that is cut short or corrupt.

Shape letters: V vocabulary, D hidden size, F feed-forward width, N query heads, K key heads,
H head dimension, E experts.
"""

import dataclasses
import json
import math
from pathlib import Path

from qwen3_trainium.errors import SettingError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Bytes an element, for the dtypes that a Qwen3 checkpoint may be stored in.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
# safetensors itself refuses longer headers, so that a random length is not read into memory.
LONGEST_HEADER = 100_000_000
# Numbers of released models, for planning before the weights are here; the config.json that is
# downloaded decides. https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507/blob/main/config.json
PUBLISHED = {
    "Qwen/Qwen3-4B-Instruct-2507": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000,
        "dtype": "bfloat16",
    },
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "dtype": "bfloat16",
    },
}


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What config.json says, plus what is stored; recipes compare their own numbers with these.

    `n_params` counts a tied head once. `dtype` (a safetensors name such as "BF16") and `bytes`
    (tensor data on disk) are empty when the facts come from a config alone. `experts` 0 is dense.
    """

    architecture: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    eps: float
    theta: float
    n_params: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    norm_topk_prob: bool = False
    dtype: str = ""
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One stored tensor: the file's name, a safetensors dtype, its shape and size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def read_json(path: Path) -> dict:
    """The object in a JSON file; SettingError when it is absent, unreadable or not an object."""
    if not path.is_file():
        raise SettingError(f"{path.name} is missing in {path.parent}: download the folder again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SettingError(f"{path} cannot be read as JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise SettingError(
            f"{path} must hold a JSON object, found {type(value).__name__}: download it again"
        )
    return value


def rope_theta(config: dict) -> float:
    """The rotary base from either place where Transformers keeps it (before and since version 5).

    A default is never assumed: Transformers' own of 10,000 fits no Qwen3 release.
    """
    nested = config.get("rope_parameters")
    places = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters.rope_theta": nested.get("rope_theta")
        if isinstance(nested, dict)
        else None,
    }
    found = {place: _positive(value, place) for place, value in places.items() if value is not None}
    if not found:
        raise SettingError(
            "config.json has a rotary base neither in rope_parameters.rope_theta nor in "
            "rope_theta: use the config.json that was released with the checkpoint"
        )
    if len(set(found.values())) > 1:
        raise SettingError(
            f"config.json names two rotary bases, {found}: keep the one of the release"
        )
    return float(next(iter(found.values())))


def facts(config: dict) -> ModelFacts:
    """Facts of a Qwen3 config dict. SettingError for another architecture or a missing key."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        raise SettingError(
            f"config.json names the architecture {architecture}: "
            "use a Qwen3ForCausalLM or Qwen3MoeForCausalLM checkpoint"
        )
    # Every number is read, none derived or defaulted: heads × head_dim is not the hidden size.
    model = ModelFacts(
        architecture=architecture,
        layers=_count(config, "num_hidden_layers"),
        dim=_count(config, "hidden_size"),
        heads=_count(config, "num_attention_heads"),
        kv_heads=_count(config, "num_key_value_heads"),
        head_dim=_count(config, "head_dim"),
        ffn=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        eps=float(_positive(config.get("rms_norm_eps"), "rms_norm_eps")),
        theta=rope_theta(config),
        n_params=0,
    )
    if architecture == "Qwen3MoeForCausalLM":
        model = dataclasses.replace(
            model,
            # Released configs say num_experts, Transformers 5 writes num_local_experts.
            experts=_count(config, "num_experts", "num_local_experts"),
            top_k=_count(config, "num_experts_per_tok"),
            expert_ffn=_count(config, "moe_intermediate_size"),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
    shapes = expected_shapes(config, model)
    return dataclasses.replace(model, n_params=sum(map(math.prod, shapes.values())))


def _count(config: dict, *names: str) -> int:
    """The whole number under the first of the names that is set."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int):
        raise SettingError(_wrong(names[0], "a positive whole number", value))
    return int(_positive(value, names[0]))


def _positive(value, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise SettingError(_wrong(name, "a positive number", value))
    return value


def _wrong(name: str, wanted: str, value) -> str:
    return (
        f"config.json must give {name} as {wanted}, found {value!r}: "
        "use the config.json that was released with the checkpoint"
    )


def expected_shapes(config: dict, model: ModelFacts | None = None) -> dict[str, tuple[int, ...]]:
    """Every key of a Qwen3 checkpoint and its shape, as Transformers stores them on disk.

    Experts are stored one by one (`experts.0.gate_proj.weight` …), not fused as they are in
    memory. A tied head has no key of its own here, although a checkpoint may repeat it.
    """
    model = model or facts(config)
    D, H = model.dim, model.head_dim
    shapes = {EMBEDDING: (model.vocab, D), "model.norm.weight": (D,)}
    if not model.tied:
        shapes[HEAD] = (model.vocab, D)
    for layer in range(model.layers):
        block = f"model.layers.{layer}."
        shapes[block + "input_layernorm.weight"] = (D,)
        shapes[block + "post_attention_layernorm.weight"] = (D,)
        for name, rows in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
            shapes[f"{block}self_attn.{name}_proj.weight"] = (rows * H, D)
            if config.get("attention_bias"):
                shapes[f"{block}self_attn.{name}_proj.bias"] = (rows * H,)
        shapes[block + "self_attn.o_proj.weight"] = (D, model.heads * H)
        if config.get("attention_bias"):
            shapes[block + "self_attn.o_proj.bias"] = (D,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{block}self_attn.{name}.weight"] = (H,)
        if not _is_sparse(config, model, layer):
            shapes |= _feed_forward(block + "mlp.", model.ffn, D)
            continue
        shapes[block + "mlp.gate.weight"] = (model.experts, D)
        for expert in range(model.experts):
            shapes |= _feed_forward(f"{block}mlp.experts.{expert}.", model.expert_ffn, D)
    return shapes


def _is_sparse(config: dict, model: ModelFacts, layer: int) -> bool:
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    if not isinstance(dense, list):
        raise SettingError(_wrong("mlp_only_layers", "a list of layers", dense))
    if not isinstance(step, int):
        raise SettingError(_wrong("decoder_sparse_step", "a positive whole number", step))
    return model.experts > 0 and layer not in dense and (layer + 1) % step == 0


def _feed_forward(prefix: str, F: int, D: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (F, D),
        prefix + "up_proj.weight": (F, D),
        prefix + "down_proj.weight": (D, F),
    }


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors that a safetensors file declares, after proof that their bytes are all there.

    Raises SettingError for an empty, truncated or corrupt file: a header that is no JSON object,
    an unknown dtype, ranges that overlap, leave gaps or do not fit the shape, or a file whose
    size is not header plus data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise _damaged(path, f"its {size} bytes hold no complete header")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise _damaged(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    try:
        ranges = {key: _checked_range(entry) for key, entry in header.items()}
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, "its header describes a tensor that cannot be") from None
    reached = 0
    for begin, end in sorted(ranges.values()):
        if begin != reached:
            raise _damaged(path, f"its tensors overlap or leave a gap at data byte {reached}")
        reached = end
    if size != 8 + length + reached:
        raise _damaged(path, f"its header asks for {8 + length + reached} bytes, found {size}")
    return {
        key: Tensor(path.name, entry["dtype"], tuple(entry["shape"]), end - begin)
        for (key, entry), (begin, end) in zip(header.items(), ranges.values(), strict=True)
    }


def _checked_range(entry: dict) -> tuple[int, int]:
    """A tensor's byte range in the data; KeyError, TypeError or ValueError when it cannot be."""
    begin, end = entry["data_offsets"]
    size = math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
    if any(not isinstance(n, int) or n < 0 for n in (begin, *entry["shape"])):
        raise ValueError
    if end - begin != size:
        raise ValueError
    return begin, end


def _damaged(path: Path, why: str) -> SettingError:
    return SettingError(f"{path} is truncated or corrupt ({why}): download or export it again")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, by key, after proof that index and shards agree.

    Raises SettingError naming the missing shard, the key that index and shards disagree about,
    a wrong `total_size`, a safetensors file that the index does not know, or a damaged file.
    """
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        return read_header(folder / _only_file(folder, files))
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    if not named or not all(isinstance(name, str) for name in named):
        raise SettingError(f"{folder / INDEX} has no weight_map: download or export it again")
    for name in sorted(set(weight_map.values())):
        if name not in files:
            raise SettingError(
                f"{INDEX} lists the shard {name}, which is missing in {folder}: "
                "download or export the folder again"
            )
    # torch's reader takes every safetensors file in the folder, whatever the index says.
    if stray := sorted(set(files) - set(weight_map.values())):
        raise SettingError(
            f"{folder} holds {stray[0]}, which {INDEX} does not list: move that file elsewhere"
        )
    tensors = {}
    for name in files:
        for key, tensor in read_header(folder / name).items():
            if weight_map.get(key) != name:
                said = f"in {weight_map[key]}" if key in weight_map else "nowhere"
                raise SettingError(
                    f"{INDEX} says that {key} is {said}, but it is in {name}: "
                    "rebuild the index from the shards"
                )
            tensors[key] = tensor
    if ghosts := sorted(set(weight_map) - set(tensors)):
        raise SettingError(
            f"{INDEX} lists {ghosts[0]} in {weight_map[ghosts[0]]}, which does not hold it "
            f"({len(ghosts)} such keys): rebuild the index from the shards"
        )
    stored = sum(tensor.bytes for tensor in tensors.values())
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if said != stored:
        raise SettingError(
            f"{INDEX} gives total_size {said}, but the shards hold {stored} bytes: "
            "rebuild the index from the shards"
        )
    return tensors


def _only_file(folder: Path, files: list[str]) -> str:
    if files == [SINGLE]:
        return SINGLE
    if files:
        raise SettingError(
            f"{INDEX} is missing in {folder}, which holds {len(files)} safetensors files "
            f"({files[0]} …): download or export the folder again"
        )
    others = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if others:
        raise SettingError(
            f"{folder} holds weights only as {others[0]}, a pickle that could run code: "
            "use a checkpoint in safetensors form"
        )
    raise SettingError(f"{SINGLE} is missing in {folder}: download the weights")
