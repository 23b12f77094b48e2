"""The rotary buffers of the Transformers backend: the fault, the repair and the check.

torchtitan builds the model on the meta device and then allocates it empty. Rotary frequencies
are buffers that no checkpoint holds, so somebody has to compute them again. torchtitan 0.3.0
looks for `rope_init_fn` on the rotary module; Transformers 5 no longer keeps it there, and the
run goes on with whatever the memory held (pytorch/torchtitan issues 4783 and 4817). `hf_backend`
applies the repair to every start.
"""

import torch
from torch import nn


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that holds rotary frequencies, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "inv_freq")}


def expected_inv_freq(module: nn.Module) -> torch.Tensor:
    """Frequencies of a rotary module by its own config: float32 `[head_dim / 2]`, on the CPU.

    Computed by the class's own constructor on a real device, which is what Transformers does;
    always on the CPU, so that every rank and every kind of device gets the same bits.
    """
    with torch.device("cpu"):
        return type(module)(config=module.config).inv_freq


def repair(model: nn.Module) -> list[str]:
    """Write the right frequencies into every rotary module; returns the names of those mended.

    Guarded: where upstream has filled the buffers correctly, nothing is written.
    """
    mended = []
    for name, module in rotary_modules(model).items():
        wanted = expected_inv_freq(module)
        for buffer in ("inv_freq", "original_inv_freq"):
            found = getattr(module, buffer, None)
            if found is not None and not torch.equal(found.cpu(), wanted):
                with torch.no_grad():
                    found.copy_(wanted)
                mended.append(f"{name}.{buffer}")
    return mended


def problem(model: nn.Module) -> str | None:
    """What is wrong with a model's rotary frequencies, in one sentence, or None.

    A default rotary embedding starts at exactly 1, is finite and decreases strictly.
    """
    for name, module in rotary_modules(model).items():
        inv_freq = module.inv_freq.detach().cpu().float()
        if not bool(torch.isfinite(inv_freq).all()):
            found = "is not finite"
        elif inv_freq[0] != 1:
            found = f"begins with {inv_freq[0].item():g} in place of 1"
        elif not bool((inv_freq[1:] < inv_freq[:-1]).all()):
            found = "does not decrease"
        elif not torch.equal(inv_freq, expected_inv_freq(module).float()):
            found = "differs from the frequencies that the config asks for"
        else:
            continue
        return f"{name}.inv_freq {found}: call qwen3_trainium.rotary.repair before training"
    return native_problem(model)


# Cosines of the same angle by two devices: angles up to 2¹¹ radians carry an error of half a
# spacing, 2⁻¹³, which is that of the cosine at most; times four for their own rounding.
CACHE_TOLERANCE = 2**-11


def native_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every rotary module of torchtitan's native model, which keeps cosines and sines, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_precompute_cache") and hasattr(module, "cache")
    }


def native_problem(model: nn.Module) -> str | None:
    """What is wrong with a native model's cosines and sines, in one sentence, or None.

    They too are no part of a checkpoint, and computed again after the model is allocated empty.
    """
    for name, module in native_modules(model).items():
        with torch.device("cpu"):
            wanted = module._precompute_cache()
        difference = (module.cache.detach().cpu().float() - wanted).abs().max()
        if not bool(difference <= CACHE_TOLERANCE):  # a NaN is a problem as well
            return (
                f"{name}.cache differs by {difference.item():.3g} from the cosines and sines that "
                f"its theta {module.config.theta:g} asks for: initialise the model again"
            )
    return None
