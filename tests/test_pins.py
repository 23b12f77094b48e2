"""One place for versions: environment.yml and pyproject.toml repeat versions.py."""

import json
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from qwen3_trainium import checks, preflight, profiles, versions

PYPROJECT = tomllib.loads((profiles.ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((profiles.ROOT / "environment.yml").read_text())["dependencies"]
EXTRAS = PYPROJECT["optional-dependencies"]


def requirements(lines):
    parsed = [Requirement(line) for line in lines if not line.startswith("--")]
    return {requirement.name: requirement for requirement in parsed}


def test_cpu_extra_installs_the_tested_set():
    cpu = requirements(EXTRAS["cpu"])
    assert str(cpu["torch"].specifier) == f"~={versions.CPU['torch']}.0"
    assert str(cpu["torchtitan"].specifier) == f"=={versions.CPU['torchtitan']}"
    assert str(cpu["transformers"].specifier) == f"=={versions.CPU['transformers']}"


def test_environment_is_the_guides():
    conda = [line for line in ENVIRONMENT if isinstance(line, str)]
    assert f"python={versions.NEURON['python']}" in conda
    pip = requirements(ENVIRONMENT[-1]["pip"])
    assert str(pip["torch"].specifier) == f"=={versions.NEURON['torch']}"
    assert str(pip["torch-neuronx"].specifier) == f"=={versions.NEURON['torch_neuronx']}.*"
    assert str(pip["transformers"].specifier) == f"=={versions.NEURON['transformers']}"
    assert str(pip["nki"].specifier) == f"=={versions.NEURON['nki']}.*"
    compiler = preflight.SDK_ROWS[versions.NEURON["neuron_sdk"]]["compiler"]
    assert str(pip["neuronx-cc"].specifier) == f"=={compiler}.*"
    assert pip["torchtitan"].url.endswith(f"@release-{versions.NEURON['neuron_sdk']}")


def test_nki_belongs_to_the_sdk():
    assert versions.NKI_OF_SDK[versions.NEURON["neuron_sdk"]] == versions.NEURON["nki"]


def test_both_lines_share_torch_and_transformers():
    assert versions.NEURON["torch"].startswith(versions.CPU["torch"] + ".")
    assert versions.NEURON["transformers"] == versions.CPU["transformers"]


@pytest.mark.parametrize("extra", ["core", *EXTRAS])
def test_every_requirement_has_an_upper_bound(extra):
    for requirement in requirements(EXTRAS.get(extra, PYPROJECT["dependencies"])).values():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {"<", "==", "~="}, requirement
        assert ".dev" not in str(requirement)


def test_only_the_guides_branch_is_unhashed():
    """A branch moves. The one in environment.yml is the guide's, and says beside it what to do.

    No commit of it is known to us; what was installed is shown and recorded, as the next test says.
    """
    files = ("environment.yml", "pyproject.toml", "Makefile", "README.md")
    text = "\n".join((profiles.ROOT / name).read_text() for name in files)
    sources = re.findall(r"git\+https://\S+", text)
    assert sources == ["git+https://github.com/aws-neuron/torchtitan-neuron@release-2.33"]


@pytest.mark.parametrize(
    ("recorded", "commit"),
    [
        ({"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "0a" * 20}}, "0a" * 20),
        ({"url": "file:///x", "dir_info": {"editable": True}}, None),
        (None, None),  # from an index
    ],
)
def test_the_installed_commit_is_recorded(tmp_path, monkeypatch, recorded, commit):
    folder = tmp_path / "torchtitan-0.2.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    if recorded:
        (folder / "direct_url.json").write_text(json.dumps(recorded))
    monkeypatch.syspath_prepend(tmp_path)
    found = versions.installed("torchtitan")
    assert found["torchtitan"] == "0.2.2"
    assert found.get("torchtitan_commit") == commit
    assert checks.environment_facts(profiles.load("cpu"))["versions"].items() >= found.items()


def test_nothing_of_torch_comes_with_the_neuron_install():
    """`make run` on a Neuron machine installs the core and `notebooks`: neither names the stack."""
    named = {*requirements(PYPROJECT["dependencies"]), *requirements(EXTRAS["notebooks"])}
    assert not named & {"torch", "torchtitan", "transformers", "torch-neuronx", "nki", "accelerate"}
