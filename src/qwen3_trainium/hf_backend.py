"""Two mends of torchtitan 0.3.0's Transformers backend, needed on every kind of machine.

*Rotary frequencies* stay uninitialised memory (see `rotary`). `init_states` is the one place that
all starts pass through: random, published and resumed runs build the model, initialise it, and
only then load what was saved.

*Patches leak.* To initialise models in its own way, the backend replaces methods of Transformers'
`PreTrainedModel` for the whole process. One of them is what fills rotary frequencies when plain
Transformers loads a checkpoint, so that a reference model loaded later has the same fault as the
model it is to judge. The patches are confined to the calls that need them.
"""

import functools

from transformers import PreTrainedModel

from qwen3_trainium import cpu, rotary

PATCHED = ("_init_weights", "_initialize_weights")


def install() -> None:
    """Mend the backend in this process; calling it again changes nothing."""
    from torchtitan.experiments.transformers_modeling_backend import HFTransformerModel

    if hasattr(HFTransformerModel.init_states, "as_released"):
        return
    if not cpu.has_accelerator():
        cpu.use_masked_sdpa()
    released = HFTransformerModel.init_states

    @_confined
    @functools.wraps(released)
    def init_states(self, **kwargs) -> None:
        released(self, **kwargs)
        rotary.repair(self)  # writes nothing where upstream has filled them correctly

    init_states.as_released = _confined(released)  # for the lesson that shows the fault
    HFTransformerModel.init_states = init_states
    HFTransformerModel.__init__ = _confined(HFTransformerModel.__init__)


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
