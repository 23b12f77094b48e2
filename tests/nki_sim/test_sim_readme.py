"""The README says what the code says: the instruction table, the files, the example."""

import re
from pathlib import Path

import numpy as np

import nki_sim
from nki_sim.table import markdown

FOLDER = Path(nki_sim.__file__).parent
TEXT = (FOLDER / "README.md").read_text()
MARKS = ("<!-- instructions -->\n", "\n<!-- end -->")


def test_instruction_table_is_generated():
    start, end = TEXT.index(MARKS[0]) + len(MARKS[0]), TEXT.index(MARKS[1])
    assert TEXT[start:end] == markdown(), (
        "replace what stands between the marks by the output of: "
        "python -c 'import nki_sim.isa, nki_sim.table as t; print(t.markdown())'"
    )


def test_files_that_it_names_exist():
    tests = Path(__file__).parent
    named = set(re.findall(r"`(\w+\.py)(?:::(\w+))?`", TEXT))
    for file, function in named - {("matmul.py", "")}:
        path = next((p for p in (FOLDER / file, tests / file) if p.exists()), None)
        assert path, file
        assert not function or f"def {function}(" in path.read_text()


def test_every_module_is_named():
    plumbing = {"__init__", "__main__", "dtypes", "enums", "errors", "install", "isa", "nki",
                "numeric", "ops", "rules", "typing"}  # fmt: skip
    modules = {p.stem for p in FOLDER.glob("*.py")} - plumbing
    assert modules == {m for m in modules if f"`{m}.py`" in TEXT}


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)
    names = {"x": np.ones((4, 4), np.float32)}
    exec(code, names)
    assert (names["y"] == 2).all()
    assert "peak a partition" in capsys.readouterr().out


def test_the_trace_has_what_is_listed():
    paragraph = TEXT[TEXT.index("A trace has") : TEXT.index("An error names")]
    with nki_sim.trace() as trace:
        pass
    for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", paragraph):
        assert hasattr(trace, name), name
