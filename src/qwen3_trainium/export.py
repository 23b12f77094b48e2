"""From torchtitan's last save to a whole Hugging Face model folder.

torchtitan writes safetensors files and, depending on the path taken, an index that was derived
from what it expected to write. A model folder also needs config, tokenizer and a true index.
"""

import json
import os
import shutil
from pathlib import Path

from qwen3_trainium import files, guards, verify, weights
from qwen3_trainium.errors import SettingError

# Copied unchanged when the source has them; config.json is written anew with the stored dtype.
COMPANIONS = (*verify.COMPANIONS, "LICENSE")


def complete(saved: Path, source: Path, target: Path) -> Path:
    """Make `target` a model folder of the weights in `saved`; it appears when it is whole.

    saved    what torchtitan wrote: safetensors files, whatever index lies beside them
    source   the folder that training began from: config, tokenizer, generation config
    Returns `target`. Raises SettingError if it exists, or if keys, shapes or files are wrong.
    """
    guards.check_run_folder(target)
    shards = sorted(saved.glob("*.safetensors"))
    if not shards:
        raise SettingError(f"{saved} holds no safetensors files: is the last save an export?")
    headers = {shard.name: weights.read_header(shard) for shard in shards}
    config = weights.read_json(source / "config.json")
    with files.written_beside(target) as partial:
        for shard in shards:
            _link(shard, partial / shard.name)
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copy2(source / name, partial / name)
        (partial / weights.INDEX).write_text(_index(headers))
        (partial / "config.json").write_text(_config(config, headers))
        guards.check_keys(weights.stored_tensors(partial), config, partial)
    return target


def _link(shard: Path, to: Path) -> None:
    """The same bytes under a second name; copied where the file system has no such links."""
    try:
        os.link(shard, to)
    except OSError:
        shutil.copy2(shard, to)


def _index(headers: dict[str, dict[str, weights.Tensor]]) -> str:
    """The index that the shards' own headers imply: no ghost keys, no forgotten ones."""
    owner = {key: name for name, tensors in headers.items() for key in tensors}
    size = sum(tensor.bytes for tensors in headers.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(owner.items()))}
    return json.dumps(index, indent=2) + "\n"


def _config(config: dict, headers: dict[str, dict[str, weights.Tensor]]) -> str:
    """The source's config with the dtype that is stored, so that a reload does not convert."""
    names = {stored: name for name, stored in verify.SAFETENSORS_NAMES.items()}
    stored = {tensor.dtype for tensors in headers.values() for tensor in tensors.values()}
    if len(stored) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config = {**config, key: names[stored.pop()]}
    return json.dumps(config, indent=2) + "\n"
