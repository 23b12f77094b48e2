"""Tiny Qwen3 folders in Hugging Face form, with sizes that only right code passes.

No two sizes are equal or multiples that could stand in for each other: hidden 40, heads 4, key
heads 2, head_dim 16 (4 × 16 ≠ 40), feed-forward 56, vocabulary 96 of which the tokenizer uses 90.
"""

import json
from pathlib import Path

SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "eos_token_id": 88,
    "pad_token_id": 89,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# A byte count between one and two thirds of the dense toy's weights.
TWO_SHARDS = "80KB"


def qwen3(folder: Path, tied: bool = True, shards: int = 1, moe: bool = False, **changes) -> Path:
    """Write a random float32 Qwen3 with config, generation config and tokenizer to `folder`."""
    model = random_model(tied, moe, **changes)
    model.save_pretrained(folder, **({"max_shard_size": TWO_SHARDS} if shards == 2 else {}))
    assert len(list(folder.glob("*.safetensors"))) == shards
    tokenizer(folder)
    return folder


def random_model(tied: bool = True, moe: bool = False, seed: int = 1, **changes):
    """A random model whose norms are not ones either, so that leaving one out changes logits."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    sizes = {**SIZES, **(EXPERTS if moe else {}), **changes}
    config = (Qwen3MoeConfig if moe else Qwen3Config)(**sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def learn_tokens(folder: Path, text: str, shard_size: str) -> Path:
    """Train a folder's weights until they know which tokens of `text` are frequent.

    What stands for published weights must be better than a guess: `train` stops its run otherwise.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    ids_BS = torch.tensor(ids[: 8 * 32]).view(8, 32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(10):
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tokenizer(folder: Path, tokens: int = 90) -> None:
    """Write a tokenizer of single characters, the last two of its `tokens` being special."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {chr(33 + i): i for i in range(tokens - 2)}
    fast = Tokenizer(models.BPE(vocab=letters, merges=[]))
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=fast, **names).save_pretrained(folder)


def edit_json(path: Path, **changes) -> None:
    """Change keys of a JSON file; None removes a key."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_weights(folder: Path, change, file: str = "model.safetensors") -> None:
    """Rewrite one safetensors file after `change(tensors)` has edited its dict of tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
