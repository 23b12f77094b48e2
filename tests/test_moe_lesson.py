"""Lesson 04's exercises: stub and solution are the page's, and the checker tells them apart."""

import html
import importlib.util
import inspect
import re

import nbformat
import pytest

from qwen3_trainium import experts_traces, moe_exercises
from qwen3_trainium.kernels import broken_experts
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
    assert moe_exercises.judge(name, lambda *arguments: 0)[0] == "Not yet"


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
