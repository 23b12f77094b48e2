"""`make test` runs the lessons under nbval, whose lax mode alone would hide wrong results."""

import os
import subprocess
import sys

import pytest
import tiny_notebooks
from nbformat.v4 import new_output

from qwen3_trainium import notebook_format, profiles

COMPARED = ("nbval-check-output", "print('two and two is', 2 + 2)")
CHECK = tiny_notebooks.two_and_two("tiny.sum")


def nbval(folder, sources, committed):
    """Run nbval as the Makefile does over one lesson whose third cell has a committed output."""
    notebook = tiny_notebooks.notebook(sources)
    for count, cell in enumerate(notebook.cells, start=1):
        cell.execution_count = count
    notebook.cells[2].outputs = [new_output("stream", text=committed)]
    (folder / "00_x.ipynb").write_text(notebook_format.canonical(notebook))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-q"]
    command += ["-c", str(profiles.ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["--nbval-lax", "--nbval-current-env", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(profiles.ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("compared", "check", "committed", "code", "says"),
    [
        (COMPARED, CHECK, "two and two is 4\n", 0, "1 cells compared"),
        (COMPARED, CHECK, "two and two is 5\n", 1, "Cell outputs differ"),
        (COMPARED, CHECK.replace("== 4", "== 5"), "two and two is 4\n", 1, "1 checks failed"),
        (COMPARED[1], CHECK, "two and two is 4\n", 1, "no cell was compared"),
    ],
    ids=["right", "wrong_text", "wrong_number", "nothing_compared"],
)
def test_lessons_under_nbval(tmp_path, compared, check, committed, code, says):
    sources = [
        tiny_notebooks.PARAMETERS,
        tiny_notebooks.IMPORT,
        compared,
        check,
        "checks.verdict()",
    ]
    returned, output = nbval(tmp_path, sources, committed)
    assert says in output
    assert returned == code
