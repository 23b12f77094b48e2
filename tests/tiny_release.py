"""A folder in the form and the sizes of the tiny release, with hardly trained weights."""

from pathlib import Path

import torch

from qwen3_trainium import assets, data, tiny

# Sizes of the tiny release under the names of Transformers' config.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def make(folder: Path) -> Path:
    """Write weights, three shards and an index, with the release's own config and tokenizer."""
    import toys

    model = toys.random_model(**{name: tiny.CONFIG[name] for name in SIZES})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # At these widths the toys' weights saturate every softmax, and the gradients that
            # are left are too small to be computed fast.
            weight.mul_(1.0 if "norm" in name else 0.25)
    model.save_pretrained(folder, max_shard_size="4MB")
    copy_scaffold(folder)
    toys.learn_tokens(folder, data.read(data.make() / "train")[0], "4MB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


def copy_scaffold(folder: Path) -> Path:
    """Write the release's config, generation config and tokenizer to `folder`."""
    folder.mkdir(exist_ok=True)
    for file in assets.scaffold().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
