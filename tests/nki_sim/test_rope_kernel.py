"""The rope kernel against the same arithmetic in torch: 0.0 in float32, bfloat16 rounded once."""

import numpy as np
import pytest
import torch

from nki_sim import KernelError, lint, simulate, trace
from nki_sim.arch import SBUF_BYTES, VERSIONS
from qwen3_trainium.kernels.rope import check_rope, rope_kernel, rope_kernel_bshd


def angles(S, D, unequal=False):
    """True angles of Qwen3 (base 1e6) as a packed cache [S, 2D]; positions start above 0.

    unequal   another base for the second half of D: a transposed backward must notice
    """
    positions = torch.arange(1000, 1000 + S, dtype=torch.float64)[:, None]
    halves = [
        positions * base ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))[None]
        for base in (1e6, 1e5 if unequal else 1e6)
    ]
    a = torch.cat(halves, -1)
    return torch.cat((a.cos(), a.sin()), -1).float()


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def reference(x, cache):
    """x·cos + rotate_half(x)·sin, in float32."""
    D = x.shape[-1]
    if cache.ndim == 3:
        cache = cache[:, None]
    x, cos, sin = x.float(), cache[..., : x.shape[2], :D], cache[..., : x.shape[2], D:]
    return x * cos + rotate_half(x) * sin


def inputs(B, Hq, Hk, S, D, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, S, D, generator=g).to(dtype) for H in (Hq, Hk)]


CASES = [  # B, Hq, Hk, S, D, LNC, a cache for each sequence
    (1, 4, 2, 128, 64, 1, False),
    (1, 4, 2, 256, 64, 2, False),
    (2, 3, 1, 1280, 16, 1, False),  # 10 row tiles: 8 together, then 2
    (2, 2, 2, 2560, 16, 2, True),
    (3, 8, 2, 256, 128, 2, True),
]


def in_bhsd(kernel):
    """`kernel` called with and returning [B, H, S, D], whatever its own layout is."""
    if kernel.fn is rope_kernel.fn:
        return kernel

    def call(q, k, *args, **kwargs):
        turned = kernel(q.transpose(1, 2), k.transpose(1, 2), *args, **kwargs)
        return tuple(x.transpose(1, 2) for x in turned)

    return call


KERNELS = [rope_kernel, rope_kernel_bshd]
both = pytest.mark.parametrize("kernel", KERNELS, ids=["BHSD", "BSHD"])


@both
@pytest.mark.parametrize("case", CASES)
def test_forward_is_exact_in_float32(case, kernel):
    B, Hq, Hk, S, D, lnc, each = case
    q, k = inputs(B, Hq, Hk, S, D)
    cache = angles(S, D)
    if each:
        cache = torch.stack([cache * (1 + b) for b in range(B)])
    q_out, k_out = in_bhsd(kernel[lnc])(q, k, cache)
    assert (q_out - reference(q, cache)).abs().max() == 0
    assert (k_out - reference(k, cache)).abs().max() == 0


@both
@pytest.mark.parametrize("lnc", [1, 2])
def test_positions_choose_the_rows(lnc, kernel):
    """Two documents in each sequence, the second one restarting at 0; D makes N several rows."""
    B, S, D = 2, 512, 32
    q, k = inputs(B, 3, 1, S, D)
    cache = angles(300, D)
    positions = torch.stack([torch.cat((torch.arange(n), torch.arange(S - n))) for n in (212, 300)])
    gathered = cache[positions]
    q_out, k_out = in_bhsd(kernel[lnc])(q, k, cache, positions_BS=positions.int())
    assert (q_out - reference(q, gathered)).abs().max() == 0
    assert (k_out - reference(k, gathered)).abs().max() == 0
    with pytest.raises(KernelError, match=r"run-time index 300 .* of 'cache'"):
        in_bhsd(kernel[lnc])(q, k, cache, positions_BS=positions.int() + 1)


@both
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("unequal", [False, True])
def test_backward_is_the_gradient_of_forward(lnc, unequal, kernel):
    """Exactly: autograd multiplies and adds the same float32 pairs in the same order."""
    q, k = inputs(2, 3, 2, 512, 32)
    cache = angles(512, 32, unequal)
    dq, dk = inputs(2, 3, 2, 512, 32, seed=1)
    q_grad, k_grad = in_bhsd(kernel[lnc])(dq, dk, cache, backward=True)
    for x, dy, got in ((q, dq, q_grad), (k, dk, k_grad)):
        x = x.requires_grad_()
        reference(x, cache).backward(dy)
        assert (got - x.grad).abs().max() == 0


@both
@pytest.mark.parametrize("backward", [False, True])
def test_bfloat16_rounds_once(backward, kernel):
    q, k = inputs(1, 4, 2, 256, 64, torch.bfloat16)
    cache = angles(256, 64)
    sign = torch.cat((torch.ones(64), -torch.ones(64))) if backward else 1
    for got, x in zip(in_bhsd(kernel[2])(q, k, cache, backward), (q, k), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, reference(x, cache * sign).to(torch.bfloat16))


def test_backward_undoes_forward():
    q, k = inputs(1, 2, 1, 128, 64)
    cache = angles(128, 64)
    back, _ = rope_kernel(*rope_kernel(q, k, cache), cache, backward=True)
    # cos² + sin² of float32 cosines is 1 within 2 roundings, and each of the two rotations rounds
    # its two products and one sum: 8 roundings of values up to √2 · |q|.
    assert (back - q).abs().max() <= 8 * 2**-24 * 2**0.5 * q.abs().max()


def test_numpy_and_a_longer_cache():
    q, k = inputs(1, 2, 1, 128, 64)
    cache = angles(300, 64)
    q_out, k_out = rope_kernel(q.numpy(), k.numpy(), cache.numpy())
    assert isinstance(q_out, np.ndarray)
    assert (q_out == reference(q, cache).numpy()).all()
    assert (k_out == reference(k, cache).numpy()).all()


def test_a_wrong_sine_would_be_seen():
    """The input that the exact checks reject: one position's sines off by one bit."""
    q, k = inputs(1, 1, 1, 128, 64)
    cache = angles(128, 64)
    expected = reference(q, cache)
    cache[5, 64:] = torch.nextafter(cache[5, 64:], torch.tensor(2.0))
    assert (rope_kernel(q, k, cache)[0] - expected).abs().max() > 0


@both
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("gather", [False, True])
def test_every_byte_moves_once(lnc, gather, kernel):
    """q, k, the outputs and the positions; of the cache every row, or a row for each position."""
    B, Hq, Hk, S, D = 2, 8, 2, 2048, 64
    shapes = [(B, H, S, D) if kernel is rope_kernel else (B, S, H, D) for H in (Hq, Hk)]
    q, k = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
    cache, extra = angles(S, D), {}
    if gather:
        extra = {"positions_BS": torch.arange(S, dtype=torch.int32).repeat(B, 1)}
    with trace() as t:
        kernel[lnc](q, k, cache, **extra)
    read, write = t.hbm_read(), t.hbm_write()
    assert write == {"q_out": q.nbytes, "k_out": k.nbytes}
    assert read.pop("positions_BS", 0) == (B * S * 4 if gather else 0)
    assert read.pop("cache") == cache.nbytes * (B if gather else 1)
    assert sum(read.values()) == q.nbytes + k.nbytes


def gathering(B, Hq, Hk, D, positions, kernel=rope_kernel_bshd):
    """HBM bytes of the gathering kernel, relative to the least possible in bfloat16.

    That is q, k and the outputs once and, however many positions name it, each named row once.
    """
    S = positions.shape[1]
    q, k = (torch.empty(B, S, H, D, dtype=torch.bfloat16, device="meta") for H in (Hq, Hk))
    with trace(shapes_only=True) as t:
        kernel[2](q, k, torch.empty(S, 2 * D, device="meta"), positions_BS=positions.int())
    least = 2 * (q.nbytes + k.nbytes) + len(positions.unique()) * 2 * D * 4
    return t.hbm_bytes() / least


def test_what_a_row_for_each_position_costs():
    """A row that two positions name is fetched twice: above the least by at most a row a position.

    At Qwen3-4B's sizes a position moves 21,508 bytes: 20,480 of q, k and the outputs, 1,024 of its
    row, 4 of its index. So the ratio is below 21,508 / 20,480 = 1.0502 whatever the documents, and
    within 1.05 where the longest has 8 of 2,048 positions. A model with few heads pays more: 8 + 2
    heads of 64 move 2,560 bytes for a row of 512.
    """
    S = 2048
    each = torch.arange(S)[None]
    documents = torch.cat([torch.arange(n) for n in (700, 300, 1000, 48)])[None]
    for positions, B, rows in ((each, 1, S), (documents, 1, 1000), (each.repeat(2, 1), 2, S)):
        expected = 21_508 * B * S / (20_480 * B * S + 1024 * rows)
        found = gathering(B, 32, 8, 128, positions)
        assert found == pytest.approx(expected, rel=1e-12)
        assert found <= 1.05
    assert gathering(2, 8, 2, 64, each.repeat(2, 1)) == pytest.approx(3076 / (2560 + 256))  # 1.092


@both
def test_pieces_and_memory_at_full_size(kernel):
    """Qwen3-4B's heads at S = 40,960 in bfloat16, without data."""
    S, D = 40_960, 128
    shapes = [(1, H, S, D) if kernel is rope_kernel else (1, S, H, D) for H in (32, 8)]
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    with trace(shapes_only=True) as t:
        kernel[2](q, k, torch.empty(S, 2 * D, device="meta"))
    name = "q_BHSD" if kernel is rope_kernel else "q_BSHD"
    assert min(t.pieces(name)) >= 2048
    assert min(t.pieces("k_out")) >= 2048
    # Two tiles of everything, for overlap, fit as well.
    assert 2 * t.peak_sbuf <= SBUF_BYTES


@pytest.mark.parametrize("version", VERSIONS)
@both
def test_it_runs_under_every_version_and_passes_lint(version, kernel):
    assert lint(kernel, version) == []
    q, k = inputs(1, 2, 1, 256, 32)
    cache, positions = angles(256, 32), torch.arange(256, dtype=torch.int32)[None]
    run = in_bhsd(simulate(kernel[2], version=version, strict_python=True))
    assert (run(q, k, cache)[0] == reference(q, cache)).all()
    assert (run(q, k, cache, positions_BS=positions)[0] == reference(q, cache)).all()


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            ((1, 2, 200, 64), (1, 1, 200, 64), (200, 128), 2),
            "length 200 is not .*: use 256",
        ),
        (((1, 2, 300, 64), (1, 1, 300, 64), (300, 128), 1), "use 256 or 384"),
        (((1, 2, 128, 64), (1, 1, 256, 64), (256, 128), 1), "may differ in heads only"),
        (((1, 2, 128, 63), (1, 1, 128, 63), (128, 126), 1), "head dimension 63 is odd"),
        (((2, 128, 64), (1, 1, 128, 64), (128, 128), 1), r"must be \[B, H, S, D\]"),
        (((2, 2, 128, 64), (2, 1, 128, 64), (1, 128, 128), 1), r"\[S, 2D\] or \[2, S, 2D\]"),
        (((1, 2, 256, 64), (1, 1, 256, 64), (128, 128), 1), "at least 256 rows of 128"),
        (((1, 128, 2, 64), (1, 256, 1, 64), (256, 128), 1, "BSHD"), "may differ in heads only"),
        (((1, 200, 2, 64), (1, 200, 1, 64), (200, 128), 1, "BSHD"), "length 200 is not"),
        (((1, 2, 256, 64), (1, 1, 256, 64), (9, 128), 1, "BHSD", (256,)), r"must be \[1, 256\]"),
    ],
)
def test_wrong_shapes_are_refused_in_one_sentence(shapes, text):
    with pytest.raises(ValueError, match=text):
        check_rope(*shapes)


def test_right_shapes_pass_the_check():
    check_rope((1, 32, 2048, 128), (1, 8, 2048, 128), (4096, 256), 2)
    check_rope((2, 32, 256, 128), (2, 8, 256, 128), (2, 256, 256), 2)
    check_rope((2, 256, 32, 128), (2, 256, 8, 128), (100, 256), 2, "BSHD", (2, 256))


def test_the_kernel_itself_also_refuses_a_wrong_length():
    q, k = inputs(1, 1, 1, 192, 32)
    with pytest.raises(AssertionError, match="sequence length 192") as error:
        rope_kernel(q, k, angles(192, 32))
    assert not isinstance(error.value, KernelError)
