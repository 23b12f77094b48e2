"""The masked attention means what FlexAttention's document mask means.

Sizes that only right code passes: 4 query heads on 2 key heads, sequences of 40 and documents of
7, 1, 20 and 12 tokens, two rows that begin their documents elsewhere.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

from qwen3_trainium import cpu
from qwen3_trainium.attention import document_mask

cpu.prepare()

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common import attention as upstream  # noqa: E402

from configs import native  # noqa: E402
from qwen3_trainium import overrides  # noqa: E402

LENGTHS = [[7, 1, 20, 12], [3, 30, 2, 5]]
S, N, K, H = 40, 4, 2, 16
# A softmax-weighted mean of S values after a dot product of H terms, in another order: √S·2⁻²⁴
# relative, times the largest value, about 4; doubled for two programs.
FLOAT32 = 2 * S**0.5 * 2**-24 * 4


def positions(rows=LENGTHS):
    return torch.tensor([[i for length in row for i in range(length)] for row in rows])


def inputs(rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(rows), S, heads, H) for heads in (N, K, K)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def ours(q, k, v, rows):
    module = overrides.DocumentAttention.Config().build()
    mask = document_mask(positions(rows))
    return module(q, k, v, attention_masks=mask, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("rows", [LENGTHS[:1], LENGTHS], ids=["one row", "two rows"])
def test_forward_equals_flex_attention(rows):
    """torchtitan builds one mask for one row and another, equivalent one, for several."""
    q, k, v = inputs(rows)
    mask_mod = and_masks(
        upstream.get_causal_mask_mod(),
        upstream.get_efficient_causal_mask_mod_for_packed_document(positions(rows)),
    )
    block_mask = create_block_mask(mask_mod, len(rows), None, S, S, device="cpu")
    theirs = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=block_mask,
        scale=0.3,
        enable_gqa=True,
    ).transpose(1, 2)
    assert (ours(q, k, v, rows) - theirs).abs().max() <= FLOAT32


def plain(q, k, v, rows):
    """Each document by itself: no mask could be wrong here."""
    out = torch.zeros_like(q)
    for row, lengths in enumerate(rows):
        begin = 0
        for length in lengths:
            part = slice(begin, begin + length)
            for head in range(N):
                keys, values = k[row, part, head // (N // K)], v[row, part, head // (N // K)]
                scores = q[row, part, head] @ keys.T * 0.3
                seen = torch.ones(length, length, dtype=torch.bool).tril()
                out[row, part, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            begin += length
    return out


def gradients(attention, rows):
    tensors = [x.requires_grad_() for x in inputs(rows, torch.float64)]
    out = attention(*tensors, rows)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).double()
    (out * weights).sum().backward()
    return [x.grad for x in tensors]


def test_gradients_equal_plain_attention_in_float64():
    for got, expected in zip(gradients(ours, LENGTHS), gradients(plain, LENGTHS), strict=True):
        # √S·2⁻⁵³ of values up to about 10, doubled for two programs.
        assert (got - expected).abs().max() <= 2 * S**0.5 * 2**-53 * 10


def test_the_comparison_rejects_a_mask_that_forgets_documents():
    def causal(q, k, v, rows):
        module = overrides.DocumentAttention.Config().build()
        mask = document_mask(positions(rows), by_document=False)
        return module(q, k, v, attention_masks=mask, scale=0.3, enable_gqa=True)

    q, k, v = inputs(LENGTHS)
    assert (causal(q, k, v, LENGTHS) - plain(q, k, v, LENGTHS)).abs().max() > 0.1


def overridden(name):
    model = native.tiny_spec().model
    spec = native.compat.native_spec("4B")
    spec.model = model

    class Root:  # what `apply_overrides` asks of a config: that it can be walked
        traverse = staticmethod(spec.traverse)

    lines = apply_overrides(OverrideConfig(imports=[name]), Root)
    return model, lines


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (native.SDPA, overrides.DocumentAttention.Config, "documents apart"),
        (native.SDPA_CAUSAL, upstream.ScaledDotProductAttention.Config, "CAUSAL ONLY"),
    ],
)
def test_each_layer_is_replaced_once_and_the_choice_can_be_told(name, kind, words):
    model, lines = overridden(name)
    assert len(lines) == len(model.layers) == 4
    assert all(type(layer.attention.inner_attention) is kind for layer in model.layers)
    assert words in overrides.attention_of(model)


def logits(name, tokens, where):
    model_config, _ = overridden(name)
    torch.manual_seed(0)
    model = model_config.build()
    with torch.no_grad():
        model.init_weights()
        masks = model.get_attention_masks(where) if name == native.SDPA else None
        return model(tokens, positions=where, attention_masks=masks)


def test_a_document_packed_twice_gives_the_same_logits_both_times():
    document = torch.randint(0, 4096, (1, 20), generator=torch.Generator().manual_seed(2))
    tokens, where = document.repeat(1, 2), torch.arange(20).repeat(1, 2)
    first, second = logits(native.SDPA, tokens, where).chunk(2, dim=1)
    assert (first - second).abs().max() <= 1e-5  # rows of other sizes are summed in other orders
    first, second = logits(native.SDPA_CAUSAL, tokens, where).chunk(2, dim=1)
    assert (first - second).abs().max() > 1e-3  # the second copy has read the first
