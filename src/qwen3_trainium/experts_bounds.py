"""What the expert kernels are held to: a loop over experts, and how far they may be from it.

The bounds are worst cases, element by element, in float64. Two ways of adding K products differ by
at most 2·K·2⁻²⁴·Σ|aᵢbᵢ|; an error of a factor passes on multiplied by the other factor; a value
that is rounded to bfloat16 on its way is off by 2⁻⁸ of itself. SiLU's slope is at most 1.1, and
the slope of its slope at most 1/2.

Shape suffixes: R routed rows, E experts, D model dimension, F expert width, r rows of one expert.
"""

import torch
from torch.nn import functional

UNIT = 2.0**-24  # float32 rounds a value by at most this much of it
FEW = 8 * UNIT  # exponential, division and two products of SiLU and its slope
BFLOAT16 = 2.0**-8
NAMES = ("y", "dx", "dw1", "dw2", "dw3")


def loop(x_RD, num_tokens_per_expert_E, w1_EFD, w2_EDF, w3_EFD):
    """The definition: each expert's rows through its three matrices; for autograd to follow."""
    rows = x_RD.split(num_tokens_per_expert_E.tolist())
    return torch.cat(
        [
            (functional.silu(x_rD @ w1.T) * (x_rD @ w3.T)) @ w2.T
            for x_rD, w1, w2, w3 in zip(rows, w1_EFD, w2_EDF, w3_EFD, strict=True)
        ]
    )


def results(function, x_RD, num_tokens_per_expert_E, weights, dy_RD) -> dict[str, torch.Tensor]:
    """y of a function of `grouped_experts`' signature, and the gradients that dy_RD gives."""
    leaves = [t.detach().clone().requires_grad_() for t in (x_RD, *weights)]
    y_RD = function(leaves[0], num_tokens_per_expert_E, *leaves[1:])
    y_RD.backward(dy_RD.to(y_RD.dtype))
    return dict(zip(NAMES, (y_RD.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def bounds(x_RD, num_tokens_per_expert_E, weights, dy_RD, dtype) -> dict[str, torch.Tensor]:
    """Largest allowed |difference| from a float32 loop, for each element of each result.

    dtype   of the operator's inputs; the loop is given the same values in float32
    """
    x_RD, dy_RD = x_RD.double(), dy_RD.double()
    w1_EFD, w2_EDF, w3_EFD = (w.double() for w in weights)
    rounding = BFLOAT16 if dtype == torch.bfloat16 else 0.0
    y, dx = torch.zeros_like(x_RD), torch.zeros_like(x_RD)
    dw1, dw2, dw3 = (torch.zeros_like(w) for w in (w1_EFD, w2_EDF, w3_EFD))
    end = 0
    for e, count in enumerate(num_tokens_per_expert_E.tolist()):
        rows, end = slice(end, end + count), end + count
        if not count:
            continue  # no row: exactly zero
        D, F = w2_EDF.shape[1:]
        x, dy, w1, w2, w3 = x_RD[rows], dy_RD[rows], w1_EFD[e], w2_EDF[e], w3_EFD[e]
        gate, up = x @ w1.T, x @ w3.T
        gate_off = _product(x, w1.T, D) + rounding * gate.abs()
        up_off = _product(x, w3.T, D) + rounding * up.abs()
        sigmoid = torch.sigmoid(gate)
        silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
        act = silu * up
        act_off = 1.1 * gate_off * up.abs() + silu.abs() * up_off + (FEW + rounding) * act.abs()
        out = act @ w2.T
        y[rows] = _product(act, w2.T, F) + act_off @ w2.T.abs() + rounding * out.abs()

        dact = dy @ w2
        dact_off = _product(dy, w2, D)
        dup, dgate = dact * silu, dact * up * slope
        dup_off = dact_off * silu.abs() + dact.abs() * 1.1 * gate_off
        dup_off += (FEW + rounding) * dup.abs()
        dgate_off = dact_off * (up * slope).abs()
        dgate_off += dact.abs() * (up_off * slope.abs() + 0.5 * gate_off * up.abs())
        dgate_off += (FEW + rounding) * dgate.abs()
        # Two products in one sum: twice as many terms.
        dx[rows] = _product(dgate, w1, 2 * F) + _product(dup, w3, 2 * F)
        dx[rows] += dgate_off @ w1.abs() + dup_off @ w3.abs()
        dx[rows] += rounding * (dgate @ w1 + dup @ w3).abs()
        for total, left, off, right in ((dw1, dgate, dgate_off, x), (dw3, dup, dup_off, x)):
            total[e] = _product(left.T, right, count) + off.T @ right.abs()
            total[e] += rounding * (left.T @ right).abs()
        dw2[e] = _product(dy.T, act, count) + dy.T.abs() @ act_off
        dw2[e] += rounding * (dy.T @ act).abs()
    return dict(zip(NAMES, (y, dx, dw1, dw2, dw3), strict=True))


def _product(left, right, terms):
    return 2 * terms * UNIT * (left.abs() @ right.abs())


def compare(ours: dict, theirs: dict, allowed: dict) -> dict[str, dict[str, float]]:
    """For each result the largest difference, the bound at that element, and the worst ratio.

    A ratio above 1 anywhere is an error. Elements that must be equal have bound 0 and ratio 0 or
    infinity; a value that is not a number gives an infinite ratio as well.
    """
    found = {}
    for name, right in theirs.items():
        off = (ours[name].double() - right.double()).abs()
        off = torch.nan_to_num(off, nan=float("inf"))
        ratio = torch.where(off > 0, off / allowed[name], 0.0)
        at = off.argmax() if off.numel() else None
        found[name] = {
            "difference": off.max().item() if off.numel() else 0.0,
            "bound there": allowed[name].flatten()[at].item() if off.numel() else 0.0,
            "largest ratio": ratio.max().item() if off.numel() else 0.0,
        }
    return found


def logit_bound(size: float, widest: int, layers: int, dtype=torch.float32) -> float:
    """How far logits of two right programs may differ, the size of the largest given.

    Each of the 2·layers residual additions brings the error of a matrix product: in float32 a sum
    of at most `widest` products, about √widest·2⁻²⁴ of its size; where experts compute in bfloat16
    one rounding of 2⁻⁸. Independent errors add as the root of their number; four of them make a
    bound that random rounding does not exceed.
    """
    one = BFLOAT16 if dtype == torch.bfloat16 else widest**0.5 * UNIT
    return 4 * one * (2 * layers) ** 0.5 * size


def loss_bound(rms: float, loss: float, widest: int, layers: int, dtype=torch.float32) -> float:
    """How far the mean losses of two right programs with the same weights and tokens may differ.

    rms    of the logits; `loss` in nats a token, `widest` and `layers` as in `logit_bound`
    dtype  the narrower one in which a program computes its matrix products

    Softmax takes the mean of all other logits' errors, so that a token's loss is off by the error
    of its own logit: `logit_bound` for a usual logit and not the largest. The mean over tokens is
    not taken to be better. A float32 loss is rounded four times on its way to the reader, by at
    most 2⁻²⁴ of it: of a token, in the sum, in the mean over ranks, and where it is stored.
    """
    return logit_bound(rms, widest, layers, dtype) + 4 * UNIT * loss
