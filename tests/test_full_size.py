"""The reported loss: its formula, and the guard before eight gigabytes are asked for."""

import pytest
import torch

from qwen3_trainium import full_size
from qwen3_trainium.errors import SettingError


def test_the_formula_gives_both_reported_figures():
    assert full_size.closed_form(151_936, 2560) == pytest.approx(12.44, abs=0.005)
    # The Transformers backend draws its head with 1/√d.
    assert full_size.closed_form(151_936, 2560, 2560**-0.5) == pytest.approx(12.43, abs=0.005)


def test_the_formula_is_the_mean_loss_of_such_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 20_000, generator=generator)
    mean = (logits.logsumexp(-1) - logits.mean(-1)).mean().item()
    # ln Σ exp over V such logits has a standard error of √((e−1)/V), 0.009; here a mean of 64.
    assert mean == pytest.approx(full_size.closed_form(20_000, 1, 1.0), abs=0.01)


def test_too_little_memory_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(full_size, "available_gib", lambda: 8.0)
    with pytest.raises(SettingError, match=r"needs 12 GiB of memory, but 8\.0 GiB are available"):
        full_size.first_loss()
