"""What a caller sees: jit, kernel[lnc], arguments and results, install, the command line."""

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

import nki_sim
from nki_sim import KernelError, simulate
from nki_sim.install import real_nki
from nki_sim.machine import current_core
from qwen3_trainium.versions import NEURON

SOURCE = Path(nki_sim.__file__).resolve().parents[1]


@nki.jit
def double(x, times=2.0):
    """A kernel with a docstring."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=times)
    nl.store(out, t)
    return out


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "float8_e5m2"]
)
def test_torch_in_torch_out(dtype):
    x = torch.ones(4, 6).to(getattr(torch, dtype))
    y = double(x)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    assert (y.float() == 2).all()


def test_numpy_in_numpy_out():
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int32):
        y = double(np.ones((4, 6), dtype), times=3.0)
        assert isinstance(y, np.ndarray)
        assert y.dtype == dtype
        assert (y.astype(float) == 3).all()


def test_ways_to_call():
    x = np.ones((4, 6), np.float32)
    for kernel in (double, double[1], simulate(double), simulate(double.fn), nki.simulate(double)):
        assert (kernel(x) == 2).all()
    assert double.__doc__ == "A kernel with a docstring."
    assert double.with_schedule([]) is double
    with pytest.raises(ValueError, match="1 or 2 cores"):
        double[3]
    with pytest.raises(ValueError, match=r"version '0\.2' is unknown"):
        simulate(double, version="0.2")
    with pytest.raises(TypeError, match="platform_target was removed"):
        nki.jit(platform_target="trn2")


def test_the_same_array_given_twice_is_one_tensor():
    def kernel(a, b):
        assert a is b
        return ()

    x = np.ones((2, 2), np.float32)
    assert simulate(kernel)(x, x) == ()


def test_arguments_that_nki_refuses():
    with pytest.raises(TypeError, match="NKI has no dtype float64"):
        double(np.ones((2, 2)))
    with pytest.raises(TypeError, match="NKI has no dtype int64"):
        double(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="argument x is a list"):
        double([np.ones((2, 2), np.float32)])
    with pytest.raises(TypeError, match="CPU tensors"):
        double(torch.empty(2, 2, device="meta"))


def test_a_kernel_is_not_called_from_a_kernel():
    def outer(x):
        return double(x)

    with pytest.raises(KernelError, match="marks the entry only"):
        simulate(outer)(np.ones((2, 2), np.float32))


def test_outside_a_kernel_there_is_no_core():
    with pytest.raises(KernelError, match="no kernel is running"):
        nl.ndarray((2, 2), nl.float32)


def test_results_may_be_views_and_tuples():
    def kernel(x):
        out = nl.ndarray((4, 6), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x)
        return out, out[1:3, 0:2], 7

    x = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    whole, part, number = simulate(kernel)(x)
    assert torch.equal(whole, x)
    assert torch.equal(part, x[1:3, 0:2])
    assert number == 7


def test_launch_matches_the_runtimes_logical_core(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    x = np.ones((2, 2), np.float32)
    with pytest.raises(KernelError, match="on 1 cores, but NEURON_LOGICAL_NC_CONFIG is 2"):
        double(x)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (double(x) == 2).all()


def test_the_default_is_the_nki_of_the_sdk_that_the_lessons_are_for(monkeypatch):
    def version():
        return current_core().version

    monkeypatch.delenv("NKI_SIM_VERSION", raising=False)
    assert simulate(version)() == nki.jit(version)() == NEURON["nki"]
    assert nki.__version__.startswith(NEURON["nki"])
    assert inspect.signature(nki_sim.lint).parameters["version"].default == NEURON["nki"]
    monkeypatch.setenv("NKI_SIM_VERSION", "0.4")
    assert simulate(version)() == "0.4"
    assert simulate(version, version="0.5")() == "0.5"


def test_the_simulator_models_trn2():
    def kernel():
        return nisa.get_nc_version()

    assert simulate(kernel)() is nisa.nc_version.gen3


# ------------------------------------------------------------------ install
def run(*command, cwd):
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(SOURCE)},
    )  # fmt: skip


SCRIPT = """
import sys
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl
from nki.typing import tensor

@nki.jit
def copy(x: tensor[4, 6]):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out

x = np.ones((4, 6), np.float32)
assert (copy(x) == x).all()
print("copied", sys.argv[1:], __name__)
"""


def test_command_line_runs_a_plain_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run("-m", "nki_sim", "script.py", "a", "--b", cwd=tmp_path)
    assert result.stdout == "copied ['a', '--b'] __main__\n", result.stderr
    assert run("-m", "nki_sim", cwd=tmp_path).returncode != 0


def make_package(folder, version, with_isa):
    (folder / "nki").mkdir()
    (folder / "nki" / "__init__.py").write_text("MINE = True\n")
    if with_isa:
        (folder / "nki" / "isa.py").write_text("")
    info = folder / f"nki-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nki\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "with_isa", "steps_aside"),
    [("0.0.1", False, False), ("0.2.0", True, False), ("0.3.0", True, True), ("1.0", True, True),
     ("0.6.0+g123", True, True), ("0.6.0", False, False)],
)  # fmt: skip
def test_install_steps_aside_for_a_real_nki_only(tmp_path, version, with_isa, steps_aside):
    make_package(tmp_path, version, with_isa)
    code = "import nki_sim; print(nki_sim.install()); import nki; print(hasattr(nki, 'MINE'))"
    result = run("-c", code, cwd=tmp_path)
    assert result.stdout.split() == [str(not steps_aside), str(steps_aside)], result.stderr


def test_install_twice_and_without_any_nki(tmp_path):
    code = (
        "import nki_sim; nki_sim.install(); import nki; nki_sim.install(); import nki as again\n"
        "import nki.isa, nki.language; print(nki is again, nki.jit is nki_sim.jit)"
    )
    assert run("-c", code, cwd=tmp_path).stdout.split() == ["True", "True"]
    if "nki" not in {d.metadata["Name"] for d in importlib.metadata.distributions()}:
        assert not real_nki()


def test_nothing_but_numpy_and_ml_dtypes_is_imported(tmp_path):
    code = (
        "import sys, nki_sim; nki_sim.install(); import nki.isa\n"
        "names = {m.split('.')[0] for m in sys.modules}\n"
        "print(names & {'qwen3_trainium', 'torch', 'matplotlib', 'pandas', 'scipy', 'hypothesis'})"
    )
    assert run("-c", code, cwd=tmp_path).stdout.strip() == "set()"


def test_a_torch_tensor_stays_resizable():
    """FSDP frees gathered parameters by resizing their storage, which numpy would forbid."""
    x = torch.ones(4, 8)
    simulate(lambda a: nl.store(nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.hbm), nl.load(a)))(x)
    x.untyped_storage().resize_(0)
