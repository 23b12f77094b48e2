"""The rotary operator: equal to two independent programs, differentiable, and hard to misuse.

Kernels run under the simulator; the kernel's own tests are in `nki_sim/test_rope_kernel.py`.
"""

import gc
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nki_sim
from nki_sim import trace
from qwen3_trainium import cpu, kernel_backend, neuron

cpu.prepare()  # before torchtitan, whose cache is used here

import nki  # noqa: E402, kernel_backend has put our simulator in its place
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

from qwen3_trainium import rope_parity  # noqa: E402
from qwen3_trainium.errors import SettingError  # noqa: E402
from qwen3_trainium.kernels import rope as kernels  # noqa: E402
from qwen3_trainium.ops import rope  # noqa: E402
from qwen3_trainium.rope_parity import Case  # noqa: E402

operators = sys.modules["qwen3_trainium.ops.rope"]  # `ops.rope` is the function


@pytest.fixture(autouse=True)
def _lnc(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv(kernel_backend.VARIABLE, kernel_backend.REFERENCE)


def inputs(B=2, S=256, Hq=4, Hk=2, D=32, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, S, H, D, generator=generator).to(dtype).requires_grad_() for H in (Hq, Hk)
    ]


def gradients(function, q, k, *rest):
    grads = inputs(*q.shape[:2], q.shape[2], k.shape[2], q.shape[3], q.dtype, seed=1)
    return torch.autograd.grad(function(q, k, *rest), (q, k), [g.detach() for g in grads])


# ------------------------------------------------------------------ values

# Beyond the lesson's table: the ends of each range, and numbers of heads that divide nothing.
MORE = (
    Case(3, 1, 1, 128, 64, 1, "each"),
    Case(1, 32, 1, 128, 128, 1, "shared"),
    Case(1, 2, 1, 2048, 64, 2),
    Case(2, 7, 5, 256, 128, 2, "each"),
    Case(1, 8, 8, 1536, 64, 1),
    Case(1, 32, 8, 1024, 128, 2),  # 2 positions a partition
    Case(1, 20, 3, 896, 128, 1, "shared"),  # 3, 3 and 1 positions a partition
    Case(1, 80, 3, 128, 128, 1),  # 64 heads a tile, then 16
    Case(2, 12, 3, 1024, 128, 1, heads_first=True),  # 8 heads, then 4
    Case(3, 2, 2, 256, 64, 2, "shared", heads_first=True),
    Case(1, 32, 8, 128, 64, 1, dtype=torch.bfloat16, rows="shared"),
    Case(2, 1, 1, 640, 128, 1, dtype=torch.bfloat16),
)


EXACT = {"forward": 0, "backward": 0, "forward_hf": 0, "backward_hf": 0}


@pytest.mark.parametrize("case", rope_parity.CASES + MORE, ids=str)
def test_equal_to_pytorch_and_transformers_to_the_last_bit(case):
    """0.0, because all round the same products and sums once each, in float32.

    bfloat16 as well: all three compute in float32 and round once, at the end.
    """
    assert rope_parity.differences(case) == EXACT


FAULTS = {
    "halves swapped": lambda q, k, c: (q.roll(c.shape[-1] // 4, -1), k),
    "angles of the next position": lambda q, k, c: rope(q, k, c.roll(1, 0)),
    "cosines and sines swapped": lambda q, k, c: rope(q, k, c.roll(c.shape[-1] // 2, -1)),
    "interleaved pairs": lambda q, k, c: rope(
        q.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), k, c
    ),
    "keys not rotated": lambda q, k, c: (rope(q, k, c)[0], k),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_rejects(fault, monkeypatch):
    def wrong(q, k, cos_sin, positions=None, implementation="own"):
        return FAULTS[fault](q, k, cos_sin)

    monkeypatch.setattr(operators, "rope", wrong)
    monkeypatch.setattr(sys.modules["qwen3_trainium.ops"], "rope", wrong)
    assert rope_parity.differences(Case(1, 4, 2, 256, 64, 2, "shared"))["forward"] > 0.1


def test_the_comparison_rejects_a_backward_that_turns_the_same_way(monkeypatch):
    run = kernel_backend.run

    def forward_only(kernel, q, k, cache, backward, *rest, **named):
        return run(kernel, q, k, cache, False, *rest, **named)

    monkeypatch.setattr(kernel_backend, "run", forward_only)
    found = rope_parity.differences(Case(1, 4, 2, 256, 64, 2))
    assert found["forward"] == found["forward_hf"] == 0
    assert found["backward"] > 0.1
    assert found["backward_hf"] > 0.1


@nki.jit
def no_op(q, k, cache, backward=False, positions_BS=None):
    """Zeros, whatever it is given, as old kernels on a newer NKI returned."""
    q_out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    k_out = nl.ndarray(k.shape, dtype=k.dtype, buffer=nl.shared_hbm)
    if nl.program_id(axis=0) == 0:
        for out in (q_out, k_out):
            zeros = nl.zeros((128, out.size // 128), dtype=out.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=out.reshape(zeros.shape), src=zeros)
    return q_out, k_out


def test_a_kernel_that_does_nothing_ends_the_device_check_with_an_error(monkeypatch, capsys):
    cases = [Case(1, 2, 1, 256, 64, 2)]
    assert rope_parity.main("cpu", cases) == ""
    monkeypatch.setattr(operators, "rope_kernel_bshd", no_op)
    fault = rope_parity.main("cpu", cases)
    assert fault.startswith(f"{cases[0]}: the difference is not 0.0 but {{'forward': inf, ")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["forward"] for row in rows] == [0, math.inf]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_result_that_is_not_finite_is_no_small_difference(value, monkeypatch):
    """Of a NaN beside a 0.0 `max` gives either, by their order."""
    run = kernel_backend.run

    def spoiled(*arguments, **named):
        q, k = run(*arguments, **named)
        k[0, 3, 0, 5] = value
        return q, k

    monkeypatch.setattr(kernel_backend, "run", spoiled)
    found = rope_parity.differences(Case(1, 2, 1, 256, 64, 2))
    assert set(found.values()) == {math.inf}


def test_the_device_check_fails_where_no_kernel_ran_on_the_device(monkeypatch):
    monkeypatch.setattr(rope_parity, "table", lambda device, cases: iter([]))
    monkeypatch.setattr(kernel_backend, "ran", lambda: {"rope_kernel": "reference"})
    assert rope_parity.main("neuron").splitlines() == [
        "no case is for LNC 2",
        "not all ran on neuron, but on reference",
    ]


def test_faults_of_the_other_process_come_back():
    rows, fault = rope_parity.in_a_process("meta")
    assert rows == []
    assert "no kernel runs on device 'meta'" in fault


def test_positions_follow_the_documents():
    """Two equal documents in one sequence get equal results; without positions they do not."""
    q, k = (x.detach()[:, :128].repeat(1, 2, 1, 1) for x in inputs())
    cache = rope_parity.angles(256, 32)
    positions = torch.arange(128).repeat(2, 2)
    for out in rope(q, k, cache, positions):
        assert torch.equal(out[:, :128], out[:, 128:])
    for out in rope(q, k, cache):
        assert not torch.equal(out[:, :128], out[:, 128:])


# ------------------------------------------------------------------ costs


def traced(kernel, B, Hq, Hk, S, D, lnc, dtype, heads_first, gather=False):
    shapes = [(B, H, S, D) if heads_first else (B, S, H, D) for H in (Hq, Hk)]
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    positions = torch.zeros(B, S, dtype=torch.int32) if gather else None
    with kernel_backend.as_if_lnc(lnc), trace(shapes_only=True) as t:
        kernel[lnc](q, k, torch.empty(S, 2 * D, device="meta"), False, positions)
    return t


# Of AWS's rope_hf (library of 2026-04-13) for the same shapes, counted with nki_sim.
ROPE_HF = {
    (1, 32, 8, 2048, 128, 2): 564,
    (1, 8, 2, 256, 32, 2): 144,
    (3, 1, 1, 2048, 64, 1): 96,
    (1, 1, 1, 128, 64, 1): 16,
    (2, 32, 1, 128, 128, 1): 466,
    (1, 64, 8, 4096, 128, 2): 2024,
    (1, 1, 1, 4096, 128, 1): 64,
}


@pytest.mark.parametrize("shape", ROPE_HF, ids=str)
@pytest.mark.parametrize("heads_first", [True, False])
def test_instructions_are_no_more_than_rope_hf_needs(shape, heads_first):
    kernel = kernels.rope_kernel if heads_first else kernels.rope_kernel_bshd
    t = traced(kernel, *shape, torch.bfloat16, heads_first)
    assert t.count() <= ROPE_HF[shape]


@pytest.mark.parametrize("gather", [False, True])
def test_pieces_in_torchtitans_layout(gather):
    """At Qwen3-4B's sizes a partition gets two positions with all their heads, side by side.

    That is 2 · 32 · 128 elements of q, 2 · 8 · 128 of k and two rows of the cache. A gathered row
    is a piece of its own, 2 · 128 float32.
    """
    t = traced(kernels.rope_kernel_bshd, 1, 32, 8, 2048, 128, 2, torch.bfloat16, False, gather)
    assert [list(t.pieces(name)) for name in ("q_BSHD", "q_out")] == [[16_384], [16_384]]
    assert [list(t.pieces(name)) for name in ("k_BSHD", "k_out")] == [[4096], [4096]]
    assert list(t.pieces("cache")) == [1024 if gather else 2048]


def test_more_heads_than_a_tile_takes_are_cut():
    """128 heads of 128 are 16,384 elements: two tiles of 64 heads for each row of positions."""
    t = traced(kernels.rope_kernel_bshd, 1, 128, 8, 128, 128, 1, torch.bfloat16, False)
    assert list(t.pieces("q_BSHD")) == [64 * 128 * 2]
    assert t.count() == 2 + 3 * 6  # the cache; two tiles of q and one of k


# ------------------------------------------------------------------ the operator


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_opcheck(heads_first, strided, backward, gather):
    q, k = inputs()
    if heads_first != strided:  # [B, H, S, D] in memory
        q, k = (x.detach().transpose(1, 2).contiguous() for x in (q, k))
    if strided:
        q, k = (x.detach().transpose(1, 2) for x in (q, k))
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    cache = rope_parity.angles(256, 32)
    rest = (rope_parity.documents(2, 256, 1),) if gather else ()
    name = "rope" + "_at" * gather + "_backward" * backward
    operator = getattr(torch.ops.qwen3_trainium, name).default
    found = torch.library.opcheck(operator, (q, k, cache, *rest, heads_first))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("reference")
def test_gradcheck_in_float64():
    """Through the reference, which alone has float64; the kernel's own gradients are compared
    with autograd's, exactly, above."""
    q, k = (x.detach().double().requires_grad_() for x in inputs(1, 256, 2, 1, 2))
    cache = torch.randn(256, 4, dtype=torch.float64)
    positions = rope_parity.documents(1, 256, 3)
    for at in (None, positions):
        function = lambda q, k: rope(q, k, cache, at)  # noqa: E731, B023
        assert torch.autograd.gradcheck(function, (q, k), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (q, k), fast_mode=True)


@pytest.mark.parametrize("at", [False, True])
def test_reference_equals_the_kernel(at, monkeypatch):
    q, k = inputs()
    cache = rope_parity.angles(300, 32)
    positions = rope_parity.documents(2, 256, 5) if at else None
    ours = [*rope(q, k, cache, positions), *gradients(rope, q, k, cache, positions)]
    monkeypatch.setenv(kernel_backend.VARIABLE, kernel_backend.REFERENCE)
    theirs = [*rope(q, k, cache, positions), *gradients(rope, q, k, cache, positions)]
    assert all(map(torch.equal, ours, theirs))


def test_it_changes_no_argument_and_returns_new_tensors():
    q, k = (x.detach() for x in inputs())
    cache = torch.cat([torch.ones(256, 32), torch.zeros(256, 32)], -1)  # an angle of zero
    before = [x.clone() for x in (q, k, cache)]
    out = rope(q, k, cache)
    assert all(map(torch.equal, (q, k, cache), before))
    assert [x._version for x in (q, k, cache)] == [0, 0, 0]
    for x, y in zip((q, k), out, strict=True):
        assert torch.equal(x, y)
        assert x.data_ptr() != y.data_ptr()


def test_only_cache_and_positions_are_kept_and_the_cache_has_no_gradient():
    q, k = inputs()
    cache = rope_parity.angles(256, 32).requires_grad_()
    positions = rope_parity.documents(2, 256, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = rope(q, k, cache, positions)
    pointers = {x.data_ptr() for x in kept}
    assert pointers == {cache.data_ptr(), positions.data_ptr()}
    (out[0].sum() + out[1].sum()).backward()
    assert cache.grad is None


def test_queries_and_keys_can_be_freed_before_backward():
    """Whatever way they might be kept: a list on the context would show in no saved tensor."""
    q, k = inputs()
    q, k = q * 2, k * 2
    references = [weakref.ref(x) for x in (q, k)]
    out = rope(q, k, rope_parity.angles(256, 32), rope_parity.documents(2, 256, 1))
    del q, k
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert out[0].grad_fn is not None


def test_a_result_that_is_not_used_has_a_gradient_of_zeros():
    q, k = inputs()
    cache = rope_parity.angles(256, 32)
    (dq,) = torch.autograd.grad(rope(q, k, cache)[0].sum(), q)
    both = torch.autograd.grad(sum(x.sum() for x in rope(q, k, cache)), (q, k))
    assert torch.equal(dq, both[0])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # [B, H, S, D] in memory
        lambda x: torch.stack([x, x], -1)[..., 0],  # every other element
        lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],  # part of a fused projection
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
)
def test_strides_do_not_matter(view):
    q, k = (view(x.detach()).requires_grad_() for x in inputs())
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k)]
    cache = rope_parity.angles(256, 32)
    assert all(map(torch.equal, rope(q, k, cache), rope(*plain, cache)))
    grads = [view(x.detach()) for x in inputs(seed=1)]
    ours = torch.autograd.grad(rope(q, k, cache), (q, k), grads)
    theirs = torch.autograd.grad(rope(*plain, cache), plain, [g.contiguous() for g in grads])
    assert all(map(torch.equal, ours, theirs))


def test_the_kernel_gets_contiguous_tensors(monkeypatch):
    """A device reads memory row by row; the simulator would follow any strides."""
    run, given = kernel_backend.run, []

    def spy(kernel, *arguments, **named):
        given.extend(x for x in arguments if isinstance(x, torch.Tensor))
        return run(kernel, *arguments, **named)

    monkeypatch.setattr(kernel_backend, "run", spy)
    q, k = (torch.stack([x, x], -1)[..., 0] for x in inputs())
    cache = rope_parity.angles(512, 32)[::2]
    positions = rope_parity.documents(1, 256, 1).expand(2, -1)
    sum(x.square().sum() for x in rope(q, k, cache, positions)).backward()
    assert len(given) == 8
    assert all(x.is_contiguous() for x in given)
    assert [x.dtype for x in given[3::4]] == [torch.int32, torch.int32]


def test_the_kernel_is_chosen_by_how_tensors_lie_in_memory():
    cache = rope_parity.angles(256, 32)
    q, k = (x.detach() for x in inputs())
    for x, y, kernel in (
        (q, k, "rope_kernel_bshd"),
        (*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)), "rope_kernel"),
    ):
        kernel_backend._ran.clear()
        rope(x, y, cache)
        assert list(kernel_backend.ran()) == [kernel]


no_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=no_compiler)])
def test_compiles_as_one_graph(backend):
    q, k = inputs()
    cache = rope_parity.angles(256, 32)
    positions = rope_parity.documents(2, 256, 1)

    def block(q, k, cache, positions):
        a, b = rope(q * 2, k.transpose(1, 2).contiguous().transpose(1, 2), cache, positions)
        return a + 1, b

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert all(map(torch.equal, compiled(q, k, cache, positions), block(q, k, cache, positions)))
    ours = gradients(compiled, q, k, cache, positions)
    assert all(map(torch.equal, ours, gradients(block, q, k, cache, positions)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_changes_nothing(use_reentrant):
    q, k = inputs()
    cache = rope_parity.angles(256, 32)

    def recomputed(*arguments):
        return checkpoint(rope, *arguments, use_reentrant=use_reentrant)

    assert use_reentrant or all(
        map(torch.equal, gradients(recomputed, q, k, cache), gradients(rope, q, k, cache))
    )
    sum(x.square().sum() for x in recomputed(q, k, cache)).backward()
    wanted = torch.autograd.grad(sum(x.square().sum() for x in rope(q, k, cache)), (q, k))
    assert torch.equal(q.grad, wanted[0])
    assert torch.equal(k.grad, wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_dtype(dtype):
    q, k = inputs(dtype=dtype)
    cache = rope_parity.angles(256, 32)
    wanted = gradients(rope, q, k, cache)
    with torch.autocast("cpu", torch.bfloat16):
        out = rope(q, k, cache)
        found = gradients(rope, q, k, cache)
    assert {x.dtype for x in (*out, *found)} == {dtype}
    assert all(map(torch.equal, found, wanted))


def test_an_in_place_change_after_it_does_not_spoil_the_gradient():
    q, k = inputs()
    cache = rope_parity.angles(256, 32)
    wanted = torch.autograd.grad(sum(x.sum() for x in rope(q, k, cache)), (q, k))
    a, b = rope(q.clone(), k.clone(), cache)
    a.mul_(1.0)
    assert all(map(torch.equal, torch.autograd.grad(a.sum() + b.sum(), (q, k)), wanted))
    a, b = rope(q.clone(), k.clone(), cache)
    cache.mul_(2.0)  # kept for backward: autograd must notice
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (a.sum() + b.sum()).backward()


# ------------------------------------------------------------------ errors

F32 = torch.float32


@pytest.mark.parametrize(
    ("lnc", "q", "k", "cache", "positions", "text"),
    [
        (1, (1, 200, 4, 64), (1, 200, 2, 64), (200, 128), None, "length 200 .*: use 128 or 256"),
        (2, (1, 128, 4, 64), (1, 128, 2, 64), (128, 128), None, "use 256, or 128 with LNC 1"),
        (1, (1, 0, 4, 64), (1, 0, 2, 64), (128, 128), None, "length 0 .*: use 128"),
        (2, (1, 256, 4, 63), (1, 256, 2, 63), (256, 126), None, "63 is odd"),
        (2, (1, 256, 4, 64), (1, 256, 2, 64), (255, 128), None, "at least 256 rows of 128"),
        (2, (1, 256, 4, 64), (1, 256, 2, 64), (256, 64), None, "at least 256 rows of 128"),
        (2, (2, 256, 4, 64), (2, 256, 2, 64), (3, 256, 128), None, r"or \[2, S, 2D\], got"),
        (2, (1, 4, 256, 64), (1, 2, 256, 64), (256, 128), None, "check the layout"),
        (2, (1, 256, 64), (1, 256, 64), (256, 128), None, r"must be \[B, S, H, D\]"),
        (2, (1, 256, 4, 64), (1, 256, 2, 64), (256, 128), (1, 255), r"must be \[1, 256\]"),
        (2, (1, 256, 4, 64), (1, 256, 2, 64), (1, 256, 128), (1, 256), r"must be \[M, 128\]"),
    ],
)
def test_wrong_shapes_are_one_sentence(lnc, q, k, cache, positions, text, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc))
    positions = None if positions is None else torch.zeros(positions, dtype=torch.int64)
    with pytest.raises(ValueError, match=text) as error:
        rope(torch.zeros(q), torch.zeros(k), torch.zeros(cache), positions)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ((F32, torch.bfloat16, F32), "q is float32 and k is bfloat16"),
        ((torch.float16, torch.float16, F32), "q and k are float16: use float32 or bfloat16"),
        ((torch.float64, torch.float64, torch.float64), "q and k are float64"),
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), "cache is bfloat16: keep it in float32"),
    ],
)
def test_wrong_dtypes_are_one_sentence(dtypes, text):
    shapes = (1, 256, 4, 64), (1, 256, 2, 64), (256, 128)
    tensors = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=text) as error:
        rope(*tensors)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (torch.arange(256)[None] + 1, "run from 1 to 256, but the cache has rows 0 to 255"),
        (torch.arange(256)[None] - 1, "run from -1 to 254"),
        (torch.arange(256.0)[None], "positions are float32: use int32 or int64"),
    ],
)
def test_wrong_positions_are_one_sentence(positions, text):
    q, k = inputs(1)
    with pytest.raises(ValueError, match=text):
        rope(q, k, rope_parity.angles(256, 32), positions)


def test_compiled_code_does_not_read_beyond_the_cache_either():
    """Values are not at hand while tracing; the kernel's own bounds check remains."""
    q, k = inputs(1)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="run-time index 256"):
        compiled(q, k, rope_parity.angles(256, 32), torch.arange(256)[None] + 1)


def test_a_layout_that_shapes_cannot_tell_shows_in_the_numbers():
    """As many heads as positions: [B, H, S, D] passes every check of shapes, and is wrong."""
    q, k = inputs(1, 256, 256, 256, 4)
    cache = rope_parity.angles(256, 4)
    swapped = rope(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), cache)
    right = rope(q, k, cache)
    assert (swapped[0].transpose(1, 2) - right[0]).abs().max() > 0.1


# ------------------------------------------------------------------ where it runs


def test_where_it_ran_is_told_once(caplog):
    q, k = inputs(1)
    cache = rope_parity.angles(256, 32)
    kernel_backend._ran.clear()
    caplog.set_level("INFO")
    for _ in range(2):
        rope(q, k, cache)
    lines = [r.getMessage() for r in caplog.records if "[Kernel]" in r.getMessage()]
    assert lines == [f"[Kernel] rope_kernel_bshd on {kernel_backend.backend(q)}, LNC 2"]
    assert kernel_backend.ran_in("\n".join(lines)) == kernel_backend.ran()


@pytest.mark.usefixtures("reference")
def test_the_reference_says_so():
    kernel_backend._ran.clear()
    rope(*inputs(1), rope_parity.angles(256, 32))
    assert kernel_backend.ran() == {"rope_kernel_bshd": "reference"}


def test_an_unknown_setting_or_device_is_refused(monkeypatch):
    with pytest.raises(SettingError, match="no kernel runs on device 'meta'"):
        kernel_backend.backend(torch.empty(1, device="meta"))
    monkeypatch.setenv(kernel_backend.VARIABLE, "fast")
    with pytest.raises(SettingError, match="is 'fast': unset it, or set it to 'reference'"):
        kernel_backend.backend(torch.empty(1))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(SettingError, match="is '4': set it to 1 or 2"):
        kernel_backend.lnc()


def test_cores_of_a_process_that_nobody_launched_are_the_drivers(monkeypatch, tmp_path):
    """And torch.compile does not try to trace the question."""

    def read():
        subprocess.run(["true"], check=True)
        return neuron.Machine(chips=16, cores_per_chip=8, lnc=1, core_bytes=1)

    q, k = inputs(1, 128)
    cache = rope_parity.angles(128, 32)
    monkeypatch.delenv(neuron.LNC_VARIABLE)
    assert kernel_backend.lnc() == 2  # no chip here
    with pytest.raises(ValueError, match="length 128"):
        rope(q, k, cache)
    monkeypatch.setattr(kernel_backend, "FIRST_CHIP", tmp_path)
    monkeypatch.setattr(kernel_backend, "_machine", read)
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(q, k, cache), rope(q, k, cache)))
    assert kernel_backend.lnc() == 1


def test_on_a_neuron_machine_the_operator_is_torchneurons(monkeypatch):
    """With a stand-in for TorchNeuron: how it is asked, not that it works."""
    asked = []

    def nki_op(name, mutates_args):
        asked.append((name, mutates_args))
        return lambda function: ("registered", function)

    stand_in = types.ModuleType("torch_neuronx")
    monkeypatch.setitem(sys.modules, "torch_neuronx", stand_in)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "neuron")
    monkeypatch.setattr(nki_sim, "real_nki", lambda: True)
    with pytest.raises(SettingError, match="torch_neuronx has no nki_op"):
        kernel_backend.operator("tests::op", fake=None)(print)
    stand_in.nki_op = nki_op
    assert kernel_backend.operator("tests::op", fake=None)(print) == ("registered", print)
    assert asked == [("tests::op", {})]


def test_the_simulator_does_not_stand_in_for_a_device():
    on_neuron = types.SimpleNamespace(device=types.SimpleNamespace(type="neuron"))
    with pytest.raises(SettingError, match="only the simulator: install AWS"):
        kernel_backend.run(kernels.rope_kernel, on_neuron, reference=None)


def test_our_simulator_takes_the_place_of_aws_only_before_kernels_are_imported(monkeypatch):
    installed = []
    monkeypatch.setattr(nki_sim, "install", lambda instead: installed.append(instead))
    kernel_backend.use_nki_sim()
    assert installed == []  # it is in place already
    monkeypatch.setattr(nki_sim, "real_nki", lambda: True)
    with pytest.raises(SettingError, match="is imported already: call use_nki_sim before it"):
        kernel_backend.use_nki_sim()
    for name in [name for name in sys.modules if name.startswith("qwen3_trainium.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    kernel_backend.use_nki_sim()
    assert installed == [True]


def test_another_implementation_is_chosen_by_name():
    q, k = inputs(1)
    with pytest.raises(SettingError, match="'fast' is unknown: use 'own' or 'rope_hf'"):
        rope(q, k, rope_parity.angles(256, 32), implementation="fast")


installed = importlib.util.find_spec("nkilib") is not None


@pytest.mark.skipif(installed, reason="AWS's NKI library is installed")
def test_an_implementation_that_is_not_installed_is_refused():
    with pytest.raises(SettingError, match="needs AWS's NKI library"):
        rope(*inputs(1), rope_parity.angles(256, 32), implementation="rope_hf")


@pytest.mark.skipif(not installed, reason="AWS's NKI library (nkilib) is not installed")
@pytest.mark.parametrize("case", [c for c in rope_parity.CASES if c.dtype == F32], ids=str)
def test_rope_hf_equals_ours(case):
    found = rope_parity.differences(case, implementation="rope_hf")
    assert found == EXACT
