"""Four mends of torchtitan 0.3.0's Transformers backend.

*Rotary frequencies* stay uninitialised memory (see `rotary`). `init_states` is the one place that
all starts pass through: random, published and resumed runs build the model, initialise it, and
only then load what was saved.

*Patches leak.* To initialise models in its own way, the backend replaces methods of Transformers'
`PreTrainedModel` for the whole process. One of them is what fills rotary frequencies when plain
Transformers loads a checkpoint, so that a reference model loaded later has the same fault as the
model it is to judge. The patches are confined to the calls that need them.

*Attention* is FlexAttention, which has no backward on a CPU and no kernel on Neuron, the two
devices that profiles name. Scaled-dot-product attention with the same mask, written out as
booleans, takes its place; on Neuron not verified on hardware. A profile for CUDA, where
FlexAttention trains and needs no mask in memory, would leave it alone.

*A stored tied head* is left out of an export, but not of the plan of its files: a release that
keeps `lm_head.weight` in a file of its own makes the last save end in a file without a header.
"""

import functools
import re

import torch
from transformers import PreTrainedModel

from qwen3_trainium import logs, rotary
from qwen3_trainium.attention import document_mask
from qwen3_trainium.weights import HEAD

PATCHED = ("_init_weights", "_initialize_weights")
LOG_LINE = "[Attention] "  # begins the line of a rank's log that says how its model attends


def install() -> None:
    """Mend the backend in this process; calling it again changes nothing."""
    from torchtitan.experiments.transformers_modeling_backend import HFTransformerModel
    from torchtitan.experiments.transformers_modeling_backend.state_dict_adapter import (
        HFTransformerStateDictAdapter,
    )

    if hasattr(HFTransformerModel.init_states, "as_released"):
        return
    released = HFTransformerModel.init_states

    @_confined
    @functools.wraps(released)
    def init_states(self, **kwargs) -> None:
        from torchtitan.tools.logging import logger

        released(self, **kwargs)
        rotary.repair(self)  # writes nothing where upstream has filled them correctly
        logger.info(f"{LOG_LINE}{attention_of(self)}")

    init_states.as_released = _confined(released)  # for the lesson that shows the fault
    HFTransformerModel.init_states = init_states
    HFTransformerModel.__init__ = _confined(_with_masked_sdpa(HFTransformerModel.__init__))
    HFTransformerModel.get_attention_masks = _get_attention_masks
    _export_no_tied_head(HFTransformerStateDictAdapter)


def attention_of(model) -> str:
    """How a model of this backend treats packed documents, in words for a log or a verdict.

    Said as `overrides.attention_of` says it of a native model.
    """
    config = model.model.config
    if config.attn_mask_type == "block_causal":
        return f"{config._attn_implementation}, documents apart"
    return f"{config._attn_implementation}, CAUSAL ONLY: documents see each other"


def attention_by_rank(log: str) -> dict[int, str]:
    """What each rank of a log's last launch said of its attention, in `attention_of`'s words."""
    said = rf"\[rank(\d+)\]:.*{re.escape(LOG_LINE)}(.*)"
    lines = re.findall(said, logs.last_launch(log))
    return {int(rank): words for rank, words in lines}


def _with_masked_sdpa(released):
    """Let a new model attend by Transformers' "sdpa" in place of the backend's FlexAttention."""

    @functools.wraps(released)
    def init(self, *args, **kwargs) -> None:
        released(self, *args, **kwargs)
        self.model.set_attn_implementation("sdpa")

    return init


def _get_attention_masks(self, positions: torch.Tensor) -> torch.Tensor:
    """The mask that goes with it: `document_mask` in place of FlexAttention's BlockMask."""
    by_document = self.model.config.attn_mask_type == "block_causal"
    return document_mask(positions, by_document=by_document)


def _export_no_tied_head(adapter_class) -> None:
    """Leave the head out of the plan of an export's files wherever the adapter leaves it out."""
    released = adapter_class.__init__

    @functools.wraps(released)
    def init(self, model_config, hf_assets_path) -> None:
        released(self, model_config, hf_assets_path)
        if self._tie_word_embeddings and self.fqn_to_index_mapping:
            self.fqn_to_index_mapping.pop(HEAD, None)

    adapter_class.__init__ = init


def _confined(method):
    """Let `method` of a model patch PreTrainedModel, and undo that when it returns.

    The patches belong to the model that made them and are in force in its other calls as well.
    """

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        before = {name: getattr(PreTrainedModel, name) for name in PATCHED}
        for name, patch in self.__dict__.get("_titan_patches", {}).items():
            setattr(PreTrainedModel, name, patch)
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__["_titan_patches"] = {
                name: getattr(PreTrainedModel, name) for name in PATCHED
            }
            for name, original in before.items():
                setattr(PreTrainedModel, name, original)

    return call
