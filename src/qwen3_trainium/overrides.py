"""Replacements for parts of torchtitan's native model, each named by `--override.imports`.

torchtitan finds an override by its import path: `qwen3_trainium.overrides.sdpa` is the function
`sdpa` of this module. Each replaced part is one `[Override] …` line in a run's log.

Shape suffixes: B batch, S sequence, N heads (query or key), H head_dim; L query position, M key
position (both S long).
"""

import functools
import re
from dataclasses import dataclass

import torch
from torch.nn import functional
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.module import Module

from qwen3_trainium import logs
from qwen3_trainium.attention import document_mask


class DocumentAttention(Module):
    """Scaled-dot-product attention that keeps the documents of a packed batch apart.

    The meaning of torchtitan's FlexAttention with its causal document mask, in the one attention
    operator that has a backward on every device. The mask is B·S² booleans, 4 MiB at 2,048
    tokens, made once a step; FlexAttention needs none, which is why it stays the default
    upstream.
    """

    # torchtitan's trainer and validator build a mask for attentions configured by a FlexAttention
    # config, and for no other that fits: the subclass is how we ask for one.
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    # Argument names are torchtitan's: its tensor-parallel wrapper finds q, k and v by them.
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend within documents; returns `[B, L, N, H]` in the dtype of `q_BLNH`.

        q_BLNH            queries; k_BLNH, v_BLNH may have fewer heads if `enable_gqa`
        attention_masks   bool `[B, 1, L, M]`, True where L may see M, from `document_mask`
        """
        out_BNLH = functional.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNLH.transpose(1, 2)


@override(target=FlexAttention.Config, description="documents kept apart by a boolean mask")
def sdpa(config: FlexAttention.Config) -> DocumentAttention.Config:
    """Attention for machines where FlexAttention cannot train; the same meaning."""
    return derive(config, DocumentAttention.Config)


@override(target=FlexAttention.Config, description="causal only: documents see each other")
def sdpa_causal(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """torchtitan's own causal attention, without a mask: faster, and a change of meaning.

    A token sees every earlier token of its sequence, those of other documents as well.
    """
    return derive(config, ScaledDotProductAttention.Config)


@override(target=CosSinRoPE.Config, exact=True, description="rotary embedding by NKI kernel")
def nki_rope(config: CosSinRoPE.Config, implementation: str = "own") -> CosSinRoPE.Config:
    """Rotary embedding of every layer by our kernel, or by "rope_hf" of AWS's library."""
    from qwen3_trainium import nki_rope  # here, so that a run without kernels needs no NKI

    return nki_rope.derived(config, implementation)


def nki_rope_on(*patterns: str) -> str:
    """Register `nki_rope` for some layers; returns the import path for `override.imports`.

    patterns   of module names, e.g. "layers.0.*", "layers.1[0-9].*"; `*` also matches dots. A name
               may begin where a model's own names do, or higher up in the config
    """
    words = re.sub(r"\W+", "_", " ".join(patterns)).strip("_")
    name = f"nki_rope_on_{words}"
    if name not in _partial:

        def some_layers(config: CosSinRoPE.Config) -> CosSinRoPE.Config:
            return nki_rope(config)

        some_layers.__name__ = name
        fqns = [name for pattern in patterns for name in (pattern, f"*.{pattern}")]
        description = f"rotary embedding by NKI kernel on {', '.join(patterns)}"
        override(target=CosSinRoPE.Config, fqns=fqns, exact=True, description=description)(
            some_layers
        )
        _partial.add(name)
    return f"{__name__}.{name}"


_partial: set[str] = set()  # torchtitan registers a name once in a process


@override(target=GroupedExperts.Config, exact=True, description="experts by NKI kernels")
def nki_experts(
    config: GroupedExperts.Config, transpose_by_dma: bool = False
) -> GroupedExperts.Config:
    """The experts of every MoE layer by our kernels; parameters and checkpoints stay as they are.

    transpose_by_dma   see `kernels.grouped_experts`: saves the Tensor engine work, not verified
    """
    from qwen3_trainium import nki_experts  # here, so that a run without kernels needs no NKI

    return derive(config, nki_experts.NKIGroupedExperts.Config, transpose_by_dma=transpose_by_dma)


def replaced(log: str, name: str) -> dict[int, list[str]]:
    """Modules that an override replaced, by rank, from the text of a run's log.

    name   of a function of this module, e.g. "nki_rope"; its partial forms count as well
    """
    found: dict[int, list[str]] = {}
    line = re.compile(rf"\[rank(\d+)\]:.*\[Override\] {re.escape(__name__)}\.{name}\w*: (\S+) ")
    for match in line.finditer(logs.last_launch(log)):
        found.setdefault(int(match[1]), []).append(match[2])
    return found


def _build_document_masks() -> None:
    """Let the native decoder hand `DocumentAttention` a boolean mask in place of a BlockMask."""
    stock = Decoder.get_attention_masks

    @functools.wraps(stock)
    def get_attention_masks(self, positions: torch.Tensor):
        attention = self.config.first_attention
        if attention is None or not isinstance(attention.inner_attention, DocumentAttention.Config):
            return stock(self, positions)
        return document_mask(positions)

    Decoder.get_attention_masks = get_attention_masks


_build_document_masks()


def attention_of(config) -> str:
    """How a native model config treats packed documents, in words for a log or a verdict."""
    names = {
        DocumentAttention.Config: "sdpa, documents apart",
        ScaledDotProductAttention.Config: "sdpa, CAUSAL ONLY: documents see each other",
        FlexAttention.Config: "FlexAttention, documents apart",
    }
    found = {type(layer.attention.inner_attention) for layer in config.layers}
    return "; ".join(sorted(names.get(kind, kind.__qualname__) for kind in found))
