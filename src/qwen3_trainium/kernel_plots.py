"""Figures about kernels: what lies where on chip, when, and how many bytes move for it.

All but the first are drawn from `nki_sim.trace()`. Nothing here shows time.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from nki_sim import arch
from nki_sim.machine import assigned_name
from qwen3_trainium.plots import BLUE, CYCLE, GREY, MARKERS, ORANGE, SKY

KIB = 1024


def row_tiles(rows: int) -> Axes:
    """How a matrix of `rows` rows is cut into tiles, each row on a partition of SBUF."""
    partitions = arch.PMAX
    tiles = -(-rows // partitions)
    _, ax = plt.subplots(figsize=(8.0, 3.6))
    colours = [CYCLE[i % len(CYCLE)] for i in range(tiles)]
    height = 0.9 / tiles
    for i, colour in enumerate(colours):
        last = min((i + 1) * partitions, rows) - 1
        y = 0.95 - (i + 1) * height
        ax.add_patch(Rectangle((0.08, y), 0.2, height - 0.01, color=colour, alpha=0.35, lw=0))
        ax.text(0.18, y + height / 2, f"rows {i * partitions}–{last}", ha="center", va="center")
        x = 0.56 + i * 0.4 / tiles
        width = 0.4 / tiles - 0.01
        ax.add_patch(Rectangle((x, 0.05), width, 0.89, color=colour, alpha=0.35, lw=0))
        ax.text(x + width / 2, 0.5, f"tile {i}", ha="center", va="center", rotation=90)
        arrow = {"arrowstyle": "->", "color": GREY, "connectionstyle": "arc3,rad=-0.05"}
        ax.annotate("", (x, 0.85 - 0.1 * i), (0.285, y + height / 2), arrowprops=arrow)
    for y, name in ((0.93, "partition 0"), (0.05, f"partition {partitions - 1}")):
        ax.text(0.555, y, name, ha="right", va="center", fontsize=9, color=GREY)
    ax.add_patch(Rectangle((0.075, 0.04), 0.21, 0.915, fill=False, edgecolor=GREY))
    ax.add_patch(Rectangle((0.555, 0.04), 0.41, 0.915, fill=False, edgecolor=GREY))
    ax.text(0.18, 0.99, "HBM: x [S, D]", ha="center", va="bottom")
    ax.text(0.76, 0.99, "SBUF: a row on each partition", ha="center", va="bottom")
    ax.text(0.76, 0.0, "→ bytes of a partition", ha="center", va="top", fontsize=9, color=GREY)
    ax.set(xlim=(0.05, 0.98), ylim=(-0.06, 1.08))
    ax.axis("off")
    return ax


def partition_contents(owners: Mapping[str, np.ndarray], title: str) -> np.ndarray:
    """Which position and head each element of the first partitions holds, one panel a layout.

    owners   name → int array [partitions, elements, 2] of (position, head)
    """
    fig, axes = plt.subplots(len(owners), 1, figsize=(8.0, 1.5 + 1.6 * len(owners)), squeeze=False)
    heads = 1 + max(int(o[..., 1].max()) for o in owners.values())
    for ax, (name, owner) in zip(axes[:, 0], owners.items(), strict=True):
        partitions, elements, _ = owner.shape
        for p in range(partitions):
            start = 0
            for end in range(1, elements + 1):
                if end < elements and (owner[p, end] == owner[p, start]).all():
                    continue
                position, head = owner[p, start]
                box = (start, p), end - start, 0.9
                ax.add_patch(Rectangle(*box, color=CYCLE[head % len(CYCLE)], alpha=0.45, lw=0))
                ax.text((start + end) / 2, p + 0.45, position, ha="center", va="center", fontsize=9)
                start = end
        ax.set(xlim=(0, elements), ylim=(partitions, 0), ylabel="partition", title=name)
        ax.set_yticks(np.arange(partitions) + 0.45, range(partitions))
    axes[-1, 0].set_xlabel("element of the partition (number: position in the sequence)")
    handles = [
        Patch(color=CYCLE[h % len(CYCLE)], alpha=0.45, label=f"head {h}") for h in range(heads)
    ]
    fig.legend(handles=handles, loc="outside right center")
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    return axes


def tile_map(trace, instructions: int | None = None) -> Axes:
    """SBUF of core 0 over the first kernel call: each tile a box from first to last instruction.

    instructions   how many to show, from the first on; all if None
    Height: bytes a partition. Places are first fit, as one way in which they can lie; a compiler
    chooses its own.
    """
    lives = [
        life for launch, core, life in trace.tiles if launch == core == 0 and life.place == "sbuf"
    ]
    lives.sort(key=lambda life: life.first)
    last = min(max(life.last for life in lives), instructions or 10**9)
    lives = [life for life in lives if life.first <= last]
    names = [assigned_name(life.line) or "(unnamed)" for life in lives]
    colours = {name: CYCLE[i % len(CYCLE)] for i, name in enumerate(dict.fromkeys(names))}
    _, ax = plt.subplots(figsize=(8.0, 3.8))
    placed: list[tuple] = []
    for life, name in zip(lives, names, strict=True):
        low = 0
        for other, start in sorted(placed, key=lambda p: p[1]):
            if other.last >= life.first and start < low + life.bytes and start + other.bytes > low:
                low = start + other.bytes
        placed.append((life, low))
        box = (life.first - 0.45, low / KIB), life.last - life.first + 0.9, life.bytes / KIB
        ax.add_patch(Rectangle(*box, facecolor=colours[name], alpha=0.5, edgecolor="white"))
    top = max(low + life.bytes for life, low in placed) / KIB
    capacity = arch.SBUF_BYTES / KIB
    ax.set(
        xlim=(0, last + 1),
        ylim=(0, top * 1.12),
        xlabel="instruction number",
        ylabel="KiB a partition",
        title=f"core 0: {top:.0f} of {capacity:.0f} KiB of SBUF in use at most",
    )
    handles = [Patch(color=colour, alpha=0.5, label=name) for name, colour in colours.items()]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def traffic(rows: Mapping[str, tuple[int, int]], least: int) -> Axes:
    """HBM bytes of each way: moved by the kernel, and by copies around it, against the minimum.

    rows   name → (bytes of the kernel, bytes of the copies)
    """
    _, ax = plt.subplots(figsize=(8.0, 1.2 + 0.55 * len(rows)))
    names = list(rows)
    kernel = np.array([rows[name][0] for name in names]) / 2**20
    copies = np.array([rows[name][1] for name in names]) / 2**20
    ax.barh(names, kernel, color=BLUE, alpha=0.85, label="the kernel")
    ax.barh(
        names, copies, left=kernel, color=ORANGE, alpha=0.7, hatch="//", label="copies around it"
    )
    ax.axvline(least / 2**20, color=GREY, linestyle="--", label="least possible")
    ax.invert_yaxis()
    ax.set(xlabel="HBM bytes read and written (MiB)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def pieces(traces: Mapping[str, object]) -> Axes:
    """Contiguous pieces of HBM that transfers are made of: share of the bytes, by size."""
    _, ax = plt.subplots()
    for i, (name, trace) in enumerate(traces.items()):
        found = trace.pieces()
        total = sum(found.values())
        sizes = list(found)
        shares = np.cumsum([found[size] for size in sizes]) / total * 100
        ax.step(
            [sizes[0] / 2, *sizes, 32 * KIB],
            [0, *shares, 100],
            where="post",
            color=CYCLE[i],
            linestyle=("-", "--", ":", "-.")[i % 4],
            linewidth=2,
            label=name,
        )
    ax.axvline(2 * KIB, color=GREY, linestyle="--", linewidth=1)
    ax.annotate("2 KiB", (2 * KIB, 104), ha="center", color=GREY, annotation_clip=False)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="bytes of a contiguous piece", ylabel="bytes in pieces up to\nthat size (%)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def rotation(angles_by_pair: Mapping[str, Sequence[float]]) -> Axes:
    """The pair (1, 0) of some channels at successive positions: arrows on a circle."""
    fig, axes = plt.subplots(1, len(angles_by_pair), figsize=(8.0, 2.9))
    for ax, (name, angles) in zip(axes, angles_by_pair.items(), strict=True):
        ax.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.6))
        shades = np.linspace(0.25, 1.0, len(angles))
        for position, (angle, shade) in enumerate(zip(angles, shades, strict=True)):
            x, y = np.cos(angle), np.sin(angle)
            arrow = {"arrowstyle": "->", "color": BLUE, "alpha": shade, "linewidth": 1.5}
            ax.annotate("", (x, y), (0, 0), arrowprops=arrow)
            if position in (0, len(angles) - 1):
                ax.text(1.18 * x, 1.18 * y, position, ha="center", va="center", fontsize=9)
        ax.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", title=name)
        ax.axis("off")
    fig.suptitle("arrows: positions, as numbered", x=0.01, ha="left", fontsize=10, color=GREY)
    return axes


def same_curves(curves: Mapping[str, object], ylabel: str) -> Axes:
    """Curves that may lie on each other: the first wide and pale, the others thin with markers."""
    _, ax = plt.subplots()
    for i, (name, curve) in enumerate(curves.items()):
        style = (
            {"linewidth": 7, "color": SKY, "alpha": 0.6}
            if i == 0
            else {"linewidth": 1.2, "color": CYCLE[i], "marker": MARKERS[i], "markersize": 5}
        )
        ax.plot(curve.index, curve, label=name, **style)
    ax.set(xlabel="optimizer step", ylabel=ylabel)
    ax.legend()
    return ax
