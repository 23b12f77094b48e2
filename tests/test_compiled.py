"""What a compiler that fuses operators changes in bfloat16, and that it is less than a wrong model.

Such a compiler leaves out roundings that eager code makes between two operators, the norm of
queries and the rotation for one, so that the two differ where both are right.
"""

import copy
import os

import pytest
import torch

from qwen3_trainium import cpu, data, mutants, onerank

cpu.prepare()

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from configs import native  # noqa: E402

LAYERS = 2
TOKENS = torch.randint(0, 4096, (1, 64), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(64)[None] % 40  # two documents


@pytest.fixture(scope="module")
def model():
    """Two blocks of the tiny spec in bfloat16; norms are not ones, rotary caches stay float32."""
    spec = native.tiny_spec()
    del spec.model.layers[LAYERS:]

    class Root:  # what `apply_overrides` asks of a config: that it can be walked
        traverse = staticmethod(spec.traverse)

    apply_overrides(OverrideConfig(imports=[native.SDPA]), Root)
    model = spec.model.build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.init_weights()
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            values = 1 + 0.3 * noise if "norm" in name else noise / weight.shape[-1] ** 0.5
            weight.data = values.bfloat16()
    return model


def logits(model):
    with torch.no_grad():
        masks = model.get_attention_masks(POSITIONS)
        return model(TOKENS, positions=POSITIONS, attention_masks=masks).double()


def compiled(model, backend):
    """A copy whose blocks are compiled as torchtitan compiles them."""
    model = copy.deepcopy(model)
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    return model


def bound(eager):
    """How far two right bfloat16 programs may differ that round in different places.

    Each of the 2·LAYERS residual additions brings two roundings of 2⁻⁸, its own and that of the
    branch; independent errors add as the root of their number, and four of them make a bound that
    random rounding does not exceed. Relative to the largest logit.
    """
    return 4 * (4 * LAYERS) ** 0.5 * 2**-8 * eager.abs().max()


def test_a_graph_run_by_pytorchs_own_kernels_rounds_where_eager_does(model):
    assert torch.equal(logits(compiled(model, "aot_eager")), logits(model))


@pytest.mark.skipif(not onerank.can_compile(), reason="this machine has no C++ compiler")
def test_fused_kernels_stay_within_the_bound(model, monkeypatch):
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(data.CACHE / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)  # compiled once on a machine: 20 s
    eager = logits(model)
    difference = (logits(compiled(model, "inductor")) - eager).abs().max()
    assert difference <= bound(eager)


@pytest.mark.parametrize("name", mutants.ALL)
def test_the_bound_rejects_every_wrong_model(name, model):
    wrong = copy.deepcopy(model)
    mutants.ALL[name](wrong)
    eager = logits(model)
    assert (logits(wrong) - eager).abs().max() > 4 * bound(eager)


def test_no_flex_attention_is_left_that_would_forbid_another_compiler(model):
    """torchtitan compiles a model that holds one by inductor or aot_eager alone, not by neuron."""
    assert not any(isinstance(module, FlexAttention) for module in model.modules())
