"""Does what is live at one time fit into SBUF and into PSUM's banks?

A tile is live from the first instruction that accesses it to the last one: what a compiler must
keep, in program order. It is known only when the kernel has run, so the check comes then.
"""

import math

import numpy as np

from . import arch
from .errors import KernelError, place
from .machine import CAPACITY


def live_bytes(core, where):
    """Live bytes a partition of "sbuf" or "psum" during each instruction of a core, as an array."""
    change = np.zeros(core.clock + 2, np.int64)
    for life in core.lives:
        if life.place == where and life.first is not None:
            change[life.first] += life.bytes
            change[life.last + 1] -= life.bytes
    return np.cumsum(change)[: core.clock + 1]


def check(core):
    """Raise KernelError if SBUF bytes or PSUM banks do not suffice at some instruction."""
    live = live_bytes(core, "sbuf")
    if live.max() > CAPACITY["sbuf"]:
        at = int(np.argmax(live > CAPACITY["sbuf"]))
        _overrun(
            core,
            "sbuf",
            at,
            f"{live[at]:,} bytes a partition are live",
            f"trn2 has {CAPACITY['sbuf']:,} usable SBUF bytes a partition",
        )
    _hand_out_banks(core)


def _hand_out_banks(core):
    """Tiles up to 2 KiB share a bank, larger ones take whole banks; the fullest that fits first."""
    free = [arch.PSUM_BANK_BYTES] * arch.PSUM_BANKS
    held = []  # (life, [(bank, bytes)])
    lives = [v for v in core.lives if v.place == "psum" and v.first is not None]
    for life in sorted(lives, key=lambda v: v.first):
        for old, banks in [h for h in held if h[0].last < life.first]:
            held.remove((old, banks))
            for bank, size in banks:
                free[bank] += size
        count = math.ceil(life.bytes / arch.PSUM_BANK_BYTES)
        need = min(life.bytes, arch.PSUM_BANK_BYTES)
        found = sorted((f, b) for b, f in enumerate(free) if f >= need)[:count]
        if count > 1:
            found = [(f, b) for b, f in enumerate(free) if f == arch.PSUM_BANK_BYTES][:count]
        if len(found) < count:
            _overrun(
                core,
                "psum",
                life.first,
                f"free bytes by bank are {free}, tile {life.describe()} needs {life.bytes:,}",
                f"trn2 has {arch.PSUM_BANKS} PSUM banks of {arch.PSUM_BANK_BYTES:,} bytes a "
                "partition",
            )
        for _, bank in found:
            free[bank] -= need
        held.append((life, [(bank, need) for _, bank in found]))


def _overrun(core, where, at, found, rule):
    lives = [
        v
        for v in core.lives
        if v.place == where and v.first is not None and v.first <= at <= v.last
    ]
    lives.sort(key=lambda v: v.bytes, reverse=True)
    newest = max(lives, key=lambda v: v.first)
    lines = [
        f"{where.upper()} overrun at instruction {at} of core {core.index}: {found}",
        f"  rule: {rule}; a tile is live from its first access to its last",
        "  do:   use smaller tiles, or use tiles up before others are filled",
        f"  at {place(newest.line)}",
    ]
    lines += [f"  live: {v.describe()}, {v.bytes:,} bytes, from {place(v.line)}" for v in lives[:5]]
    if len(lives) > 5:
        lines.append(f"  live: {len(lives) - 5} more")
    raise KernelError("\n".join(lines))
