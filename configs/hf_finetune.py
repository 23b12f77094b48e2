"""The guide's first recipe: Qwen3 through torchtitan's Transformers backend.

    torchrun … -m qwen3_trainium.train --module configs.hf_finetune --config published

Starts from torchtitan's own `transformers_modeling_backend_full` and changes what follows.
One builder serves a laptop and the instance; the profile holds the sizes that differ.
"""

from pathlib import Path

from configs import _common
from qwen3_trainium import assets, compat, hf_backend, profiles
from qwen3_trainium.profiles import Profile


def build(profile: Profile, *, published: bool, folder: Path):
    """torchtitan config of one run.

    published   True starts from the safetensors in `folder`, False from random weights
    folder      Hugging Face model folder: architecture, tokenizer and, if published, weights
    """
    hf_backend.install()  # rotary frequencies, attention and export as they must be
    config = compat.hf_backend_config()
    config.hf_model = str(folder)  # AutoModelForCausalLM builds the model that config.json names
    config.model_spec = compat.hf_backend_spec()  # packed documents are kept apart
    _common.set_run(config, profile, folder, published=published)
    return config


def published():
    """Fine-tune the profile's published weights."""
    profile = profiles.current()
    return build(profile, published=True, folder=assets.model_folder(profile))


def random():
    """The same run from random weights: what the guide compares published weights with."""
    profile = profiles.current()
    return build(profile, published=False, folder=assets.model_folder(profile))


def pretrain():
    """Make the tiny checkpoint that plays the published weights' part on a CPU (lesson 00)."""
    config = build(profiles.current(), published=False, folder=assets.scaffold())
    # Small models bear, and short training needs, a larger rate than 8e-4.
    config.optimizer = compat.symbol("torchtitan.components.optimizer", "default_adamw")(lr=4e-3)
    compat.set_fields(config.lr_scheduler, warmup_steps=10)
    compat.set_fields(config.checkpoint, interval=config.training.steps)
    # Activations of this model are small: recomputing them would only cost time.
    config.activation_checkpoint = None
    return config
