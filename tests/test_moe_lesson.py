"""Lesson 04's exercises, and the checks of its page made to fail."""

import dataclasses
import html
import importlib.util
import inspect
import os
import re

import nbformat
import pandas as pd
import pytest
import torch

import nki_sim
from qwen3_trainium import (
    checks,
    experts_traces,
    kernel_backend,
    launch,
    moe_exercises,
    moe_runs,
    profiles,
)
from qwen3_trainium.kernels import broken_experts
from qwen3_trainium.ops import grouped_experts
from qwen3_trainium.profiles import ROOT

NAMES = ("project", "weight_gradient")


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(ROOT / "notebooks" / "04_nki_moe.ipynb", 4).cells


def kernel_of(source, name, folder):
    """A kernel from text; inspect wants it in a file."""
    path = folder / f"answer_{name}_{len(list(folder.iterdir()))}.py"
    head = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n\n"
    path.write_text(head + source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def source_of(name):
    return inspect.getsource(inspect.unwrap(getattr(broken_experts, name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_faulty_kernel(name, cells):
    shown = [c.source for c in cells if c.cell_type == "code" and f"def {name}(" in c.source]
    assert len(shown) == 1
    assert source_of(name).strip() in shown[0]


@pytest.mark.parametrize("name", NAMES)
def test_three_answers(name, cells, tmp_path):
    folded = "".join(c.source for c in cells if "<details>" in c.source)
    solutions = [html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", folded, re.DOTALL)]
    solution = next(text for text in solutions if f"def {name}(" in text)
    stub = source_of(name)
    assert moe_exercises.judge(name, None)[0] == moe_exercises.NOT_ATTEMPTED
    assert moe_exercises.judge(name, kernel_of(stub, name, tmp_path))[0] == "Not attempted"
    assert moe_exercises.judge(name, kernel_of(solution, name, tmp_path)) == ("Right", "")
    wrong = stub.replace("value=1.0", "value=2.0").replace("accumulate=False", "accumulate=d < 0")
    state, text = moe_exercises.judge(name, kernel_of(wrong, name, tmp_path))
    assert state == "Not yet"
    assert "with" in text

    def zero(*arguments):
        return 0

    assert moe_exercises.judge(name, zero)[0] == "Not yet"


def test_a_trace_counts_what_the_routing_uses():
    """Experts without rows cost no load; a second block of an expert costs none either."""
    sizes = {"D": 256, "F": 128}
    one = experts_traces.routed(300, 4) * 0
    one[1] = 300
    spread = one * 0 + 75
    loads = {
        name: sum(
            size
            for tensor, size in experts_traces.forward(counts, **sizes).hbm_read().items()
            if tensor.startswith("w")
        )
        for name, counts in {"one": one, "spread": spread}.items()
    }
    expert = 3 * 256 * 128 * 2
    assert loads == {"one": expert, "spread": 4 * expert}
    least = experts_traces.minimum(spread, **sizes)
    assert least["forward"] == 2 * 300 * 256 * 2 + 4 * expert
    assert least["backward"] == (3 * 300 * 256 + 2 * 300 * 128) * 2 + 8 * expert


# ------------------------------------------------------------------ what ran must be kernels
@pytest.fixture
def recorded(monkeypatch):
    """The checks that cells record, by id."""
    found = {}
    monkeypatch.setattr(checks, "_records", found)
    return found


def execute(cells, id, namespace):
    """One cell of the page in a namespace of the names that it needs."""
    source = next(cell.source for cell in cells if cell.id == id)
    exec(compile(source, id, "exec"), namespace)


@pytest.mark.parametrize(
    ("place", "passes"),
    [
        ("simulator:nki_sim", True),
        ("reference", False),
        ("reference, simulator:nki_sim", False),
        (None, False),
    ],
)
def test_experts_that_no_kernel_computed_fail_the_lesson(
    place, passes, cells, recorded, tmp_path, monkeypatch
):
    """Every check that rests on kernels: with right numbers, it fails when something else ran."""
    ran = {} if place is None else dict.fromkeys(moe_runs.KERNELS, place)
    kinds = ("nki_experts", "nki_rope", "sdpa")
    (tmp_path / "log.txt").write_text(
        "".join(
            f"[rank{rank}]: [Override] qwen3_trainium.overrides.{kind}: layers.{layer} x\n"
            for rank in (0, 1)
            for kind in kinds
            for layer in range(4)
        )
        + "".join(
            f"[rank0]: [Kernel] {kernel} on {where}, LNC 1\n"
            for kernel, places in ran.items()
            for where in places.split(", ")
        )
    )
    settings = profiles.load("cpu")
    run = launch.Run(tmp_path, settings)
    names = {"settings": settings, "nki_run": run, "moe_runs": moe_runs, "checks": checks}
    names |= {"kernel_backend": kernel_backend, "pd": pd}
    execute(cells, "moe-016", names)

    monkeypatch.setattr(kernel_backend, "ran", lambda: ran)
    results = ["y", "dx", "dw1", "dw2", "dw3"]
    columns = {"result": results, "case": "x", "largest ratio": 0.5, "difference": 1e-6}
    proofs = [pd.DataFrame({"dtype": dtype, **columns}) for dtype in ("float32", "bfloat16")]
    names["proof"] = pd.concat(proofs)
    execute(cells, "moe-044", names)

    names["left_out"] = {moe_runs.REFERENCE: "left out", moe_runs.OTHER: "not given"}
    names["bounds"] = moe_runs.BOUNDS["cpu"]
    names["differences"] = {moe_runs.STOCK: pd.Series([1e-6] * 10)}
    names["metrics"] = dict.fromkeys(("NKI", moe_runs.STOCK), pd.Series(range(10)))
    names["other_experts"] = None
    execute(cells, "moe-055", names)

    ids = ("overrides.count", "experts.forward", "experts.backward", "train.same_loss")
    assert {id: recorded[f"moe.{id}"]["passed"] for id in ids} == dict.fromkeys(ids, passes)
    skipped = recorded["moe.train.reference_loss"]
    assert (skipped["passed"], skipped["detail"]) == (None, "skipped: left out")


def test_no_instruction_is_no_program(cells, recorded, monkeypatch):
    """On the references nothing is traced, and a set of empty programs has one element too."""
    names = {"checks": checks, "nki_sim": nki_sim, "grouped_experts": grouped_experts}
    names |= {"torch": torch, "R": 128, "N": 65}
    names["tokens_of"] = torch.tensor([[2] * 64, [128] + [0] * 63] * 4).numpy()
    for setting, passes in (("", True), (kernel_backend.REFERENCE, False)):
        monkeypatch.setenv(kernel_backend.VARIABLE, setting)
        torch._dynamo.reset()
        execute(cells, "moe-048", names)
        assert recorded["moe.shapes.static"]["passed"] is passes


# ------------------------------------------------------------------ the runs that are compared
def test_a_device_that_cannot_train_stock_experts_goes_on(monkeypatch):
    asked = []

    def run(recipe, config, settings, **options):
        asked.append(
            (config, options.get("arguments", []), os.environ.get(kernel_backend.VARIABLE))
        )
        if config == "stock_experts" and not options.get("arguments"):
            raise launch.RunError("failed\nRuntimeError: offs must be divisible by 128")
        return "a run"

    monkeypatch.setattr(launch, "launch", run)
    device = dataclasses.replace(profiles.load("cpu"), device="neuron")
    runs, left_out = moe_runs.others(device, None, overwrite=True)
    assert (runs, asked) == ({}, [("stock_experts", [], None)])
    assert "offs must be divisible by 128" in left_out[moe_runs.STOCK]
    assert "one more shape to compile" in left_out[moe_runs.REFERENCE]
    assert "not installed, other_experts not given: nothing compared" in left_out[moe_runs.OTHER]

    # A CPU can; and a run that fails leaves no setting behind.
    with pytest.raises(launch.RunError):
        moe_runs.others(profiles.load("cpu"), None, overwrite=True)
    assert asked[1] == ("nki", [], kernel_backend.REFERENCE)
    with pytest.raises(ZeroDivisionError), moe_runs.by_reference():
        1 / 0  # noqa: B018
    assert kernel_backend.VARIABLE not in os.environ


def test_other_experts_are_added_to_the_recipes_own_overrides(monkeypatch):
    asked = {}

    def run(recipe, config, settings, *, name=None, arguments=(), overwrite):
        asked[name] = (config, list(arguments))
        return "a run"

    monkeypatch.setattr(launch, "launch", run)
    runs, left_out = moe_runs.others(profiles.load("cpu"), "a.module.experts", overwrite=False)
    assert (set(runs), left_out) == ({moe_runs.REFERENCE, moe_runs.STOCK, moe_runs.OTHER}, {})
    recipe = "qwen3_trainium.overrides"
    expected = ["--override.imports", f"{recipe}.sdpa", f"{recipe}.nki_rope", "a.module.experts"]
    assert asked["other"] == ("stock_experts", expected)
