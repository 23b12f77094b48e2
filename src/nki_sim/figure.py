"""The picture of a trace (`trace.plot()`); the only file that needs matplotlib."""

from . import arch
from .tracing import ENGINES

# Okabe and Ito's palette: distinguishable with any colour vision; lanes carry names as well.
_COLOURS = {
    "tensor": "#0072B2",
    "vector": "#E69F00",
    "scalar": "#009E73",
    "gpsimd": "#CC79A7",
    "sync": "#999999",
    "dma": "#56B4E9",
}


def draw(records, core):
    """Figure of one core's records: engine lanes above, live memory below."""
    import matplotlib.pyplot as plt

    used = [e for e in ENGINES if any(r.engine == e for r in records)]
    figure, (lanes, sbuf, psum) = plt.subplots(
        3,
        1,
        figsize=(9, 2.6 + 0.42 * len(used) + 2.4),
        sharex=True,
        layout="constrained",
        height_ratios=[0.5 + 0.42 * len(used), 1.2, 1.2],
    )
    width = max(0.8, len(records) / 900)  # never thinner than about a pixel
    for row, name in enumerate(used):
        starts = [(i - width / 2, width) for i, r in enumerate(records) if r.engine == name]
        lanes.broken_barh(starts, (row - 0.38, 0.76), color=_COLOURS[name], linewidth=0)
    lanes.set_yticks(range(len(used)), [_lane_label(name, records) for name in used])
    lanes.set_ylim(len(used) - 0.5, -0.5)
    lanes.set_title(f"Core {core}: {len(records)} instructions, in program order", loc="left")
    _memory(sbuf, [r.sbuf for r in records], arch.SBUF_BYTES, "SBUF", "#0072B2")
    _memory(
        psum, [r.psum for r in records], arch.PSUM_BANKS * arch.PSUM_BANK_BYTES, "PSUM", "#D55E00"
    )
    psum.set_xlabel("instruction number")
    psum.set_xlim(-width, len(records) - 1 + width)
    for axis in (lanes, sbuf, psum):
        axis.spines[["top", "right"]].set_visible(False)
    plt.close(figure)  # the caller shows it once, not twice
    return figure


def _lane_label(name, records):
    return f"{name} ({sum(r.engine == name for r in records):,})"


def _memory(axis, live, capacity, name, colour):
    kib = [b / 1024 for b in live]
    axis.fill_between(range(len(kib)), kib, step="mid", color=colour, alpha=0.25, linewidth=0)
    axis.step(range(len(kib)), kib, where="mid", color=colour)
    peak, limit = max(kib, default=0), capacity / 1024
    text = f"peak {peak:.1f} of {limit:.0f} KiB"
    # Little use of a large memory would be a flat line: then show the use and write the limit.
    top = limit if peak > 0.4 * limit else max(1.4 * peak, 0.01 * limit)
    axis.axhline(limit, color="#555555", linestyle="--", linewidth=1)
    axis.text(0.995, 0.95, text, transform=axis.transAxes, ha="right", va="top", fontsize=9)
    axis.set_ylim(0, 1.25 * top)
    axis.set_ylabel(f"{name} live\nKiB a partition")
