"""Instructions that move elements by index, inside a partition or a group of partitions."""

import numpy as np

from .errors import fail
from .numeric import free_size
from .rules import same_dtype, same_partitions, same_size
from .table import CHIP, SB, Rule, inp, instruction, mark_written, out

KEEP = 255  # shuffle mask entry that leaves the destination partition as it is


def _check_mask(a):
    mask = a["shuffle_mask"]
    if len(mask) != 32 or any(m != KEEP and not 0 <= m < 32 for m in mask):
        return f"shuffle_mask of {len(mask)} entries"
    return None


def _check_shuffle_size(a):
    dst, src = a["dst"], a["src"]
    if free_size(dst) != free_size(src) or src.shape[0] > dst.shape[0]:
        return f"dst {dst.describe()}, src {src.describe()}"
    return None


@instruction(
    "vector",
    dst=out(CHIP),
    src=inp(CHIP),
    rules=[
        Rule("shuffle_mask has 32 entries, 0 to 31 or 255", _check_mask),
        Rule("equal N: dst, src; src has no more partitions than dst", _check_shuffle_size),
        same_dtype("dst", "src"),
    ],
    marks=False,
)
def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """In each quadrant of 32 partitions, dst[i] = src[mask[i]]; 255 leaves dst[i] as it is."""
    before = src.np.copy()
    for p in range(dst.shape[0]):
        m = shuffle_mask[p % 32]
        if m == KEEP:
            continue
        source = p - p % 32 + m
        if source >= src.shape[0]:
            fail(
                f"shuffle_mask[{p % 32}] = {m} reads partition {source} of {src.describe()}",
                rule="the mask names partitions of the source",
                instruction="nc_stream_shuffle",
            )
        target = dst[p : p + 1]
        target.np[...] = before[source].reshape(target.shape)
        mark_written(target)


@instruction(
    "gpsimd",
    dst=out(SB),
    data=inp(SB),
    indices=inp(SB, ("uint32",)),
    rules=[
        same_size("dst", "indices"),
        same_partitions("dst", "data"),
        same_dtype("dst", "data"),
    ],
)
def nc_n_gather(dst, data, indices, name=None):
    """dst[p, j] = data[p, indices[p, j]], free dimensions flattened."""
    values = data.np.reshape(data.shape[0], -1)
    picks = indices.np.reshape(len(values), -1).astype(np.int64)
    if picks.max() >= values.shape[1]:
        fail(
            f"index {picks.max()} into {data.describe()}",
            rule=f"indices are 0 to {values.shape[1] - 1}",
            instruction="nc_n_gather",
        )
    dst.np[...] = np.take_along_axis(values, picks, axis=1).reshape(dst.shape)


def _check_groups(a):
    src, index = a["src_buffer"], a["index"]
    if src.shape[0] % 16 or not index.shape[0] == src.shape[0] == a["dst"].shape[0]:
        return f"src_buffer {src.describe()}, index {index.describe()}"
    return None


def _check_local_counts(a):
    valid, each, index = a["num_valid_indices"], a["num_elem_per_idx"], a["index"]
    limit = 16 * free_size(index)
    valid = limit if valid is None else valid
    if each not in (1, 2, 4, 8, 16, 32) or limit > 4096 or not 1 <= valid <= limit:
        return f"num_elem_per_idx {each}, {valid} indices of {limit}"
    wanted = valid * each
    if free_size(a["dst"]) != wanted:
        return f"dst {a['dst'].describe()} for {wanted} elements"
    return None


@instruction(
    "gpsimd",
    dst=out(SB),
    src_buffer=inp(SB),
    index=inp(SB, ("uint16",)),
    rules=[
        Rule("equal P, a multiple of 16: dst, src_buffer, index", _check_groups),
        Rule(
            "num_elem_per_idx is 1/2/4/8/16/32; at most 4096 indices a group; dst has a place "
            "for each",
            _check_local_counts,
        ),
        same_dtype("dst", "src_buffer"),
    ],
)
def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    """In each group of 16 partitions, gather the elements that the group's own indices name.

    A group's indices are read partition first: index[0..15, 0], then index[0..15, 1], ...
    """
    values = src_buffer.np.reshape(src_buffer.shape[0], -1)
    target = np.empty((dst.shape[0], free_size(dst)), dst.np.dtype)
    picks = index.np.reshape(index.shape[0], -1).astype(np.int64)
    for group in range(0, len(values), 16):
        listed = picks[group : group + 16].T.reshape(-1)[:num_valid_indices]
        places = (listed[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if places.max() >= values.shape[1]:
            fail(
                f"index {places.max()} into {src_buffer.describe()}",
                rule="an index stays inside the partition",
                instruction="local_gather",
            )
        target[group : group + 16] = values[group : group + 16, places]
    dst.np[...] = target.reshape(dst.shape)
