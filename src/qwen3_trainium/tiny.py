"""The tiny Qwen3 that plays Qwen3-4B-Instruct-2507's part on a CPU.

Everything that carries meaning is kept: tied embeddings, normalised queries and keys,
head_dim ≠ hidden_size / heads, grouped key heads, rope theta 5,000,000, weights in several
safetensors files with an index. Only widths, depth and vocabulary are small.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_trainium import data
from qwen3_trainium.files import written_beside
from qwen3_trainium.profiles import Profile

if TYPE_CHECKING:
    from qwen3_trainium.launch import Run

VOCAB = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # Qwen's, in Qwen's order

# The layout of https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507/blob/main/config.json;
# the comment is that release's value where ours differs.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,  # <|endoftext|>: 151643
    "eos_token_id": 2,  # <|im_end|>: 151645
    "dtype": "float32",  # bfloat16
    "head_dim": 32,  # 128
    "hidden_act": "silu",
    "hidden_size": 192,  # 2560
    "initializer_range": 0.02,
    "intermediate_size": 512,  # 9728
    "max_position_embeddings": 2048,  # 262144
    "num_attention_heads": 8,  # 32
    "num_hidden_layers": 4,  # 36
    "num_key_value_heads": 2,  # 8
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCAB,  # 151936
}

# Qwen's turn markers, without tools and thinking.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Pre-training in about a minute on two cores: 130 steps of 2,048 tokens, two thirds of the text.
PRETRAINING_STEPS = 130
PRETRAINING_LOCAL_BATCH = 4  # sequences a rank: fewer would spend the time on communication


def pretraining(profile: Profile) -> Profile:
    """The profile of the run that makes the tiny checkpoint."""
    return dataclasses.replace(
        profile,
        steps=PRETRAINING_STEPS,
        local_batch_size=PRETRAINING_LOCAL_BATCH,
        global_batch_size=PRETRAINING_LOCAL_BATCH * profile.ranks,
    )


def make_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `VOCAB` entries and save it in Hugging Face form."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Words keep their leading space and digits stand alone, as in Qwen's own pre-tokenizer.
    words = Regex(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,
        # All 256 bytes have a token, so that every text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_bos_token": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make_scaffold(corpus: Path) -> Path:
    """Config and tokenizer without weights: what a random start needs. Returns the folder."""
    folder = corpus.with_name(f"{corpus.name}-scaffold")
    if folder.exists():
        return folder
    with written_beside(folder) as partial:
        (partial / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        generation = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        make_tokenizer(data.read(corpus / "train"), partial)
    return folder


def publish(run: "Run", scaffold: Path, folder: Path) -> Path:
    """Store a trained tiny model as a release is stored: three shards and an index, whole or not.

    run    the finished `pretrain` run; its metrics are kept beside the weights
    Returns `folder`.
    """
    from transformers import AutoModelForCausalLM

    from qwen3_trainium import export, runlog

    single = export.complete(run.last_checkpoint, scaffold, run.folder / "export")
    model = AutoModelForCausalLM.from_pretrained(single, local_files_only=True)
    with written_beside(folder) as partial:
        model.save_pretrained(partial, max_shard_size="4MB")  # 10 MB of weights
        # As given, not as Transformers rewrites them.
        for name in ("config.json", *export.COMPANIONS):
            if (scaffold / name).is_file():
                shutil.copy2(scaffold / name, partial / name)
        runlog.read(run.folder).to_csv(partial / "pretraining.csv")
    return folder
