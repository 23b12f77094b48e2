"""What the tests of this folder share: tiles with data, and running a body on a simulated core."""

import re

import numpy as np
import pytest
from hypothesis import strategies as st

from nki_sim import KernelError, arch
from nki_sim.dtypes import BY_NAME, INTEGERS
from nki_sim.launch import Launch
from nki_sim.machine import MemoryRegion
from nki_sim.table import mark_written
from nki_sim.tensors import ndarray
from nki_sim.tracing import active

REGION = {
    "sbuf": MemoryRegion.sbuf,
    "psum": MemoryRegion.psum,
    "hbm": MemoryRegion.shared_hbm,
}


def on_core(body, lnc=1, version=arch.DEFAULT_VERSION):
    """Run body() on a simulated core, without arguments, lint or output checks."""
    launch = Launch(lnc, version, active())
    result = launch.run(body)
    if launch.trace is not None:
        launch.trace.finish(launch)
    return result


def refuses(text, body, **kwargs):
    """body() on a core raises a KernelError that matches `text`, in what it says itself.

    An error ends with the kernel's line, here the test's own, in which `text` stands anyway.
    """
    with pytest.raises(KernelError) as error:
        on_core(body, **kwargs)
    said = "\n".join(line for line in str(error.value).split("\n") if not line.startswith("  at "))
    assert re.search(text, said), said


def fill(t, values):
    """Put data into a tensor without an instruction."""
    t.np[...] = np.asarray(values).astype(t.np.dtype).reshape(t.shape)
    mark_written(t)
    return t


def tile(values, place="sbuf", dtype=None):
    """A whole tile that holds `values`."""
    values = np.asarray(values)
    return fill(ndarray(values.shape, dtype or values.dtype, REGION[place]), values)


def blank(shape, dtype="float32", place="sbuf"):
    return ndarray(shape, dtype, REGION[place])


def random_values(rng, shape, dtype):
    if dtype in INTEGERS:
        low = 0 if BY_NAME[dtype].kind == "u" else -100
        return rng.integers(low, 100, shape).astype(BY_NAME[dtype])
    return rng.standard_normal(shape).astype(np.float32).astype(BY_NAME[dtype])


shapes = st.tuples(
    st.integers(1, 128), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
).map(lambda s: (s[0], *s[1]))
floats = st.sampled_from(["float32", "bfloat16", "float16"])
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int32", "int16", "uint8"])
seeds = st.integers(0, 2**31)


class Views:
    """Draws views of random layout: steps, gaps and start partitions around the wanted shape."""

    def __init__(self, draw, rng):
        self.draw, self.rng = draw, rng

    def empty(self, shape, dtype, place="sbuf"):
        """A view of `shape`, nothing of it written."""
        steps = [self.draw(st.integers(1, 2)) for _ in shape[1:]]
        before = [self.draw(st.integers(0, 2)) for _ in shape[1:]]
        starts = [p for p in arch.start_partitions(shape[0]) if p + shape[0] <= 128]
        start = self.draw(st.sampled_from(starts))
        outer = [start + shape[0]]
        outer += [b + n * s for b, n, s in zip(before, shape[1:], steps, strict=True)]
        keys = [slice(start, start + shape[0])]
        keys += [slice(b, b + n * s, s) for b, n, s in zip(before, shape[1:], steps, strict=True)]
        return ndarray(tuple(outer), dtype, REGION[place])[tuple(keys)]

    def holding(self, values, dtype, place="sbuf"):
        """A view that holds `values`; only its own elements are written."""
        return fill(self.empty(values.shape, dtype, place), values)


def rounded(values, dtype):
    """float32 values as an engine writes them: an independent statement of the rule in numpy."""
    kind = BY_NAME[dtype]
    if kind.kind not in "iu":
        return np.asarray(values, np.float32).astype(kind)
    limits = np.iinfo(kind)
    return np.clip(np.rint(np.asarray(values, np.float64)), limits.min, limits.max).astype(kind)


def same(actual, expected):
    """Equal bit for bit, NaN equal to NaN."""
    np.testing.assert_array_equal(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64).reshape(actual.shape)
    )
