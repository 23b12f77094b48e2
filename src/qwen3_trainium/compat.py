"""torchtitan's names as the recipes use them: found by feature, and missed in one sentence.

Modules that subclass or replace torchtitan's classes, such as `overrides` and `streams`, import
theirs at their top, where a missing one is Python's ImportError. The preflight reads both kinds
from the source and names all that the installed torchtitan lacks.

Tested: torchtitan 0.3.0 on CPU. Written for, but not run on: the Neuron fork 0.2.2+neuron.1.
"""

import dataclasses
import importlib

from qwen3_trainium.errors import SettingError

TESTED = "torchtitan 0.3.0 (CPU) and 0.2.2+neuron.1 (Trainium)"
HF_BACKEND = "torchtitan.experiments.transformers_modeling_backend"


def symbol(module: str, name: str):
    """`module.name`, or a SettingError that says which torchtitan has it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"the installed torchtitan has no {module}.{name} ({error}): install {TESTED}"
        ) from error


def hf_backend_config():
    """torchtitan's own full-size config of the Transformers backend, as shipped."""
    return symbol(f"{HF_BACKEND}.config_registry", "transformers_modeling_backend_full")()


def hf_backend_spec():
    """A model spec whose sizes all come from the checkpoint's config.json.

    Its attention keeps packed documents apart ("block_causal"); the flavour "full" that the
    config above carries lets a token see every earlier document of its sequence.
    """
    return symbol(HF_BACKEND, "model_registry")("sft_full")


def set_fields(config, **values) -> None:
    """Set fields of a torchtitan config section; an unknown name is refused, not ignored."""
    known = {field.name for field in dataclasses.fields(config)}
    for name, value in values.items():
        if name not in known:
            raise SettingError(
                f"{type(config).__qualname__} of the installed torchtitan has no field {name!r}: "
                f"install {TESTED}"
            )
        setattr(config, name, value)


def native_config():
    """torchtitan's own config of the native Qwen3 whose name the guide starts from, as shipped."""
    return symbol("torchtitan.models.qwen3.config_registry", "qwen3_32b")()


def native_spec(flavor: str):
    """A fresh model spec of torchtitan's native Qwen3, e.g. "4B", as shipped."""
    return symbol("torchtitan.models.qwen3", "model_registry")(flavor)


def moe_config():
    """torchtitan's own config of Qwen3-30B-A3B, as shipped."""
    return symbol("torchtitan.models.qwen3.config_registry", "qwen3_30b_a3b")()
