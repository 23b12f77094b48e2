"""Figures of the lessons: one function a figure, labelled axes with units, one palette.

The colours are Okabe and Ito's, which readers with any colour vision can tell apart; where two
lines share an axis they also differ in dash or marker.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
YELLOW, SKY, PINK, GREY = "#E69F00", "#56B4E9", "#CC79A7", "#666666"
CYCLE = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":", "-.")


def use_style() -> None:
    """Sizes that can be read at 100 % on a page."""
    plt.rcParams.update(
        {
            "figure.figsize": (8.0, 3.6),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=CYCLE),
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "legend.frameon": False,
        }
    )


def loss_curves(curves: Mapping[str, pd.Series], lines: Mapping[str, float]) -> Axes:
    """Training loss by step, one curve a run, with horizontal lines for values from a formula."""
    _, ax = plt.subplots()
    for i, (name, loss) in enumerate(curves.items()):
        ax.plot(loss.index, loss, marker=MARKERS[i], label=name)
    for i, (name, value) in enumerate(lines.items()):
        ax.axhline(value, color=GREY, linestyle=("--", ":", "-.")[i], label=f"{name} = {value:.2f}")
    ax.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def learning_curve(metrics: pd.DataFrame) -> Axes:
    """Training loss at every step and held-out loss where it was measured."""
    _, ax = plt.subplots()
    ax.plot(metrics.index, metrics.loss, color=BLUE, linewidth=1.2, label="training text")
    heldout = metrics.heldout_loss.dropna()
    ax.plot(heldout.index, heldout, "s", color=ORANGE, label="held-out text")
    ax.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    ax.legend()
    return ax


def step_times(runs: Mapping[str, pd.DataFrame]) -> Axes:
    """Seconds of each step: the first one holds set-up (on Neuron, compilation)."""
    _, ax = plt.subplots()
    width = 0.8 / len(runs)
    for i, (name, metrics) in enumerate(runs.items()):
        offset = (i - (len(runs) - 1) / 2) * width
        hatch = (None, "//")[i % 2]
        ax.bar(metrics.index + offset, metrics.seconds, width, label=name, hatch=hatch, alpha=0.9)
    ax.set(xlabel="optimizer step", ylabel="time of the step (s)")
    ax.set_xticks(next(iter(runs.values())).index)
    ax.legend()
    return ax


def tensor_changes(changes: pd.DataFrame) -> Axes:
    """How far training moved each tensor, relative to its size, by layer and kind.

    changes   as `verify.tensor_changes` returns it: columns key, relative
    """
    inside = changes[changes.key.str.contains(r"layers\.\d+\.")]
    layer = inside.key.str.extract(r"layers\.(\d+)\.")[0].astype(int)
    kind = inside.key.str.replace(r".*layers\.\d+\.(?:self_attn\.|mlp\.)?", "", regex=True)
    kind = kind.str.removesuffix(".weight")
    grid = inside.assign(layer=layer, kind=kind).pivot(
        index="kind", columns="layer", values="relative"
    )
    order = list(dict.fromkeys(kind))
    grid = grid.loc[order]
    fig, ax = plt.subplots(figsize=(8.0, 4.4))
    image = ax.imshow(grid * 100, aspect="auto", cmap="cividis")
    ax.set(xlabel="layer", xticks=range(grid.shape[1]), yticks=range(len(order)))
    ax.set_yticklabels(order)
    dark = image.norm(grid.to_numpy() * 100) < 0.6
    for i, j in np.ndindex(grid.shape if grid.shape[1] <= 8 else (0, 0)):
        colour = "white" if dark[i, j] else "black"
        ax.text(j, i, f"{grid.iloc[i, j] * 100:.2g}", ha="center", va="center", color=colour)
    fig.colorbar(image, label="relative change (%)")
    return ax


def document_lengths(lengths: Mapping[str, Sequence[int]], seq_len: int) -> Axes:
    """How many documents have how many tokens, and where one training sequence ends."""
    _, ax = plt.subplots()
    edges = np.logspace(1.5, np.log10(max(max(v) for v in lengths.values())) + 0.05, 28)
    for i, (name, values) in enumerate(lengths.items()):
        ax.hist(values, bins=edges, label=name, color=CYCLE[i], alpha=0.8, hatch=(None, "//")[i])
    ax.axvline(seq_len, color=GREY, linestyle="--", label=f"one sequence: {seq_len} tokens")
    ax.set(xscale="log", xlabel="tokens a document (log scale)", ylabel="documents")
    ax.legend()
    return ax


def packing(positions: Sequence[Sequence[int]]) -> Axes:
    """Packed sequences: the position of each token in its own document, one line a sequence."""
    _, ax = plt.subplots(figsize=(8.0, 3.2))
    for i, row in enumerate(positions):
        ax.plot(row, color=CYCLE[i], linestyle=("-", "--")[i % 2], label=f"rank {i}")
    ax.set(
        xlabel="place in the packed sequence (token)",
        ylabel="position in\nits document (token)",
    )
    ax.legend()
    return ax


def attention_mask(mask, title: str, ax: Axes | None = None) -> Axes:
    """Who sees whom: a boolean mask, query by key, True dark."""
    if ax is None:
        _, ax = plt.subplots(figsize=(4.2, 4.2))
    ax.imshow(mask, cmap="Blues", interpolation="nearest", vmin=0, vmax=1.4)
    ax.set(xlabel="key (token)", ylabel="query (token)", title=title)
    return ax


def rotary_frequencies(curves: Mapping[str, Sequence[float]]) -> Axes:
    """Angle a position turns each pair of channels by, one curve a source."""
    _, ax = plt.subplots()
    for i, (name, values) in enumerate(curves.items()):
        style = ("-", "--", ":")[i % 3]
        ax.plot(values, marker=MARKERS[i], markersize=5, linestyle=style, label=name)
    ax.set(xlabel="pair of channels", ylabel="frequency\n(radians a position)")
    ax.set_yscale("symlog", linthresh=1e-7)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def instance(chips: int, cores_per_chip: int, lnc: int) -> Axes:
    """An instance: chips, physical cores, and the logical cores that ranks get."""
    columns = 8
    rows = -(-chips // columns)
    _, ax = plt.subplots(figsize=(8.0, 1.55 * rows + 0.9))
    half = cores_per_chip // 2
    rank = 0
    for chip in range(chips):
        x, y = (chip % columns) * 1.0, (rows - 1 - chip // columns) * 1.25
        ax.add_patch(Rectangle((x + 0.04, y), 0.92, 1.1, facecolor="white", edgecolor=GREY))
        ax.text(x + 0.5, y + 1.02, f"chip {chip}", ha="center", va="top", fontsize=8, color=GREY)
        for core in range(0, cores_per_chip, lnc):
            cx, cy = x + 0.1 + (core % half) * 0.8 / half, y + 0.44 - (core // half) * 0.38
            width = lnc * 0.8 / half
            box = Rectangle((cx, cy), width - 0.03, 0.34, facecolor=SKY, edgecolor=BLUE)
            ax.add_patch(box)
            for inner in range(1, lnc):
                at = cx + inner * width / lnc - 0.015
                ax.plot([at, at], [cy, cy + 0.34], color=BLUE, linewidth=0.6, linestyle=":")
            ax.text(cx + width / 2 - 0.015, cy + 0.17, rank, ha="center", va="center", fontsize=8)
            rank += 1
    ax.set(xlim=(0, columns), ylim=(-0.1, rows * 1.25))
    ax.set_title(
        f"{chips} chips × {cores_per_chip} physical cores, LNC={lnc}: {rank} logical cores, one "
        "training rank each"
    )
    ax.axis("off")
    return ax


def block_differences(curves: Mapping[str, Sequence[float]]) -> Axes:
    """Largest difference to a reference after each block, one curve a program; 0.0 has its place.

    curves   one value a transformer block, the last one of the logits
    """
    _, ax = plt.subplots(figsize=(8.0, 4.2))
    places = range(1, max(map(len, curves.values())) + 1)
    for i, (name, values) in enumerate(curves.items()):
        colour, marker = (*CYCLE, GREY)[i % 7], (*MARKERS, "X")[i % 7]
        ax.plot(places, values, marker=marker, color=colour, linestyle=DASHES[i % 4], label=name)
    # Below the threshold the axis is linear, so that an exact 0.0 is a point and not a gap.
    ax.set_yscale("symlog", linthresh=1e-8, linscale=0.6)
    ax.set_ylim(bottom=-4e-9)
    labels = [*[f"block {place}" for place in places][:-1], "logits"]
    ax.set(xticks=list(places), xticklabels=labels, ylabel="largest difference to Transformers")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def step_differences(curves: Mapping[str, pd.Series], bound: float) -> Axes:
    """How far each run's loss is from a reference run's, step by step, below a stated bound."""
    _, ax = plt.subplots()
    for i, (name, difference) in enumerate(curves.items()):
        shift = (i - (len(curves) - 1) / 2) * 0.12  # equal points would hide each other
        ax.plot(difference.index + shift, difference, MARKERS[i], color=CYCLE[i], label=name)
    ax.axhline(bound, color=GREY, linestyle="--", label=f"bound = {bound:g}")
    ax.set_yscale("symlog", linthresh=1e-7, linscale=0.6)
    ax.set_ylim(bottom=-4e-8)
    ax.set(xlabel="optimizer step", ylabel="difference of loss\n(nats a token)")
    ax.set_xticks(next(iter(curves.values())).index)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def shards(meshes: Mapping[str, tuple[int, int]]) -> None:
    """Which rank keeps which part of a weight matrix [out, in], one column of drawings a mesh.

    meshes   title → (tensor-parallel degree, fully sharded degree)
    Tensor parallelism cuts first, by rows or by columns; full sharding then cuts each part by
    rows. Ranks of one tensor-parallel group are neighbours: rank = data index × degree + index.
    """
    kinds = ("query, key, value, gate, up\n(cut by output)", "output, down\n(cut by input)")
    _fig, axes = plt.subplots(2, len(meshes), figsize=(8.0, 5.2), squeeze=False)
    for column, (title, (tensor, data)) in enumerate(meshes.items()):
        for row, kind in enumerate(kinds):
            ax = axes[row][column]
            for d, t in np.ndindex(data, tensor):
                high, wide = (1 / (tensor * data), 1) if row == 0 else (1 / data, 1 / tensor)
                left, top = (0, t / tensor + d * high) if row == 0 else (t * wide, d * high)
                box = Rectangle((left, top), wide, high, facecolor=CYCLE[t % 6], edgecolor="white")
                box.set_alpha((0.55, 0.8)[d % 2])
                ax.add_patch(box)
                if tensor * data <= 8:
                    _label(ax, left + wide / 2, top + high / 2, f"rank {d * tensor + t}")
            if tensor * data > 8:
                for t in range(tensor):
                    middle = (t + 0.5) / tensor
                    x, y = (0.5, middle) if row == 0 else (middle, 0.5)
                    last = (data - 1) * tensor + t
                    text = f"ranks {t}, {t + tensor} … {last}"
                    _label(ax, x, y, text if row == 0 else text.replace(" ", "\n"))
            ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], xlabel="input channels →")
            ax.set_ylabel(f"{kind}\n← output channels" if column == 0 else "← output channels")
            for spine in ax.spines.values():
                spine.set_visible(True)
        axes[0][column].set_title(title, fontsize=11)


def _label(ax: Axes, x: float, y: float, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}
    ax.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box)
