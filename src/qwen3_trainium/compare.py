"""Two torchtitan configs, side by side."""

import dataclasses

from qwen3_trainium.profiles import ROOT


def changed_fields(before, after) -> list[dict]:
    """Fields whose values differ, dotted, in the order of `after`: {"field", "before", "after"}.

    Paths inside this repository are shown relative to it; the model spec by its own name.
    """
    old, new = dict(_flat(before)), dict(_flat(after))
    return [
        {"field": name, "before": _shown(old.get(name, "–")), "after": _shown(value)}
        for name, value in new.items()
        if old.get(name, "–") != value
    ]


def _flat(config, prefix: str = ""):
    """(dotted name, value) of every plain field, through nested sections and lists of them."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if field.name == "model_spec":
            yield name, value.flavor
            yield f"{name}.attn_mask_type", getattr(value.model, "attn_mask_type", "–")
        elif dataclasses.is_dataclass(value):
            yield name, type(value).__qualname__.removesuffix(".Config")
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                yield from _flat(item, f"{name}.{i}.")
        else:
            yield name, value


def _shown(value) -> str:
    return str(value).replace(f"{ROOT}/", "")
