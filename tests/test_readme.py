"""The README promises commands and files: they exist, and the Makefile does what it says."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from qwen3_trainium import __main__, profiles

ROOT = profiles.ROOT
README = (ROOT / "README.md").read_text()
FAULTS = (ROOT / "docs" / "faults.md").read_text()
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = [line.split("  #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]


def test_readme_opens_with_run_and_test():
    assert COMMANDS[:2] == ["make run", "make test"]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    "command",
    [line for line in COMMANDS if "-m qwen3_trainium" in line],
    ids=lambda line: line[27:],
)
def test_subcommands_and_their_options_exist(command):
    words = shlex.split(command)
    name, options = words[3], [word for word in words[4:] if word.startswith("--")]
    assert name in __main__.COMMANDS
    shown = subprocess.run(
        [sys.executable, "-m", "qwen3_trainium", name, "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(option in shown for option in options)


def test_files_that_the_readme_names_exist():
    names = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:yml|toml|py))`", README)
    names += re.findall(r"\]\((?!http)([^)#]+)\)", README)
    committed = [name for name in names if not name.startswith("out/")]  # made by `make run`
    assert len(committed) >= 6
    assert [name for name in committed if not (ROOT / name).exists()] == []


def test_faults_are_held_by_code_and_tests_that_exist():
    rows = re.findall(
        r"^\| .+ \| `([\w./-]+)` \| `(\w+\.py)::(\w+)` \|$",
        FAULTS,
        flags=re.MULTILINE,
    )
    assert len(rows) == FAULTS.count("::") > 50
    for code, file, test in rows:
        places = (ROOT / code, ROOT / "src" / "qwen3_trainium" / code)
        assert any(place.exists() for place in places), code
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), test


def recorder(folder, version="3.12"):
    """A `python` that writes down how it was called and answers what the Makefile asks."""
    script = folder / "python"
    script.write_text(
        "#!/bin/bash\n"
        f'echo "$*" >> {folder}/calls\n'
        f'[[ "$*" == *sys.prefix* ]] && echo {folder}\n'
        '[[ "$*" == *"pip list"* ]] && echo torch==2.14.0\n'
        "exit 0\n"
    )
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_neuron_environment_is_used_and_nothing_of_it_replaced(tmp_path):
    subprocess.run(
        ["make", "run", "NEURON=1"],
        cwd=ROOT,
        env=recorder(tmp_path),
        check=True,
        capture_output=True,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    constraints = tmp_path / ".qwen3-trainium-installed.constraints"
    assert constraints.read_text() == "torch==2.14.0\n"
    installs = [call for call in calls if "pip install" in call]
    assert installs == [f"-m pip install --constraint {constraints} -e .[notebooks,dev]"]
    assert calls[-1] == "-m qwen3_trainium run --profile trn2 --overwrite"


@pytest.mark.parametrize(
    ("variables", "profile"), [((), "cpu"), (("PROFILE=mine.yaml",), "mine.yaml")]
)
def test_make_names_the_profile(variables, profile):
    shown = subprocess.run(
        ["make", "run", "--dry-run", "NEURON=", *variables],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"-m qwen3_trainium run --profile {profile} --overwrite" in shown


def test_a_neuron_machine_without_its_environment_installs_nothing(tmp_path):
    environment = recorder(tmp_path)
    (tmp_path / "python").write_text(
        f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n'
        f'[[ "$*" == *sys.prefix* ]] && echo {tmp_path} && exit 0\nexit 1\n'
    )
    result = subprocess.run(
        ["make", "run", "NEURON=1"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "torch_neuronx or torchtitan is missing from the active environment" in result.stderr
    assert "pip" not in (tmp_path / "calls").read_text()


def test_an_old_python_is_refused_in_one_sentence(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/bash\nexit 1\n")
    old.chmod(0o755)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    result = subprocess.run(
        ["make", "run", f"PYTHON={old}", "NEURON="], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr
    assert not (tmp_path / ".venv").exists()
