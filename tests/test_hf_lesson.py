"""Lesson 01's own checks: each cell is run as committed, with right values and with a fault."""

import math
import types

import nbformat
import pytest
import torch

from qwen3_trainium import checks, verify
from qwen3_trainium.profiles import ROOT

PROBLEM = "inv_freq is not finite: call qwen3_trainium.rotary.repair before training"
ALL_REFUSED = dict.fromkeys(["as released", "zeros", "other numbers", "not-a-number"], PROBLEM)


@pytest.fixture
def outcome(monkeypatch):
    """`outcome(id, **names)` runs the cell of one check and gives its (passed, detail)."""
    cells = nbformat.read(ROOT / "notebooks" / "01_hf_backend_finetune.ipynb", 4).cells
    recorded = {}

    def record(id, title, expected, measured, passed, detail=""):
        recorded[id] = (passed, detail)

    monkeypatch.setattr(checks, "check", record)

    def run(id: str, **names):
        source = [cell.source for cell in cells if f'"{id}",' in cell.source]
        assert len(source) == 1
        exec(source[0], {"checks": checks, "math": math, "verify": verify, "torch": torch, **names})
        return recorded[id]

    return run


def rope(outcome, found, loss=5.0):
    class Repaired:
        rotary_emb = types.SimpleNamespace(inv_freq=torch.ones(1))

    return outcome(
        "hf.rope.refused",
        found=found,
        losses={"torchtitan, repaired": loss},
        reference=5.0,
        repaired=Repaired(),
        rotary=types.SimpleNamespace(problem=lambda model: None),
        stock=None,
        tensors={},
    )


def test_a_release_that_fills_its_frequencies_is_told_from_a_blind_test(outcome):
    assert rope(outcome, ALL_REFUSED) == (True, PROBLEM)
    mended = {**ALL_REFUSED, "as released": None}
    assert rope(outcome, mended) == (
        None,
        "this torchtitan fills them itself: the repair may go",
    )
    assert rope(outcome, {**ALL_REFUSED, "zeros": None})[0] is False
    assert rope(outcome, dict.fromkeys(ALL_REFUSED))[0] is False


@pytest.mark.parametrize(
    ("random", "published", "passed"),
    [
        (12.9, 6.0, True),
        (12.9, 8.4, False),  # a uniform predictor is 4.5 nats better than these random weights
        (7.9, 6.0, False),
    ],
)
def test_a_uniform_predictor_does_not_pass_for_published_weights(
    outcome, monkeypatch, random, published, passed
):
    monkeypatch.setattr(verify, "heldout_loss", lambda model, batches: model)
    names = {
        "published": types.SimpleNamespace(validator=types.SimpleNamespace(steps=4)),
        "batches": types.SimpleNamespace(of_run=lambda *args, **kwargs: []),
        "settings": types.SimpleNamespace(ranks=2),
        "facts": types.SimpleNamespace(vocab=4096),
        "start": random,
        "plain": published,
    }
    assert outcome("hf.loss.gap", **names)[0] is passed


def test_a_loss_that_moves_as_the_text_does_has_not_fallen(outcome):
    settings = types.SimpleNamespace(steps=10)
    run = lambda last: types.SimpleNamespace(loss={1: 12.975, 10: last})  # noqa: E731
    assert outcome("hf.loss.falls", settings=settings, random_metrics=run(7.4))[0]
    # Measured with the weights of step 1 on the text of step 10: a learning rate of zero.
    assert not outcome("hf.loss.falls", settings=settings, random_metrics=run(12.687))[0]
    assert not outcome("hf.loss.falls", settings=settings, random_metrics=run(math.nan))[0]
