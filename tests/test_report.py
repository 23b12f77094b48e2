"""The report: self-contained, honest about the device, and the broken cell first."""

import re

import nbformat
import pytest
import tiny_notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from qwen3_trainium import checks, profiles, report, runner

FACTS = checks.environment_facts(profiles.load("cpu"))


def lesson(name, *cells, **fields):
    fields = {"status": "passed"} | fields
    return runner.Lesson(name, new_notebook(cells=list(cells)), **fields)


def render(*lessons, facts=FACTS, folder=profiles.ROOT):
    return report.render(list(lessons), facts, runner.verdict(list(lessons), facts), folder)


def output(data):
    return new_code_cell("x", outputs=[new_output("display_data", data)])


RECORD = {
    "id": "a.b",
    "title": "Two & two",
    "expected": 4,
    "measured": 5,
    "passed": False,
    "detail": "simulator",
}


def test_nothing_is_fetched_or_run(tmp_path):
    (tmp_path / "local.png").write_bytes(b"png")
    page = render(
        lesson(
            "00_x",
            new_markdown_cell("![far](https://example.org/far.png) ![near](local.png)"),
            new_markdown_cell('<script src="https://example.org/x.js"></script><img src="//a/b">'),
            output({"text/html": '<link href="https://a/x.css"><iframe src="https://a"></iframe>'}),
            output({"text/html": '<style>@import "https://a/b.css";</style><b>kept</b>'}),
            output({"text/html": "<script>alert(1)</script>"}),
        ),
        folder=tmp_path,
    )
    assert not re.search(r"<(script|link|iframe|base)\b", page)
    assert not re.search(r"@import|url\(", page)
    assert re.findall(r'src="(.{10})', page) == ["data:image"]
    assert '<a href="https://example.org/far.png">far</a>' in page
    assert "<b>kept</b>" in page


def test_formulas_become_mathml():
    page = render(lesson("00_x", new_markdown_cell("a loss of $\\ln V$\n\n$$L = \\ln V + 1/2$$")))
    assert page.count("<math") == 2
    assert 'display="block"' in page
    assert "\\ln" not in page


def test_verdict_stands_on_top_and_a_cpu_run_says_so():
    page = render(
        lesson("00_x", output({checks.CHECK: RECORD, "text/plain": "a.b"}), status="check failed")
    )
    assert page.index("verdict: FAILED") < page.index("Two &amp; two") < page.index("00_x.ipynb")
    assert "Nothing on this page was verified on Trainium hardware" in page
    assert "simulator" in page
    neuron = {**FACTS, "machine": FACTS["machine"] | {"device": "neuron"}}
    assert "Nothing on this page" not in render(lesson("00_x"), facts=neuron)


def test_the_broken_cell_and_its_error_come_first():
    cell = new_code_cell("train()")
    cell.outputs = [
        new_output("error", ename="ValueError", evalue="<no>", traceback=["\x1b[31m<no>\x1b[0m"])
    ]
    page = render(
        lesson("00_x", new_markdown_cell("# Prose")),
        lesson("01_y", cell, status="cell failed", error="cell 1: ValueError: <no>", broken_cell=0),
    )
    first = page.index("01_y: cell failed")
    assert first < page.index("<h2>Verdict</h2>") < page.index("Prose")
    assert page.index("<pre class=source>train()</pre>") > first
    assert "<pre class=error>&lt;no&gt;</pre>" in page
    assert "\x1b" not in page


def test_what_did_not_run_is_not_shown_as_anything_else():
    page = render(lesson("00_x", status="no verdict"), lesson("01_y", status="not run"))
    assert re.search(r"<h3>01_y <span[^>]*>not run</span></h3>", page)
    assert "01_y.ipynb" not in page


@pytest.mark.parametrize("name", tiny_notebooks.LESSONS)
def test_every_tiny_lesson_can_be_rendered(name):
    notebook = tiny_notebooks.notebook(tiny_notebooks.LESSONS[name])
    nbformat.validate(notebook)
    assert "<!doctype html>" in render(runner.Lesson(name, notebook, status="passed"))
