"""A lesson's own process loads no device; its ranks do where their profile names one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from qwen3_trainium import cpu, launch, profiles

# A fake: what `import torch` would load of torch_neuronx. It writes down that it was loaded.
FAKE_BACKEND = """
import json
import os
import re
def load():
    with open(os.environ["FAKE_BACKEND_LOADS"], "a") as log:
        log.write("loaded\\n")
"""
ENTRY_POINTS = "[torch.backends]\nfake_neuron = fake_neuron_backend:load\n"
METADATA = "Metadata-Version: 2.1\nName: fake-neuron-backend\nVersion: 1.0\n"
LESSON = """
import sys
from qwen3_trainium import launch, lesson, profiles
lesson.begin("trn2")
launch.build_config("hf_finetune", "random", profiles.load(sys.argv[1]))
assert "torchtitan" in sys.modules
"""


@pytest.fixture
def loads(tmp_path, monkeypatch):
    """The file that counts loads of a fake backend, which every process from here on finds."""
    site = tmp_path / "site"
    info = site / "fake_neuron_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fake_neuron_backend.py").write_text(FAKE_BACKEND)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text(METADATA)
    for name in cpu.NO_ACCELERATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FAKE_BACKEND_LOADS", str(tmp_path / "loads"))
    return tmp_path / "loads"


def run(program: str, *arguments: str, env: dict | None = None) -> None:
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=env)


def count(loads: Path) -> int:
    return len(loads.read_text().splitlines()) if loads.exists() else 0


def test_device_is_loaded_by_ranks_alone(loads, toy_profile, tmp_path):
    profile = profiles.load("trn2", model=toy_profile.model, dataset=toy_profile.dataset)
    profiles.save(profile, tmp_path / "trn2.yaml")
    run(LESSON, str(tmp_path / "trn2.yaml"))
    assert count(loads) == 0
    # As from a lesson, which hides devices from itself.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu.NO_ACCELERATOR.items():
            patch.setenv(name, value)
        of_neuron = launch.environment(profile, tmp_path)
        of_cpu = launch.environment(toy_profile, tmp_path)
    assert of_cpu.items() >= cpu.NO_ACCELERATOR.items()
    run("import torch", env=of_neuron)
    assert count(loads) == 1
    assert "CUDA_VISIBLE_DEVICES" not in of_neuron


def test_devices_that_a_user_chose_are_kept():
    chosen = {"CUDA_VISIBLE_DEVICES": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    assert cpu.with_accelerators({**os.environ, **chosen}).items() >= chosen.items()


def test_preparing_again_changes_nothing():
    cpu.prepare()
    before = FSDPModule.set_gradient_divide_factor
    cpu.prepare()
    assert FSDPModule.set_gradient_divide_factor is before


@pytest.mark.parametrize(
    "lesson", sorted((profiles.ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_lessons_begin_before_they_import_torch(lesson):
    """Hiding a device comes too late once torch is imported, by whichever of our modules."""
    imported = []
    for cell in json.loads(lesson.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            imported += re.findall(r"^(?:from|import) .*", source, re.MULTILINE)
        if "lesson.begin(" in source and cell["cell_type"] == "code":
            break
    assert imported == ["from qwen3_trainium import lesson"]
