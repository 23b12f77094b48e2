"""Figures of lesson 04: where tokens go, how they fill blocks, and who owns which weights."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from qwen3_trainium.plots import BLUE, CYCLE, DASHES, GREY, MARKERS, ORANGE, SKY


def routing(tokens: np.ndarray) -> np.ndarray:
    """Tokens of each expert over the steps of a run, one map a layer: int [steps, layers, E]."""
    steps, layers, experts = tokens.shape
    figure, axes = plt.subplots(layers, 1, figsize=(8.0, 1.2 + 1.25 * layers), sharex=True)
    for layer, ax in enumerate(np.atleast_1d(axes)):
        extent = (-0.5, experts - 0.5, steps + 0.5, 0.5)
        image = ax.imshow(
            tokens[:, layer],
            aspect="auto",
            cmap="cividis",
            extent=extent,
            vmin=0,
            vmax=tokens.max(),
            interpolation="nearest",
        )
        ax.set(ylabel="step", yticks=[1, steps], title=f"layer {layer}")
    np.atleast_1d(axes)[-1].set_xlabel("expert")
    label = f"tokens an expert got\n(evenly spread: {tokens[0, 0].sum() / experts:.0f})"
    figure.colorbar(image, ax=axes, label=label)
    return axes


def blocks(counts: Sequence[int], limit: int) -> Axes:
    """Blocks of one layer in order: how full each is, whose it is, and those nobody needs.

    counts   rows of each expert
    limit    blocks that the compiled kernel has, whatever the routing
    """
    size = 128
    fills, starts = [], []
    for count in counts:
        starts.append(len(fills))
        fills += [min(size, count - first) for first in range(0, count, size)]
    _, ax = plt.subplots(figsize=(8.0, 3.2))
    owner = np.repeat(np.arange(len(counts)), np.diff([*starts, len(fills)])) % 2
    colours = [(BLUE, SKY)[i] for i in owner]
    ax.bar(range(limit), size, width=1.0, color="white", edgecolor="#dddddd", linewidth=0.5)
    ax.bar(range(len(fills)), fills, width=0.9, color=colours)
    unused = range(len(fills), limit)
    ax.bar(unused, size, width=0.9, color="none", edgecolor=GREY, hatch="///", linewidth=0.3)
    ax.set(xlabel="block", ylabel="rows in the block", xlim=(-1, limit), ylim=(0, size))
    ax.set_yticks([0, size // 2, size])
    handles = [
        Patch(color=BLUE, label="rows, one expert and"),
        Patch(color=SKY, label="the next by turns"),
        Patch(facecolor="white", edgecolor="#bbbbbb", label="padding: moved by no DMA"),
        Patch(facecolor="white", edgecolor=GREY, hatch="///", label="unused: no rows at all"),
    ]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9)
    return ax


def who_owns() -> np.ndarray:
    """Full sharding against expert parallelism, drawn for as many experts as ranks."""
    ranks = 8  # that are drawn of the 64
    _, axes = plt.subplots(1, 2, figsize=(8.0, 4.3))
    for ax, shared in zip(axes, (True, False), strict=True):
        for rank, expert in np.ndindex(ranks, ranks):
            left, top = expert + 0.06, rank + 0.06
            frame = Rectangle((left, top), 0.88, 0.88, facecolor="white", edgecolor="#cccccc")
            ax.add_patch(frame)
            if shared:
                slice_top = top + 0.88 * rank / ranks
                ax.add_patch(Rectangle((left, slice_top), 0.88, 0.88 / ranks, color=BLUE, lw=0))
            elif rank == expert:
                ax.add_patch(Rectangle((left, top), 0.88, 0.88, color=ORANGE, lw=0))
        ax.set(xlim=(0, ranks), ylim=(ranks, 0), aspect="equal")
        names = [*range(ranks - 1), "…63"]
        ax.set_xticks(np.arange(ranks) + 0.5, names)
        ax.set_yticks(np.arange(ranks) + 0.5, names)
        ax.set(xlabel="expert", ylabel="rank")
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    axes[0].set_title("fully sharded: every rank keeps\n1/64 of every expert; weights travel")
    axes[1].set_title("expert parallel (not used here):\nevery rank keeps one; tokens travel")
    return axes


def curves(runs: Mapping[str, pd.Series], differences: Mapping[str, tuple[pd.Series, float]]):
    """Losses of runs on one axis, and below how far apart they are with the bound of each.

    differences   name → (difference by step, bound)
    """
    _, (above, below) = plt.subplots(2, 1, figsize=(8.0, 5.6), sharex=True, height_ratios=[1.2, 1])
    for i, (name, loss) in enumerate(runs.items()):
        # Curves that coincide: each smaller than the one beneath it.
        above.plot(
            loss.index,
            loss,
            DASHES[i],
            marker=MARKERS[i],
            markersize=11 - 3 * i,
            linewidth=4 - i,
            alpha=0.9,
            label=name,
        )
    above.set_ylabel("loss (nats a token)")
    above.legend(loc="upper right")
    for i, (name, (difference, bound)) in enumerate(differences.items()):
        colour = CYCLE[i + 1]  # that of the run above: the first one is what all are compared with
        below.plot(difference.index, difference, MARKERS[i + 1], color=colour, label=name)
        below.axhline(bound, color=colour, linestyle=DASHES[i + 1], label=f"bound {bound:g}")
    below.set_yscale("symlog", linthresh=1e-7, linscale=0.6)
    below.set_ylim(bottom=-4e-8)
    below.set(xlabel="optimizer step", ylabel="difference\n(nats a token)")
    below.set_xticks(next(iter(runs.values())).index)
    below.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return above, below


def stages(rows: pd.DataFrame) -> np.ndarray:
    """Traffic against the minimum and use of the array, one pair of bars a stage.

    rows   columns "HBM / minimum", "array, matmuls" and "array, with transposes", by stage
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8.0, 0.9 + 0.55 * len(rows)), sharey=True)
    places = np.arange(len(rows))
    left.barh(places, rows["HBM / minimum"], color=BLUE, height=0.6)
    left.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    left.axvline(1.3, color=ORANGE, linestyle=":", linewidth=1.5)
    left.set(xlabel="HBM traffic / minimum\n(dashed 1.0, dotted our limit 1.3)")
    right.barh(places - 0.17, rows["array, matmuls"], color=SKY, height=0.32, label="matmuls alone")
    right.barh(
        places + 0.17,
        rows["array, with transposes"],
        color=ORANGE,
        height=0.32,
        hatch="//",
        label="with transposes",
    )
    right.set(xlabel="multiplier array in use", xlim=(0, 1.02))
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)
    left.set_yticks(places, rows.index)
    left.invert_yaxis()
    return left, right
