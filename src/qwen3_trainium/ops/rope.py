"""Rotary embedding as PyTorch operators: the rope kernels, forward and backward.

`rope` is what a model calls. Below it are registered operators, each with its backward:
`qwen3_trainium::rope`, `::rope_at`, which takes positions, and `::rope_hf` over AWS's kernel. They
return new tensors and change no argument. Autograd keeps cosines, sines and positions, which all
layers can share, and never q or k: the gradient of a rotation needs no input. The cache gets no
gradient.

Shape suffixes: B batch, S sequence, H heads (of q or of k), D head dimension, W 2·D, M cache rows.
In the operators q and k are [B, H, S, D] if `heads_first`, else [B, S, H, D].
"""

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from qwen3_trainium import kernel_backend
from qwen3_trainium.errors import SettingError
from qwen3_trainium.kernels.rope import check_rope, rope_kernel, rope_kernel_bshd

OWN, ROPE_HF = "own", "rope_hf"


def rope(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    cos_sin: Tensor,
    positions_BS: Tensor | None = None,
    *,
    implementation: str = OWN,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angle of their position; differentiable in both.

    q_BSHD, k_BSHD   float32 or bfloat16, any strides; products in float32, one rounding on return
    cos_sin          float32 [S or more, 2D] or [B, S or more, 2D], cos then sin
    positions_BS     integers: row of a cache [M, 2D] for each position; None takes row s for s
    implementation   "own", or "rope_hf" where AWS's NKI library is installed
    Returns new tensors of the shapes and dtypes of q and k; autocast does not change them.
    Raises ValueError, in one sentence, for inputs that the kernels cannot take.
    """
    check(q_BSHD, k_BSHD, cos_sin, positions_BS)
    if implementation == ROPE_HF:
        if positions_BS is not None:  # that kernel takes rows in order
            cos_sin = cos_sin[positions_BS]
        turned = _rope_hf(q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), cos_sin)
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
    if implementation != OWN:
        raise SettingError(
            f"rope implementation {implementation!r} is unknown: use {OWN!r} or {ROPE_HF!r}"
        )
    if positions_BS is None:
        return _as_they_lie(_rope, q_BSHD, k_BSHD, cos_sin, False)
    return _as_they_lie(_rope_at, q_BSHD, k_BSHD, cos_sin, positions_BS, False)


def check(q_BSHD: Tensor, k_BSHD: Tensor, cos_sin: Tensor, positions_BS: Tensor | None) -> None:
    """Raise ValueError, in one sentence, for what the kernels cannot take."""
    positions_shape = None if positions_BS is None else positions_BS.shape
    check_rope(
        q_BSHD.shape, k_BSHD.shape, cos_sin.shape, kernel_backend.lnc(), "BSHD", positions_shape
    )
    if q_BSHD.dtype != k_BSHD.dtype:
        raise ValueError(f"q is {_name(q_BSHD)} and k is {_name(k_BSHD)}: give both the same dtype")
    # float64 is for gradcheck: no engine has it, so only the reference takes it.
    wide = kernel_backend.backend(q_BSHD) == kernel_backend.REFERENCE
    dtypes = (torch.float32, torch.bfloat16, *([torch.float64] if wide else []))
    if q_BSHD.dtype not in dtypes:
        raise ValueError(f"q and k are {_name(q_BSHD)}: use float32 or bfloat16")
    if cos_sin.dtype != (torch.float64 if q_BSHD.dtype == torch.float64 else torch.float32):
        raise ValueError(
            f"the cache is {_name(cos_sin)}: keep it in float32, since bfloat16 cannot tell "
            "neighbouring positions apart"
        )
    if positions_BS is not None:
        if positions_BS.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions are {_name(positions_BS)}: use int32 or int64")
        _check_rows(positions_BS, cos_sin.shape[0])


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_rows(positions_BS: Tensor, rows: int) -> None:
    """Every position names a row of the cache; where values are not at hand yet, later."""
    if torch.compiler.is_compiling() or isinstance(positions_BS, FakeTensor):
        return  # the kernel's own bounds check remains
    inside = (positions_BS.min() >= 0) & (positions_BS.max() < rows)
    if positions_BS.device.type != "cpu":
        # Reading a value would wait for the device: it stops there instead, as torchtitan's does.
        torch._assert_async(inside, f"positions beyond the {rows} rows of the rotary cache")
    elif not inside:
        raise ValueError(
            f"positions run from {positions_BS.min()} to {positions_BS.max()}, but the cache has "
            f"rows 0 to {rows - 1}: make max_seq_len larger, or restart positions at each document"
        )


def _as_they_lie(operator, q: Tensor, k: Tensor, *rest):
    """Call an operator on the layout in which q and k lie in memory; the last of rest names theirs.

    Both may be transposed views, as attention's gradients and Transformers' queries are. The
    kernel for the other layout then reads them where they are, without a copy.
    """
    turned = [x.transpose(1, 2) for x in (q, k)]
    lie_turned = all(x.is_contiguous() for x in turned)
    if not lie_turned or (q.is_contiguous() and k.is_contiguous()):
        return operator(q, k, *rest)
    out = operator(*turned, *rest[:-1], not rest[-1])
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


# ------------------------------------------------------------------ what the operators compute


def _rotate(q, k, cos_sin, positions_BS, heads_first, backward):
    """One launch of our kernel."""
    kernel = rope_kernel if heads_first else rope_kernel_bshd
    notes = [*(["backward"] if backward else [])]
    if positions_BS is not None:
        notes.append("rows by position")
        positions_BS = positions_BS.to(torch.int32).contiguous()  # what indirect DMA takes
    return kernel_backend.run(
        kernel,
        q.contiguous(),
        k.contiguous(),
        cos_sin.contiguous(),
        backward,
        positions_BS,
        reference=functools.partial(reference, heads_first=heads_first),
        note=", ".join(notes),
    )


def _rotate_hf(q_BHSD, k_BHSD, cos_sin, backward):
    """One launch of AWS's kernel, which is given its outputs."""
    try:
        from nkilib.core.embeddings.rope_hf import rope_hf
    except ImportError as error:
        raise SettingError(
            f"rope implementation {ROPE_HF!r} needs AWS's NKI library ({error}): use {OWN!r}"
        ) from None
    q_BHSD, k_BHSD = q_BHSD.contiguous(), k_BHSD.contiguous()
    outputs = torch.empty_like(q_BHSD), torch.empty_like(k_BHSD)

    def plain(q, k, q_out, k_out, cos, sin, cache, backward):
        return reference(q, k, cache, backward, None, heads_first=True)

    return kernel_backend.run(
        rope_hf,
        *(q_BHSD, k_BHSD, *outputs, None, None, cos_sin.contiguous(), backward),
        reference=plain,
        note="backward" if backward else "",
    )


def reference(q, k, cos_sin, backward, positions_BS, *, heads_first):
    """What the kernels compute, in PyTorch: float32 (or wider) inside, one rounding on return."""
    S = q.shape[2 if heads_first else 1]
    rows = cos_sin[..., :S, :] if positions_BS is None else cos_sin[positions_BS]
    if not heads_first:
        rows = rows.unsqueeze(-2)
    elif rows.ndim == 3:
        rows = rows.unsqueeze(1)
    cos, sin = rows.chunk(2, -1)

    def rotate(x):
        wide = x.to(cos.dtype)
        if backward:
            first, second = (wide * sin).chunk(2, -1)
            crossed = torch.cat((second, -first), -1)
        else:
            first, second = wide.chunk(2, -1)
            crossed = torch.cat((-second, first), -1) * sin
        return (wide * cos + crossed).to(x.dtype).contiguous()

    return rotate(q), rotate(k)


# ------------------------------------------------------------------ the operators


def _new(q, k, *rest):
    """Shapes, dtypes and strides of a result."""
    return q.new_empty(q.shape), k.new_empty(k.shape)


operator = functools.partial(kernel_backend.operator, fake=_new)


@operator("qwen3_trainium::rope")
def _rope(q: Tensor, k: Tensor, cos_sin: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos_sin, None, heads_first, False)


@operator("qwen3_trainium::rope_backward")
def _rope_backward(
    grad_q: Tensor, grad_k: Tensor, cos_sin: Tensor, heads_first: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(grad_q, grad_k, cos_sin, None, heads_first, True)


@operator("qwen3_trainium::rope_at")
def _rope_at(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions_BS: Tensor, heads_first: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos_sin, positions_BS, heads_first, False)


@operator("qwen3_trainium::rope_at_backward")
def _rope_at_backward(
    grad_q: Tensor, grad_k: Tensor, cos_sin: Tensor, positions_BS: Tensor, heads_first: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(grad_q, grad_k, cos_sin, positions_BS, heads_first, True)


@operator("qwen3_trainium::rope_hf")
def _rope_hf(q_BHSD: Tensor, k_BHSD: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate_hf(q_BHSD, k_BHSD, cos_sin, False)


@operator("qwen3_trainium::rope_hf_backward")
def _rope_hf_backward(grad_q: Tensor, grad_k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate_hf(grad_q, grad_k, cos_sin, True)


def _differentiate(operator, transpose) -> None:
    """Register `transpose` as the gradient of `operator`: both are linear in q and k."""

    def setup_context(ctx, inputs, output):
        q, k, *rest = inputs
        ctx.shapes = q.shape, k.shape
        ctx.save_for_backward(*(x for x in rest if isinstance(x, Tensor)))
        ctx.flags = [x for x in rest if not isinstance(x, Tensor)]

    def backward(ctx, *gradients):
        like = next(gradient for gradient in gradients if gradient is not None)
        filled = [
            like.new_zeros(shape) if gradient is None else gradient
            for gradient, shape in zip(gradients, ctx.shapes, strict=True)
        ]
        rest = [*ctx.saved_tensors, *ctx.flags]
        call = _as_they_lie if ctx.flags else lambda operator, *arguments: operator(*arguments)
        return *call(transpose, *filled, *rest), *(None for _ in rest)

    operator.register_autograd(backward, setup_context=setup_context)


for _pair in (
    (_rope, _rope_backward),
    (_rope_at, _rope_at_backward),
    (_rope_hf, _rope_hf_backward),
):
    _differentiate(*_pair)
    _differentiate(*reversed(_pair))  # so that a gradient can be differentiated again
