"""Seven ways to get Qwen3 wrong with weights that load without complaint; parity must see each.

Every function changes a native model in place. Shape suffixes: B batch, S sequence, N heads (query
or key), H head_dim, P pairs (H / 2).
"""

import dataclasses

import torch
from torch import nn


def interleaved_rotary(model: nn.Module) -> None:
    """Rotate the pairs (2i, 2i+1) in place of (i, i + H/2): right for weights of another layout."""

    def rotate(x_BSNH, cos_sin):
        pairs = x_BSNH.float().unflatten(-1, (-1, 2))
        width = x_BSNH.shape[-1]
        cos_P, sin_P = cos_sin[..., : width // 2], cos_sin[..., width : width + width // 2]
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos_P - odd * sin_P, odd * cos_P + even * sin_P), dim=-1)
        return turned.flatten(-2).type_as(x_BSNH)

    for layer in model.layers.values():
        layer.attention.rope.apply_rotary_emb = lambda query, key, cos_sin: (
            rotate(query, cos_sin),
            rotate(key, cos_sin),
        )


def theta_of_the_first_release(model: nn.Module) -> None:
    """Rotary base 1,000,000, as in torchtitan's 4B spec, for weights trained with 5,000,000."""
    for layer in model.layers.values():
        rope = layer.attention.rope
        rope.config = dataclasses.replace(rope.config, theta=1_000_000.0)
        rope.cache = rope._precompute_cache()


def no_query_key_norm(model: nn.Module) -> None:
    """Leave queries and keys as they are projected."""
    for layer in model.layers.values():
        layer.attention.q_norm = layer.attention.k_norm = None


def norm_over_all_heads(model: nn.Module) -> None:
    """Normalise all heads of a token together, in place of each head by itself."""

    def widen(norm):
        def forward(x_BSNH):
            mean = x_BSNH.square().mean(dim=(-2, -1), keepdim=True)
            return x_BSNH * torch.rsqrt(mean + norm.eps) * norm.weight

        norm.forward = forward

    for layer in model.layers.values():
        widen(layer.attention.q_norm)
        widen(layer.attention.k_norm)


def norm_after_rotation(model: nn.Module) -> None:
    """Rotate first: lengths stay right, but each channel's weight meets a rotated channel."""

    def then_norm(attention):
        rotate, q_norm, k_norm = attention.rope.forward, attention.q_norm, attention.k_norm

        def forward(query, key, positions=None):
            query, key = rotate(query, key, positions)
            return q_norm(query), k_norm(key)

        attention.rope.forward = forward
        attention.q_norm = attention.k_norm = nn.Identity()

    for layer in model.layers.values():
        then_norm(layer.attention)


def norm_weights_of_one(model: nn.Module) -> None:
    """Normalise queries and keys by weights of one: what a model has that never loaded its own."""
    for layer in model.layers.values():
        nn.init.ones_(layer.attention.q_norm.weight)
        nn.init.ones_(layer.attention.k_norm.weight)


def one_head_permuted(model: nn.Module) -> None:
    """Swap the first two query heads of the first layer, but not the rows that read them."""
    projection = next(iter(model.layers.values())).attention.qkv_linear
    width = projection.head_dim
    with torch.no_grad():
        rows = projection.wqkv.weight[: 2 * width]
        rows.copy_(torch.cat([rows[width:], rows[:width]]))


ALL = {
    "interleaved rotary pairs": interleaved_rotary,
    "rotary base 1e6": theta_of_the_first_release,
    "no query/key norm": no_query_key_norm,
    "norm over all heads": norm_over_all_heads,
    "norm after rotation": norm_after_rotation,
    "norm weights of one": norm_weights_of_one,
    "one head permuted": one_head_permuted,
}
