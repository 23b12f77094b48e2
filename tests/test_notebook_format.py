"""The canonical form of committed notebooks: each fault is found, and a clean run has none."""

import nbformat
import pandas as pd
import pytest
import tiny_notebooks
from nbformat.v4 import new_code_cell, new_output

from qwen3_trainium import notebook_format, runner
from qwen3_trainium.errors import SettingError


def clean():
    notebook = tiny_notebooks.notebook([tiny_notebooks.PARAMETERS, "1 + 1"])
    for count, cell in enumerate(notebook.cells, start=1):
        cell.execution_count = count
    return notebook


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def test_a_clean_notebook_has_no_fault(tmp_path):
    path = tmp_path / "00_x.ipynb"
    path.write_text(notebook_format.canonical(clean()))
    assert notebook_format.main(["--check", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        (printed("saved to /home/me/runs/x"), "an absolute path"),
        (printed("/Users/x/runs"), "an absolute path"),
        (printed("started at 12:30:59"), "a time of day"),
        (printed(" 40%|####      | 4/10"), "a progress bar"),
        (printed("step 1\rstep 2"), "a progress bar"),
        (printed("\x1b[31mred\x1b[0m"), "an escape code"),
        (printed("<Styler at 0x7fb70a1d5d90>"), "an address of one process"),
        (printed("hf_" + "x1" * 12), "Hugging Face token"),
        (printed("warning", name="stderr"), "on stderr"),
        (new_output("error", ename="NameError", evalue="x", traceback=[]), "ended in NameError"),
        (new_output("display_data", {"text/html": "<td>/tmp/x</td>"}), "an absolute path"),
    ],
)
def test_an_output_of_one_machine_or_moment_is_found(output, fault):
    notebook = clean()
    notebook.cells[1].outputs = [output]
    assert [fault in found for found in notebook_format.faults(notebook)] == [True]


def test_what_is_no_fault_is_let_through():
    notebook = clean()
    notebook.cells[1].outputs = [
        printed("loss 8.8 at https://example.org/home/x, ratio 1:10, runs/tmp/x"),
        new_output("display_data", {"image/png": "aaa/tmp/bbb"}),
    ]
    assert notebook_format.faults(notebook) == []
    intended = new_code_cell("1 / 0", execution_count=3, metadata={"tags": ["raises-exception"]})
    intended.outputs = [new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    notebook.cells.append(intended)
    assert notebook_format.faults(notebook) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("!torchrun train.py", "whose failure nobody sees"),
        ("import neuronxcc.nki", "imports neuronxcc"),
        ("def broken(:", "is not Python"),
        ("%pip install x", "installs a package"),
        ("", "is empty"),
        ("open('/tmp/x')", "an absolute path"),
    ],
)
def test_a_source_that_does_harm_is_found(source, fault):
    notebook = clean()
    notebook.cells[1].source = source
    assert fault in "; ".join(notebook_format.faults(notebook))


def test_outputs_must_be_of_one_complete_run():
    notebook = clean()
    for count in (None, 1, 7):
        notebook.cells[1].execution_count = count
        assert notebook_format.faults(notebook) == [
            "execution counts are not 1 to 2: commit the outputs of one complete run"
        ]


def test_an_import_holds_for_later_cells():
    notebook = clean()
    for count, source in enumerate(("import subprocess as sp", "sp.run(['false'])"), start=3):
        notebook.cells.append(new_code_cell(source, execution_count=count))
    (fault,) = notebook_format.faults(notebook)
    assert fault.startswith("cell 4 runs a command whose failure nobody sees")


def styled_tables():
    """The outputs of one run of a cell that shows two styled tables."""
    frames = [pd.DataFrame({"loss": [1.5]}), pd.DataFrame({"rank": [0, 1]})]
    styled = [frame.style.hide(axis="index") for frame in frames]
    return [
        new_output("display_data", {"text/plain": repr(one), "text/html": one.to_html()})
        for one in styled
    ]


def test_two_runs_of_a_styled_table_give_the_same_text():
    texts = []
    for _ in range(2):
        notebook = clean()
        notebook.cells[1].outputs = styled_tables()
        texts.append(notebook_format.canonical(notebook))
    assert texts[0] == texts[1]
    saved = nbformat.v4.reads(texts[0])
    assert notebook_format.canonical(saved) == texts[0]
    assert notebook_format.faults(saved) == []
    tables = [output.data["text/html"] for output in saved.cells[1].outputs]
    assert 'id="T_00000"' in tables[0]
    assert "#T_00000" in tables[0] or "T_00000_level0_col0" in tables[0]
    assert 'id="T_00001"' in tables[1]
    assert "T_00000" not in tables[1]
    # Text that says something stays, as for readers without HTML.
    notebook.cells[1].outputs = [
        new_output("display_data", {"text/plain": "loss 1.5", "text/html": "<b>loss 1.5</b>"})
    ]
    assert "text/plain" in notebook_format.canonical(notebook)


def test_exactly_one_parameters_cell():
    notebook = clean()
    notebook.cells[0].metadata = {}
    assert "0 cells are tagged 'parameters'" in notebook_format.faults(notebook)[0]


def test_fix_settles_what_has_one_right_form(tmp_path, capsys):
    notebook = clean()
    notebook.metadata = {"kernelspec": {"name": "mine", "display_name": "Mine"}, "papermill": {}}
    notebook.cells[0].metadata["papermill"] = {"start_time": "2026-11-30T10:00:00"}
    del notebook.cells[1]["id"]
    notebook.cells[1].source = "1 + 1  \n\n"
    path = tmp_path / "00_x.ipynb"
    path.write_text(nbformat.v4.writes(notebook, indent=4))
    assert notebook_format.main(["--check", str(tmp_path)]) == 1
    assert "not in canonical form" in capsys.readouterr().out
    assert notebook_format.main(["--fix", str(tmp_path)]) == 0
    assert notebook_format.main(["--check", str(tmp_path)]) == 0
    fixed = nbformat.read(path, as_version=4)
    assert fixed.metadata == notebook_format.METADATA
    assert fixed.cells[0].metadata == {"tags": ["parameters"]}
    assert len({cell.id for cell in fixed.cells}) == 2
    assert path.read_text().endswith("}\n")
    assert fixed.cells[1].source == "1 + 1"


def test_outputs_of_a_run_are_saved_back_clean(tmp_path):
    """`make outputs`: run, save, and the result has no fault but a path that the lesson prints."""
    path = tiny_notebooks.write(tmp_path, {"passes": tiny_notebooks.LESSONS["passes"]})["passes"]
    runner.run([path], "cpu", tmp_path / "out")
    notebook_format.save_outputs(tmp_path / "out" / path.name, path)
    saved = nbformat.read(path, as_version=4)
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "papermill" not in path.read_text()
    assert "profile is cpu" in path.read_text()
    assert all("injected-parameters" not in cell.metadata.get("tags", []) for cell in code)
    # The lesson prints its interpreter on purpose, and that may be anywhere.
    code[4].outputs = []
    assert notebook_format.faults(saved) == []
    before = path.read_text()
    saved.cells[-1].source += "  # edited"
    path.write_text(nbformat.writes(saved))
    with pytest.raises(SettingError, match=r"was edited after .* was run"):
        notebook_format.save_outputs(tmp_path / "out" / path.name, path)
    assert before != path.read_text()


def test_an_empty_folder_is_no_clean_folder(tmp_path):
    with pytest.raises(SettingError, match="no notebook was found"):
        notebook_format.main(["--check", str(tmp_path)])
