"""The runner: how each kind of lesson ends, and what it writes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
import tiny_notebooks
import yaml

from qwen3_trainium import __main__, checks, profiles, runner
from qwen3_trainium.errors import SettingError

TOKEN = "hf_" + "abcdefgh" * 4

ENDS = {
    "passes": ("passed", ""),
    "shows_intended_exception": ("passed", ""),
    "check_fails": ("check failed", "cell 5: 1 of 1 checks failed: wrong.sum"),
    "check_fails_after_verdict": ("check failed", "checks failed: late.wrong"),
    "cell_raises": ("cell failed", "cell 5: ValueError: seq_len 200 is not a multiple of 256"),
    "kernel_dies": ("kernel died", "cell 5: the kernel died: out of memory is the usual cause"),
    "hangs_until_timeout": ("timed out", "cell 4: ran longer than the 4 s that a cell may take"),
    "exits_zero_early": ("ended early", "cell 5: ended the lesson before its verdict"),
    "no_verdict": ("no verdict", "the last cell must call checks.verdict(), and none did"),
    "no_checks": ("no check", "cell 4: no check was evaluated"),
    "only_skips": ("no check", "cell 5: no check was evaluated"),
    "repeats_id": (
        "repeated id",
        "check id tiny.sum is also recorded by 10_passes: rename one",
    ),
    "prints_secret": ("passed", ""),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All tiny lessons in one run, beside a user's kernel spec that belongs to no environment."""
    folder = tmp_path_factory.mktemp("lessons")
    foreign = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text(
        json.dumps({"argv": ["false"], "display_name": "Foreign", "language": "python"})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(foreign.parents[1]))
        patch.setenv("HF_TOKEN", TOKEN)
        paths = tiny_notebooks.write(folder, tiny_notebooks.LESSONS)
        out = folder / "out"
        lessons = runner.run(list(paths.values()), "cpu", out, cell_timeout=4)
    return {lesson.name[3:]: lesson for lesson in lessons}, out


@pytest.mark.parametrize("name", tiny_notebooks.LESSONS)
def test_each_way_of_ending_has_its_status(ran, name):
    lesson = ran[0][name]
    assert (lesson.status, lesson.error) == ENDS[name]


def test_a_dead_kernel_and_a_hanging_cell_do_not_hold_up_the_run(ran):
    assert ran[0]["kernel_dies"].seconds < 30
    assert ran[0]["hangs_until_timeout"].seconds < 30


def runs_on(pid):
    """False once the process has ended, also where nobody has asked for its exit status yet."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_dead_kernel_leaves_no_process_behind(ran):
    pid = int(ran[0]["kernel_dies"].notebook.cells[3].outputs[0].text)
    assert not runs_on(pid)


def test_the_kernel_is_this_interpreter_offline_and_gets_the_profile(ran):
    notebook = nbformat.read(ran[1] / "10_passes.ipynb", as_version=4)
    printed = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text" in output
    )
    assert printed.splitlines() == [
        "profile is cpu",
        "offline is 1",
        f"interpreter is {sys.executable}",
    ]


def test_a_profile_file_reaches_the_lesson_from_another_folder(tmp_path, monkeypatch):
    """The lesson reads the file that was named, not the profile of that name."""
    values = yaml.safe_load((profiles.PROFILES / "cpu.yaml").read_text())
    values |= {"profile": "mine", "steps": 3, "dataset": "texts"}
    (tmp_path / "texts").mkdir()
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    lesson = [
        tiny_notebooks.PARAMETERS,
        tiny_notebooks.IMPORT + "\n\nsettings = profiles.load(profile)",
        "checks.environment(settings)\n"
        'checks.check("tiny.steps", "Steps", 3, settings.steps, settings.steps == 3)\n'
        f"text = {str(tmp_path / 'texts')!r}\n"
        'checks.check("tiny.text", "Text", text, settings.dataset, settings.dataset == text)',
        tiny_notebooks.VERDICT,
    ]
    (tmp_path / "lessons").mkdir()
    paths = tiny_notebooks.write(tmp_path / "lessons", {"steps": lesson})
    monkeypatch.chdir(tmp_path)
    lessons = runner.run(list(paths.values()), "mine.yaml", tmp_path / "out")
    assert [(lesson.status, lesson.error) for lesson in lessons] == [("passed", "")]
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["profile"] == "mine"


def test_verdict_has_the_shape_of_the_design(ran):
    verdict = json.loads((ran[1] / "verdict.json").read_text())
    assert list(verdict) == ["profile", "versions", "machine", "notebooks", "checks", "passed"]
    assert verdict["profile"] == "cpu"
    assert verdict["passed"] is False
    assert verdict["versions"]["torchtitan"] == "0.3.0"
    assert verdict["machine"]["ranks"] == profiles.load("cpu").ranks
    assert [list(row) for row in verdict["notebooks"]] == [["name", "seconds", "status"]] * len(
        ENDS
    )
    by_id = {record["id"]: record for record in verdict["checks"]}
    assert by_id["tiny.sum"] == {
        "id": "tiny.sum",
        "title": "Two and two",
        "expected": 4,
        "measured": 4,
        "passed": True,
        "detail": "plain Python",
    }
    assert by_id["tiny.device"]["passed"] is None
    assert "no NeuronCore" in by_id["tiny.device"]["detail"]


def test_results_hold_no_secret_and_no_partial_file(ran):
    written = list(ran[1].iterdir())
    assert sorted(path.suffix for path in written) == [".html"] + [".ipynb"] * len(ENDS) + [".json"]
    assert all(TOKEN not in path.read_text() for path in written)
    assert "[HF_TOKEN removed]" in (ran[1] / "22_prints_secret.ipynb").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("untagged_parameters", "has 0 cells tagged 'parameters': tag exactly one"),
        ("two_parameters_cells", "has 2 cells tagged 'parameters': tag exactly one"),
        ("unknown_parameter", "has no parameter 'profile': its parameters cell assigns steps"),
        ("parameters_are_not_python", "parameters cell of .* is not Python: .* in line 1"),
        ("empty", "has 0 cells tagged 'parameters': tag exactly one"),
    ],
)
def test_a_lesson_that_papermill_would_only_warn_about_is_refused(tmp_path, name, message):
    paths = tiny_notebooks.write(tmp_path, tiny_notebooks.REFUSED)
    with pytest.raises(SettingError, match=message):
        runner.run([paths[name]], "cpu", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    path = tmp_path / "10_broken.ipynb"
    path.write_text('{"cells": [')
    with pytest.raises(SettingError, match=r"10_broken\.ipynb is not a readable notebook"):
        runner.run([path], "cpu", tmp_path / "out")


def test_existing_results_are_refused_and_survive(tmp_path):
    paths = tiny_notebooks.write(tmp_path, tiny_notebooks.LESSONS)
    out = tmp_path / "out"
    out.mkdir()
    (out / "verdict.json").write_text("earlier")
    with pytest.raises(SettingError, match=r"results already exist at .*--overwrite"):
        runner.run([paths["passes"]], "cpu", out)
    assert (out / "verdict.json").read_text() == "earlier"
    lessons = runner.run([paths["passes"]], "cpu", out, overwrite=True)
    assert runner.passed(lessons)
    assert json.loads((out / "verdict.json").read_text())["passed"] is True


def test_a_failed_setup_lesson_stops_the_run_and_old_outputs_do_not_count(ran, tmp_path):
    paths = tiny_notebooks.write(tmp_path, tiny_notebooks.LESSONS)
    setup = paths["no_verdict"].rename(tmp_path / "00_setup.ipynb")
    nbformat.write(ran[0]["passes"].notebook, paths["passes"])  # with committed outputs
    lessons = runner.run([setup, paths["passes"]], "cpu", tmp_path / "out")
    assert [lesson.status for lesson in lessons] == ["no verdict", "not run"]
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert [record["id"] for record in verdict["checks"]] == ["alone.sum"]
    assert "not run" in (tmp_path / "out" / "report.html").read_text()


def test_a_kernel_that_does_not_start_is_reported(ran, tmp_path, monkeypatch):
    paths = tiny_notebooks.write(tmp_path, tiny_notebooks.LESSONS)
    nbformat.write(ran[0]["passes"].notebook, paths["passes"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (lesson,) = runner.run([paths["passes"]], "cpu", tmp_path / "out")
    assert lesson.status == "kernel died"
    assert lesson.error.startswith("the kernel could not be run: Kernel died before replying")
    assert lesson.checks() == []


def test_select(tmp_path):
    with pytest.raises(SettingError, match=r"no lesson NN_name\.ipynb was found"):
        runner.select(tmp_path)
    tiny_notebooks.write(tmp_path, tiny_notebooks.LESSONS)
    assert [path.name for path in runner.select(tmp_path, "12, 10")] == [
        "10_passes.ipynb",
        "12_check_fails.ipynb",
    ]
    with pytest.raises(SettingError, match="--only names lesson '99', which does not exist"):
        runner.select(tmp_path, "10,99")
    (tmp_path / "10_again.ipynb").touch()
    with pytest.raises(SettingError, match="have the same number"):
        runner.select(tmp_path)


def test_no_lesson_is_no_pass():
    assert not runner.passed([])


COMMAND = """
import sys
from pathlib import Path
from qwen3_trainium import __main__, runner
runner.NOTEBOOKS = Path(sys.argv[1])
sys.exit(__main__.main(["run", "--profile", "cpu", *sys.argv[2:]]))
"""


def command(folder, *options):
    return [sys.executable, "-c", COMMAND, str(folder), "--out", "out", *options]


def test_command_exits_0_or_1_and_a_log_has_no_escape_codes(tmp_path):
    tiny_notebooks.write(tmp_path, tiny_notebooks.LESSONS)
    good = subprocess.run(
        command(tmp_path, "--only", "10"), cwd=tmp_path, capture_output=True, text=True
    )
    assert good.returncode == 0, good.stderr
    assert "\x1b" not in good.stdout
    assert "\r" not in good.stdout
    lines = good.stdout.splitlines()
    assert lines[0] == "profile cpu, 2 ranks on cpu"
    assert lines[1].startswith("a cell may take 1800 s")
    assert "  tiny.sum   expected 4   measured 4   plain Python   passed" in lines
    assert any(line.startswith("  10_passes  cell 2/9") for line in lines)
    assert "    step 1" in lines
    assert lines[-2:] == ["verdict: passed", f"report: {tmp_path / 'out' / 'report.html'}"]
    assert (tmp_path / "out" / "report.html").is_file()
    bad = subprocess.run(
        command(tmp_path, "--only", "19", "--overwrite"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert bad.returncode == 1
    assert "verdict: FAILED" in bad.stdout


def test_command_refuses_bad_settings_in_one_sentence(tmp_path, capsys):
    assert __main__.main(["run", "--profile", "nope"]) == 2
    message = capsys.readouterr().err
    assert message == "profile 'nope' is unknown: choose one of cpu, trn2\n"
    assert __main__.main(["fly"]) == 2
    assert "command 'fly' is unknown" in capsys.readouterr().err


def test_ctrl_c_ends_the_kernel_in_a_terminal(tmp_path):
    """In a terminal one status line counts the seconds; after Ctrl-C nothing runs on."""
    (tmp_path / "pid").touch()
    lesson = [
        tiny_notebooks.PARAMETERS,
        tiny_notebooks.IMPORT,
        "from IPython.display import display\n\n"
        "display({'text/plain': 'step 1 of 10'}, raw=True, display_id=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)",
        tiny_notebooks.VERDICT,
    ]
    tiny_notebooks.write(tmp_path, {"sleeps": lesson})
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(tmp_path), cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    while not (pid := (tmp_path / "pid").read_text()):
        time.sleep(0.2)
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    shown = os.read(ours, 100_000).decode()
    assert re.search("10_sleeps  cell 4/5  [2-9] s  step 1 of 10", shown)
    assert shown.rstrip().endswith("interrupted")
    assert not runs_on(int(pid))


def test_records_of_a_replaced_check_count_once():
    cells = [
        nbformat.v4.new_code_cell(
            "",
            outputs=[
                nbformat.v4.new_output(
                    "display_data", {checks.CHECK: {"id": "a.b", "passed": passed}}
                )
            ],
        )
        for passed in (False, True)
    ]
    lesson = runner.Lesson("x", nbformat.v4.new_notebook(cells=cells))
    assert lesson.checks() == [{"id": "a.b", "passed": True}]
