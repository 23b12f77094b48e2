"""How engines read and write values: everything is float32 inside, one rounding on the way out."""

import numpy as np

from .dtypes import F32, cast
from .tensors import NkiTensor


def f32(t):
    """A tensor's values as float32, in the tensor's shape."""
    values = t.np
    return values if values.dtype is F32 else values.astype(F32)


def like(values, t):
    """`values` in the shape of `t`: instructions only ask for equal element counts."""
    return values if values.shape == t.shape else values.reshape(t.shape)


def per_partition(operand, t):
    """A scalar, or a [P, 1] vector shaped to broadcast along the free dimensions of `t`."""
    if operand.__class__ is NkiTensor:
        return f32(operand).reshape((-1,) + (1,) * (t.ndim - 1))
    return np.float32(operand)


def store(dst, values):
    """Write float32 (or already fitting) values to `dst`, rounded once to its dtype."""
    view = dst.np
    if values.shape != view.shape:
        values = values.reshape(view.shape)
    view[...] = values if values.dtype is view.dtype else cast(values, view.dtype)


def rows(t):
    """[P, N] float32: the free dimensions flattened in row-major order."""
    return f32(t).reshape(t.shape[0], -1)


def free_size(t):
    """N, the elements a partition."""
    return t.size // t.shape[0]
