"""The expert kernels and their operator against a loop over experts, within derived bounds."""

import os
import re
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from nki_sim import KernelError, arch, lint, trace
from qwen3_trainium import experts_bounds, experts_traces, kernel_backend
from qwen3_trainium.kernels import grouped_experts as kernels
from qwen3_trainium.ops import grouped_experts
from qwen3_trainium.ops.grouped_experts import (
    _experts,
    _experts_backward,
    block_tables,
)

REAL = {"R": 8192, "D": 2048, "F": 768, "E": 64}  # Qwen3-30B-A3B's widths, 2,048 tokens, top-4


def inputs(counts, D, F, dtype=torch.float32, seed=0):
    """(x, counts, weights, dy) with outputs of size about 1."""
    counts = torch.tensor(counts)
    R, E = int(counts.sum()), len(counts)
    g = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(R, D, generator=g), torch.randn(R, D, generator=g)
    shapes = ((E, F, D), (E, D, F), (E, F, D))
    weights = [torch.randn(*s, generator=g) / s[-1] ** 0.5 for s in shapes]
    return x.to(dtype), counts, [w.to(dtype) for w in weights], dy.to(dtype)


def worst_ratio(function, x, counts, weights, dy):
    """Largest |difference| from the loop in units of its bound, over y and all gradients."""
    ours = experts_bounds.results(function, x, counts, weights, dy)
    wide = [w.float() for w in weights]
    theirs = experts_bounds.results(experts_bounds.loop, x.float(), counts, wide, dy.float())
    allowed = experts_bounds.bounds(x, counts, weights, dy, x.dtype)
    found = experts_bounds.compare(ours, theirs, allowed)
    return max(entry["largest ratio"] for entry in found.values())


@pytest.fixture(params=["1", "2"])
def cores(request, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    if "NEURON_LOGICAL_NC_CONFIG" not in os.environ:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


# ------------------------------------------------------------------ values
F32, B16 = torch.float32, torch.bfloat16
CASES = {
    # name: (rows of each expert, D, F, dtype); D ≠ F, so that no transposed matrix fits
    "uniform": ([32] * 8, 48, 32, F32),
    "uniform bfloat16": ([32] * 8, 48, 32, B16),
    "one takes all": ([0, 0, 300, 0], 48, 32, F32),
    "most empty": ([0, 0, 5, 0, 0, 0, 0, 131, 0, 0], 48, 32, F32),
    "first and last empty": ([0, 128, 1, 256, 0], 48, 32, F32),
    "one row": ([0, 1, 0], 48, 32, F32),
    "fewer rows than experts": ([0, 1, 0, 1, 1, 0, 0, 0], 48, 32, F32),
    "no row": ([0, 0, 0], 48, 32, F32),
    "64 experts": ([(7 * e) % 13 for e in range(64)], 32, 16, F32),
    "128 experts": ([(5 * e) % 9 for e in range(128)], 32, 16, F32),
    "two tiles and a rest": ([3, 0, 200, 17], 272, 144, F32),
    "beyond a moving tile": ([140, 0, 30], 656, 528, B16),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, cores):
    """Forward and all four gradients, on one core and on two."""
    counts, D, F, dtype = CASES[case]
    x, counts, weights, dy = inputs(counts, D, F, dtype)
    assert worst_ratio(grouped_experts, x, counts, weights, dy) <= 1
    assert "reference" not in kernel_backend.ran()["grouped_experts_kernel"]


def test_experts_without_rows_get_zero_gradients():
    """Zero, not something small: other gradients of that size would move weights."""
    x, counts, weights, dy = inputs([0, 40, 0, 130, 0], 48, 32)
    found = experts_bounds.results(grouped_experts, x, counts, weights, dy)
    for name in ("dw1", "dw2", "dw3"):
        assert all((found[name][e] == 0).all() for e in (0, 2, 4))
        assert all((found[name][e] != 0).any() for e in (1, 3))


def swapped(x, counts, w1, w2, w3):
    return grouped_experts(x, counts, w3, w2, w1)


def transposed(x, counts, w1, w2, w3):
    return grouped_experts(x, counts, *(w.transpose(1, 2) for w in (w1, w2, w3)))


def shifted(x, counts, w1, w2, w3):
    return grouped_experts(x, torch.roll(counts, 1), w1, w2, w3)


def narrow(x, counts, w1, w2, w3):
    half = [t.bfloat16() for t in (x, w1, w2, w3)]
    return grouped_experts(half[0], counts, *half[1:]).float()


def without_silu(x, counts, w1, w2, w3):
    rows = zip(x.split(counts.tolist()), w1, w2, w3, strict=True)
    return torch.cat([((r @ a.T) * (r @ c.T)) @ b.T for r, a, b, c in rows])


@pytest.mark.parametrize("mutant", [swapped, transposed, shifted, narrow, without_silu])
def test_the_bound_rejects(mutant):
    """D = F here, since only then could transposed weights pass unseen."""
    x, counts, weights, dy = inputs([10, 0, 130, 20], 32, 32)
    assert worst_ratio(grouped_experts, x, counts, weights, dy) <= 1
    assert worst_ratio(mutant, x, counts, weights, dy) > 10


def run_kernels(counts, change=lambda blocks, rows: None, D=48, F=32):
    """Worst ratio of the kernels themselves, with tables that `change` may spoil."""
    x, counts, weights, dy = inputs(counts, D, F)

    def function(x, counts, *weights):
        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *weights):
                rows, blocks, empty = block_tables(counts, x.shape[0], 1, True)
                change(blocks, rows)
                arrays = [t.detach() for t in (x, *weights)]
                y, gate, up = kernels.grouped_experts_kernel(arrays[0], rows, blocks, *arrays[1:])
                ctx.all = arrays, gate, up, rows, blocks, empty
                return y

            @staticmethod
            def backward(ctx, dy):
                (x, *weights), gate, up, rows, blocks, empty = ctx.all
                return kernels.grouped_experts_backward_kernel(
                    dy.contiguous(), x, gate, up, rows, blocks, empty, *weights
                )

        return Both.apply(x, *weights)

    return worst_ratio(function, x, counts, weights, dy)


def keep_across_experts(blocks, rows):
    blocks[kernels.FETCH, 1:] = 3  # one past the last of three experts: never load again


def sum_across_experts(blocks, rows):
    blocks[kernels.KEEP, 1:] = 1


def forget_within_an_expert(blocks, rows):
    blocks[kernels.KEEP] = 0


def rows_off_by_one(blocks, rows):
    rows[:, 0] = torch.roll(rows[:, 0], 1)


@pytest.mark.parametrize(
    "spoil", [keep_across_experts, sum_across_experts, forget_within_an_expert]
)
def test_spoilt_tables_are_seen(spoil):
    """What the tables say matters: a kernel that ignored one of them would pass none of these."""
    counts = [130, 20, 40]
    assert run_kernels(counts) <= 1
    assert run_kernels(counts, spoil) > 10


def test_slots_of_a_block_may_come_in_any_order():
    assert run_kernels([130, 20, 40], rows_off_by_one) <= 1


def test_weights_transposed_by_dma_or_by_the_tensor_engine_are_the_same():
    x, counts, weights, _ = inputs([3, 200, 0, 40], 272, 144, torch.bfloat16)
    one = grouped_experts(x, counts, *weights)
    other = grouped_experts(x, counts, *weights, transpose_by_dma=True)
    assert torch.equal(one, other)


def test_weights_that_do_not_stay_are_loaded_again(monkeypatch):
    """Where SBUF is too small for a whole expert, each block loads its own."""
    module = kernels.grouped_experts_kernel.fn.__globals__
    x, counts, weights, dy = inputs([3, 0, 300, 40], 144, 80)
    assert kernels.resident(144, 80, 4)
    monkeypatch.setitem(module, "RESIDENT_BYTES", 1024)
    assert not kernels.resident(144, 80, 4)
    assert worst_ratio(grouped_experts, x, counts, weights, dy) <= 1


def test_a_second_call_owes_nothing_to_the_first():
    first, second = inputs([3, 130], 48, 32), inputs([60, 2], 48, 32, seed=1)
    alone = grouped_experts(second[0], second[1], *second[2])
    grouped_experts(first[0] * 1e6, first[1], *first[2])
    assert torch.equal(grouped_experts(second[0], second[1], *second[2]), alone)


# ------------------------------------------------------------------ blocks
def test_blocks_suffice_and_no_fewer_would():
    g = torch.Generator().manual_seed(0)
    for E in (1, 2, 7, 64):
        for R in (1, 2, 63, 127, 128, 129, 1000, 1024):
            N = kernels.block_count(R, E)
            for _ in range(20):
                where = torch.randint(0, int(torch.randint(1, E + 1, (), generator=g)), (R,))
                counts = torch.bincount(where, minlength=E)
                assert int(((counts + 127) // 128).sum()) <= N
            worst = torch.tensor([1] * (min(E, R) - 1) + [R - min(E, R) + 1])
            assert int(((worst + 127) // 128).sum()) == N


@pytest.mark.parametrize("cores", [1, 2])
def test_every_row_has_one_slot_and_every_expert_is_fetched_and_stored(cores):
    counts = torch.tensor([0, 128, 1, 300, 0, 0, 5, 129])
    R, E = int(counts.sum()), len(counts)
    rows, blocks, empty = block_tables(counts, R, cores, True)
    N = kernels.block_count(R, E)
    assert (rows.shape, blocks.shape, empty.shape) == ((128, N), (3, N), (1, E))
    placed = rows[rows < R]
    assert sorted(placed.tolist()) == list(range(R))
    assert (rows <= R).all()
    owner = torch.repeat_interleave(torch.arange(E), counts)
    holds = None
    for n in range(N):
        if n % -(-N // cores) == 0:
            holds = None  # another core, with nothing loaded yet
        fetch, keep, store = blocks[:, n].tolist()
        holds = fetch if fetch < E else holds
        here = rows[:, n][rows[:, n] < R]
        if len(here):
            assert set(owner[here.long()].tolist()) == {holds}
            previous = rows[:, n - 1][rows[:, n - 1] < R] if n else here[:0]
            same = len(previous) > 0 and int(owner[previous[0].long()]) == holds
            assert keep == same
            following = rows[:, n + 1][rows[:, n + 1] < R] if n + 1 < N else here[:0]
            last = not len(following) or int(owner[following[0].long()]) != holds
            assert store == (holds if last else E)
        else:
            assert store == E
    assert [e for e in empty[0].tolist() if e < E] == [0, 4, 5]


def instructions(counts, D=48, F=32):
    """Every instruction with its operands' shapes, of forward and backward."""
    x, counts, weights, dy = inputs(counts, D, F)
    with trace() as recorded:
        experts_bounds.results(grouped_experts, x, counts, weights, dy)
    return [(r.instruction, tuple(r.shapes.items())) for r in recorded.records]


def test_the_program_does_not_depend_on_the_routing():
    program = instructions([70, 70, 60])
    assert program == instructions([200, 0, 0]) == instructions([1, 0, 199])
    assert program != instructions([70, 70, 260])  # a block more


# ------------------------------------------------------------------ operator
def test_opcheck():
    x, counts, weights, dy = inputs([3, 0, 130, 5], 48, 32)
    opcheck(_experts, (x.requires_grad_(), counts, *(w.requires_grad_() for w in weights)))
    _, gate, up = _experts(x.detach(), counts, *(w.detach() for w in weights))
    plain = [w.detach() for w in weights]
    opcheck(_experts_backward, (dy, x.detach(), gate, up, counts, *plain))


def test_opcheck_with_other_strides():
    x, counts, weights, dy = inputs([3, 0, 130, 5], 48, 32)
    x = x.T.contiguous().T.requires_grad_()
    weights = [w.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in weights]
    opcheck(_experts, (x, counts, *weights))
    assert worst_ratio(grouped_experts, x, counts, weights, dy.T.contiguous().T) <= 1


def test_derivative_in_float64(monkeypatch):
    """The reference's written-out derivative, by finite differences."""
    monkeypatch.setenv(kernel_backend.VARIABLE, kernel_backend.REFERENCE)
    x, counts, weights, _ = inputs([3, 0, 2], 16, 16, torch.float64)
    leaves = [t.requires_grad_() for t in (x, *weights)]
    assert torch.autograd.gradcheck(lambda x, *w: grouped_experts(x, counts, *w), leaves)


def test_reference_and_simulator_agree(monkeypatch):
    x, counts, weights, dy = inputs([3, 0, 130, 5], 48, 32)
    simulated = experts_bounds.results(grouped_experts, x, counts, weights, dy)
    monkeypatch.setenv(kernel_backend.VARIABLE, kernel_backend.REFERENCE)
    assert worst_ratio(grouped_experts, x, counts, weights, dy) <= 1
    reference = experts_bounds.results(grouped_experts, x, counts, weights, dy)
    allowed = experts_bounds.bounds(x, counts, weights, dy, x.dtype)
    found = experts_bounds.compare(simulated, reference, allowed)
    assert max(entry["largest ratio"] for entry in found.values()) <= 1


def test_compiled_once_for_every_routing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grouped_experts, fullgraph=True, backend=counter)
    for routing in ([3, 0, 130, 5], [138, 0, 0, 0], [30, 40, 50, 18]):
        x, counts, weights, dy = inputs(routing, 48, 32)
        assert worst_ratio(compiled, x, counts, weights, dy) <= 1
    assert counter.frame_count == 1
    x, counts, weights, dy = inputs([3, 0, 130, 6], 48, 32)  # another number of rows is seen
    worst_ratio(compiled, x, counts, weights, dy)
    assert counter.frame_count > 1


def test_activation_checkpointing_changes_nothing():
    x, counts, weights, dy = inputs([3, 0, 130, 5], 48, 32)

    def again(x, counts, *weights):
        return checkpoint(grouped_experts, x, counts, *weights, use_reentrant=False)

    plain = experts_bounds.results(grouped_experts, x, counts, weights, dy)
    recomputed = experts_bounds.results(again, x, counts, weights, dy)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_inputs_stay_as_they_are():
    x, counts, weights, _ = inputs([3, 0, 130, 5], 48, 32)
    tensors = [x, counts, *weights]
    before = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    y = grouped_experts(x, counts, *weights)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert versions == [t._version for t in tensors]
    assert y.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in tensors]


def test_autocast_leaves_dtypes_to_the_caller():
    x, counts, weights, _ = inputs([3, 0, 130, 5], 48, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_experts(x, counts, *weights).dtype == torch.float32


ERRORS = {
    "dim 40 is not a multiple of 16": lambda x, c, w1, w2, w3: (
        (x[:, :40], c, w1[..., :40], w2[:, :40], w3[..., :40])
    ),
    "expert width 24 is not a multiple of 16": lambda x, c, w1, w2, w3: (
        (x, c, w1[:, :24], w2[..., :24], w3[:, :24])
    ),
    "must have one dtype, got bfloat16, float32": lambda x, c, w1, w2, w3: (
        (x.bfloat16(), c, w1, w2, w3)
    ),
    "dtype float16 is not supported": lambda x, c, *w: (x.half(), c, *(t.half() for t in w)),
    "dtype float64 is not supported": lambda x, c, *w: (x.double(), c, *(t.double() for t in w)),
    "sums to 138, but x has 100 rows": lambda x, c, *w: (x[:100], c, *w),
    "must be [4], one count an expert, got [3]": lambda x, c, *w: (x, c[:3], *w),
    "must be integers, got torch.float32": lambda x, c, *w: (x, c.float(), *w),
    "w3 must be [4, 32, 48]": lambda x, c, w1, w2, w3: (x, c, w1, w2, w3.transpose(1, 2)),
    "has rows of 32": lambda x, c, *w: (x[:, :32], c, *w),
    "x must be [R, D]": lambda x, c, *w: (x[None], c, *w),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_are_one_sentence(message):
    x, counts, weights, _ = inputs([3, 0, 130, 5], 48, 32)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        grouped_experts(*ERRORS[message](x, counts, *weights))
    assert "\n" not in str(error.value)
    grouped_experts(x, counts, *weights)


def test_transpose_by_dma_needs_two_bytes():
    x, counts, weights, _ = inputs([3, 5], 48, 32)
    with pytest.raises(ValueError, match=r"2-byte elements, got torch\.float32"):
        grouped_experts(x, counts, *weights, transpose_by_dma=True)


# ------------------------------------------------------------------ at the real widths
@pytest.fixture(scope="module", params=[1, 2], ids=["LNC 1", "LNC 2"])
def real_widths(request):
    """(counts, forward's trace, backward's) at the published widths in bfloat16; shapes only."""
    R, D, F, E = REAL.values()
    counts = experts_traces.routed(R, E)
    forward = experts_traces.forward(counts, D, F, cores=request.param)
    return counts, forward, experts_traces.backward(counts, D, F, cores=request.param)


def test_fits_on_chip(real_widths):
    for recorded in real_widths[1:]:
        assert recorded.peak_sbuf <= arch.SBUF_BYTES
        assert recorded.peak_psum <= arch.PSUM_BANKS * arch.PSUM_BANK_BYTES


FITTING = [(2048, 768, F32), (2048, 768, B16), (1024, 2048, B16), (4096, 384, B16), (48, 32, F32)]


@pytest.mark.parametrize(("D", "F", "dtype"), FITTING)
def test_what_is_accepted_fits(D, F, dtype):
    """The bytes that decide are no less than what the simulator finds live, and not far above."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    counts = experts_traces.routed(256, 4)
    forward = experts_traces.forward(
        counts, D, F, keep_weights=kernels.resident(D, F, itemsize), dtype=dtype
    )
    backward = experts_traces.backward(
        counts, D, F, keep_weights=kernels.resident(D, F, itemsize // 2), dtype=dtype
    )
    peak = max(forward.peak_sbuf, backward.peak_sbuf)
    assert peak <= kernels.sbuf_bytes(D, F, itemsize) <= arch.SBUF_BYTES
    assert kernels.SBUF_BYTES == arch.SBUF_BYTES


@pytest.mark.parametrize(("D", "F", "dtype"), [(4096, 1536, B16), (1024, 2048, F32)])
def test_an_expert_that_does_not_fit_is_refused(D, F, dtype):
    name = str(dtype).removeprefix("torch.")
    shapes = ((8, D), (1,), (1, F, D), (1, D, F), (1, F, D))
    with pytest.raises(ValueError, match=f"dim {D} and width {F} in {name} takes"):
        kernels.check_experts(*shapes, [name] * 4)
    with pytest.raises(KernelError, match="SBUF"):
        experts_traces.forward(experts_traces.routed(256, 4), D, F, keep_weights=False, dtype=dtype)


def test_traffic_is_near_the_minimum(real_widths):
    counts, forward, backward = real_widths
    R, D, F, E = REAL.values()
    expert, used = 3 * D * F * 2, int((counts > 0).sum())
    assert used == E
    # Each row in and out, each used expert's weights in; what forward keeps is above the minimum.
    least = 2 * R * D * 2 + used * expert
    assert least == experts_traces.minimum(counts, D, F)["forward"]
    assert forward.hbm_bytes() <= 1.3 * least
    # x, dy, gate, up and used weights in; dx and all experts' gradients out.
    least = 3 * R * D * 2 + 2 * R * F * 2 + (used + E) * expert
    assert least == experts_traces.minimum(counts, D, F)["backward"]
    assert backward.hbm_bytes() <= 1.3 * least


def test_the_array_is_full(real_widths):
    _, forward, backward = real_widths
    assert forward.array_utilization() >= 0.8
    assert backward.array_utilization() >= 0.8
    # Backward needs few transposes; forward transposes weights, the reason for transpose_by_dma.
    assert backward.array_utilization(transposes=True) >= 0.95
    assert forward.array_utilization(transposes=True) >= 0.48


@pytest.mark.parametrize("version", arch.VERSIONS)
def test_python_that_every_nki_compiles(version):
    for kernel in (kernels.grouped_experts_kernel, kernels.grouped_experts_backward_kernel):
        assert lint(kernel, version=version) == []


@pytest.mark.parametrize("version", arch.VERSIONS)
def test_they_run_under_every_nki(version, monkeypatch):
    monkeypatch.setenv("NKI_SIM_VERSION", version)
    x, counts, weights, dy = inputs([3, 0, 130, 5], 48, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worst_ratio(grouped_experts, x, counts, weights, dy) <= 1
