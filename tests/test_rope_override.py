"""The swap: every field, every layer, the same training; and the lesson's exercises.

One launch on two ranks, of two steps; the runs whose losses are compared stay in this process.
"""

import ast
import dataclasses
import html
import inspect
import json
import re

import pytest
import tiny_release
import torch

from qwen3_trainium import cpu, kernel_backend, launch, onerank, profiles, runlog, verify

cpu.prepare()

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.rope import CosSinRoPE  # noqa: E402

from configs import native  # noqa: E402
from qwen3_trainium import kernel_exercises, nki_rope, overrides, rope_parity  # noqa: E402
from qwen3_trainium.errors import SettingError  # noqa: E402
from qwen3_trainium.kernels import broken  # noqa: E402

LESSON = profiles.ROOT / "notebooks" / "03_rope_kernel.ipynb"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tiny_release.make(tmp_path_factory.mktemp("release"))
    return profiles.load("cpu", model=str(folder), steps=2)


def config_of(profile, name="published"):
    return launch.build_config("native", name, profile)


def other_fields():
    """A rotary config in which no field has its default."""
    values = {}
    for field in dataclasses.fields(CosSinRoPE.Config):
        if field.init and field.name not in ("sharding_config", "param_init"):
            default = field.default
            if isinstance(default, bool):
                values[field.name] = not default
            elif isinstance(default, (int, float)):
                values[field.name] = default + 1
    return CosSinRoPE.Config(**{**values, "dim": 34, "max_seq_len": 300, "scaling": "yarn"})


# ------------------------------------------------------------------ the module


def test_every_field_is_derived():
    config = other_fields()
    derived = overrides.nki_rope(config)
    assert type(derived) is nki_rope.NKIRoPE.Config
    for field in dataclasses.fields(config):
        assert getattr(derived, field.name) == getattr(config, field.name), field.name
    assert derived.implementation == "own"
    assert overrides.nki_rope(config, implementation="rope_hf").implementation == "rope_hf"


POSITIONS = {
    "none": None,
    "one row for all": torch.arange(256).flip(0)[None],
    "documents": rope_parity.documents(2, 256, 4),
    "int32": rope_parity.documents(2, 256, 4).int(),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("scaling", ["none", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_torchtitans_module_computes(positions, scaling, dtype):
    """0.0 in float32 and in bfloat16: torchtitan, too, multiplies in float32 and rounds once."""
    config = CosSinRoPE.Config(
        dim=32, max_seq_len=300, theta=5e6, scaling=scaling, rope_factor=4.0, original_seq_len=64
    )
    q, k = (torch.randn(2, 256, H, 32, dtype=dtype, requires_grad=True) for H in (4, 2))
    at = POSITIONS[positions]
    stock, ours = config.build(), overrides.nki_rope(config).build()
    assert torch.equal(stock.cache, ours.cache)
    # torchtitan gathers a cache for each sequence, by int64 alone.
    wanted = stock(q, k, at if at is None else at.long())
    found = ours(q, k, at)
    assert all(map(torch.equal, found, wanted))
    grads = [torch.randn_like(x) for x in (q, k)]
    ours_grads, theirs = (torch.autograd.grad(out, (q, k), grads) for out in (found, wanted))
    assert all(map(torch.equal, ours_grads, theirs))


def test_positions_beyond_the_cache_are_refused_as_upstream_does():
    module = overrides.nki_rope(CosSinRoPE.Config(dim=32, max_seq_len=256)).build()
    q, k = torch.zeros(1, 256, 2, 32), torch.zeros(1, 256, 1, 32)
    with pytest.raises(ValueError, match="rows 0 to 255: make max_seq_len larger"):
        module(q, k, torch.arange(256)[None] + 1)


def test_a_scaling_that_it_does_not_implement_is_refused():
    config = CosSinRoPE.Config(dim=32, max_seq_len=256, scaling="llama")
    with pytest.raises(SettingError, match="rope scaling 'llama': use one of none, yarn"):
        overrides.nki_rope(config)


def test_the_state_of_a_model_does_not_change():
    config = CosSinRoPE.Config(dim=32, max_seq_len=256)
    assert overrides.nki_rope(config).build().state_dict() == config.build().state_dict() == {}


# ------------------------------------------------------------------ the swap


def swap(profile, *imports):
    config = config_of(profile)
    config.override = OverrideConfig(imports=list(imports))
    lines = apply_overrides(config.override, config)
    kinds = [type(layer.attention.rope) for layer in config.model_spec.model.layers]
    return lines, [kind is nki_rope.NKIRoPE.Config for kind in kinds]


def test_all_layers(profile):
    lines, swapped = swap(profile, native.NKI_ROPE)
    assert len(lines) == 4
    assert swapped == [True] * 4


@pytest.mark.parametrize(
    ("patterns", "layers"),
    [
        (["layers.0.*"], [True, False, False, False]),
        (["layers.[12].attention.rope"], [False, True, True, False]),
        (["layers.0.*", "layers.3.*"], [True, False, False, True]),
        (["model_spec.model.layers.1.*"], [False, True, False, False]),
        (["layers.7.*"], [False] * 4),
    ],
)
def test_some_layers(profile, patterns, layers):
    path = overrides.nki_rope_on(*patterns)
    assert overrides.nki_rope_on(*patterns) == path  # once more does no harm
    lines, swapped = swap(profile, path)
    assert swapped == layers
    log = "\n".join(f"[rank0]:{line}" for line in lines)
    assert len(overrides.replaced(log, "nki_rope").get(0, [])) == sum(layers)


def test_two_claims_on_a_layer_are_refused(profile):
    with pytest.raises(ValueError, match="both claim node"):
        swap(profile, native.NKI_ROPE, overrides.nki_rope_on("layers.0.*"))


def test_a_length_that_the_kernel_cannot_take_is_refused_before_a_launch(profile, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    short = dataclasses.replace(profile, seq_len=128)
    with pytest.raises(SettingError, match="use 256, or 128 with LNC 1"):
        config_of(short, "published_nki_rope")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert native.NKI_ROPE in config_of(short, "published_nki_rope").override.imports


LINE = (
    "[rank{}]:[titan] 2026-11-30 - root - INFO - [Override] qwen3_trainium.overrides.{}: "
    "model_spec.model.layers.{}.attention.rope CosSinRoPE.Config -> NKIRoPE.Config"
)


def test_the_log_is_read_by_rank_and_of_the_last_launch_alone():
    log = "\n".join(
        [
            "=== launch: python -m …",
            *(LINE.format(0, "nki_rope", layer) for layer in range(4)),
            "=== launch: python -m …",
            LINE.format(0, "nki_rope", 0),
            LINE.format(1, "nki_rope_on_layers_1", 1),
            LINE.format(1, "sdpa", 1),
        ]
    )
    assert overrides.replaced(log, "nki_rope") == {
        0: ["model_spec.model.layers.0.attention.rope"],
        1: ["model_spec.model.layers.1.attention.rope"],
    }
    assert overrides.replaced("nothing of the kind", "nki_rope") == {}


# ------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def stock(profile, tmp_path_factory):
    """Losses and gradient norms of the run without the kernel, on one rank with the same text."""
    alone = dataclasses.replace(profile, ranks=1)
    folder = onerank.train(config_of(alone), tmp_path_factory.mktemp("runs") / "stock")
    return runlog.read(folder)[["loss", "grad_norm"]]


def test_two_ranks_train_with_one_replacement_a_layer(profile, stock, tmp_path):
    """Tensor parallel, where each rank holds half of the heads as a DTensor."""
    imports = ["--override.imports", native.SDPA, native.NKI_ROPE]
    run = launch.launch("native", "tensor_parallel", profile, runs=tmp_path, arguments=imports)
    log = (run.folder / "log.txt").read_text()
    names = [f"model_spec.model.layers.{i}.attention.rope" for i in range(4)]
    assert overrides.replaced(log, "nki_rope") == {0: names, 1: names}
    ran = kernel_backend.ran_in(log)
    assert sorted(ran) == [
        "rope_kernel_bshd (backward, rows by position)",
        "rope_kernel_bshd (rows by position)",
    ]
    assert set(ran.values()) == {kernel_backend.backend(torch.zeros(1))}
    # Two ranks add partial sums in another order than one.
    assert (runlog.read(run.folder).loss - stock.loss).abs().max() <= verify.FLOAT32_TOLERANCE


def test_training_is_the_same_to_the_last_bit(profile, stock, tmp_path, monkeypatch):
    """And another rotation, of the same cost, is noticed in the first loss."""
    config = config_of(dataclasses.replace(profile, ranks=1), "published_nki_rope")
    ours = runlog.read(onerank.train(config, tmp_path / "kernel"))
    assert ours[["loss", "grad_norm"]].equals(stock)
    monkeypatch.setattr(nki_rope, "rope", lambda q, k, *rest, **named: (q, k))
    config = config_of(dataclasses.replace(profile, ranks=1, steps=1), "published_nki_rope")
    wrong = runlog.read(onerank.train(config, tmp_path / "unrotated"))
    assert abs(wrong.loss[1] - stock.loss[1]) > 10 * verify.FLOAT32_TOLERANCE


# ------------------------------------------------------------------ the exercises


@pytest.fixture(scope="module")
def lesson():
    return json.loads(LESSON.read_text())["cells"]


def tagged(cells, tag):
    (cell,) = [c for c in cells if tag in c["metadata"].get("tags", [])]
    return "".join(cell["source"])


def kernel_of(source, folder):
    """The kernel that a cell defines, from a file, since its source is read again."""
    path = folder / "answer.py"
    header = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n"
    path.write_text(header + source)
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    (name,) = [f.name for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
    return names[name]


WRONG = {
    1: "never written",
    2: "129 partitions",
    3: "columns 0 to 31",
    4: "differ in rows 0 to 127",
    5: "on 2 cores elements differ in rows 128 to 255",
}


@pytest.mark.parametrize("number", kernel_exercises.EXERCISES)
def test_an_exercise_as_it_stands_is_not_attempted_and_wrong(number, lesson, tmp_path, monkeypatch):
    stub = tagged(lesson, f"exercise-{number}")
    stub = stub[: stub.index("kernel_exercises.check")]
    original = inspect.getsource(inspect.unwrap(kernel_exercises.EXERCISES[number].kernel))
    assert stub.strip() == original.strip()  # the cell shows what is tested
    kernel = kernel_of(stub, tmp_path)
    state, text = kernel_exercises.judge(number, kernel)
    assert state == kernel_exercises.NOT_ATTEMPTED
    assert WRONG[number] in text
    told = kernel_exercises.EXERCISES[number].look
    assert told not in text  # where to look is for those who have tried
    assert kernel_exercises.judge(number, None) == (state, text)
    monkeypatch.setattr(kernel_exercises, "same", lambda kernel, other: False)
    state, text = kernel_exercises.judge(number, kernel)
    assert state == kernel_exercises.NOT_YET
    assert WRONG[number] in text
    assert told in text


@pytest.mark.parametrize("number", kernel_exercises.EXERCISES)
def test_its_solution_is_right_and_no_answer_is_given_away(number, lesson, tmp_path, capsys):
    solutions = re.findall(r"<pre>(.*?)</pre>", tagged(lesson, "solutions"), re.DOTALL)
    solution = html.unescape(solutions[number - 1])
    kernel = kernel_of(solution, tmp_path)
    assert kernel_exercises.judge(number, kernel) == (kernel_exercises.RIGHT, "")
    kernel_exercises.check(number, kernel)
    assert capsys.readouterr().out == "Right.\n"
    stub = inspect.getsource(inspect.unwrap(kernel_exercises.EXERCISES[number].kernel))
    told = kernel_exercises.EXERCISES[number].look
    changed = set(solution.splitlines()) - set(stub.splitlines())
    assert changed
    assert not any(line.strip() in told for line in changed)


def test_an_answer_may_be_anything():
    for answer in (3, "text", lambda x: x, broken.double_rows):
        assert kernel_exercises.judge(1, answer)[0] == kernel_exercises.NOT_YET


def test_a_half_mended_kernel_is_not_right(tmp_path):
    """Right on one core and wrong on two: the strides coincide where a position has one head."""
    source = inspect.getsource(inspect.unwrap(broken.double_heads))
    kernel = kernel_of(source.replace("first * D + start", "first * 3 * D + start"), tmp_path)
    state, text = kernel_exercises.judge(5, kernel)
    assert state == kernel_exercises.NOT_YET
    assert "[512, 5, 8]" in text
