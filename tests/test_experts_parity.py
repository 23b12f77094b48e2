"""The check that a compiled expert kernel must pass, failed here by kernels that are wrong."""

import json
import subprocess
import types

import pytest
import torch

from qwen3_trainium import experts_parity, kernel_backend, rope_parity

CASES = tuple(
    case for case in experts_parity.DEVICE_CASES if case.name == "several tiles and a rest"
)


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


def test_the_kernels_are_within_their_bounds(capsys):
    assert experts_parity.main("cpu", CASES) == ""
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2  # float32 and bfloat16
    assert all(0 < row[name] <= 1 for row in rows for name in ("y", "dx", "dw1", "dw2", "dw3"))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_kernel_that_does_nothing_is_seen(value, monkeypatch, capsys):
    """One that leaves its outputs as they were: zeros, or whatever memory held."""

    def no_op(kernel, *arguments, reference, **constants):
        return [torch.full_like(right, value) for right in reference(*arguments, **constants)]

    monkeypatch.setattr(kernel_backend, "run", no_op)
    assert "outside the bound" in experts_parity.main("cpu", CASES[:1])
    assert json.loads(capsys.readouterr().out)["y"] > 1


def test_a_path_that_is_not_the_device_is_seen(monkeypatch):
    monkeypatch.setattr(experts_parity, "table", lambda device, cases: iter([]))
    for ran, said in (
        ({}, "but on nothing"),
        ({"grouped_experts_kernel": "reference"}, "but on reference"),
        ({"grouped_experts_kernel": "neuron"}, ""),
    ):
        monkeypatch.setattr(kernel_backend, "ran", lambda ran=ran: ran)
        assert experts_parity.main("neuron").endswith(said)


def test_it_runs_in_a_process_of_its_own(monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return types.SimpleNamespace(returncode=1, stdout='{"case": "x", "y": 2}', stderr="x: bad")

    monkeypatch.setattr(subprocess, "run", run)
    rows, fault = rope_parity.in_a_process("neuron", "experts_parity")
    assert commands[0][1:] == ["-m", "qwen3_trainium.experts_parity", "neuron"]
    assert (rows, fault) == ([{"case": "x", "y": 2}], "x: bad")
