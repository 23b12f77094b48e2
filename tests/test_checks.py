"""The recorder: what it accepts, what it refuses, and that NaN never passes."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

from qwen3_trainium import checks, profiles
from qwen3_trainium.errors import SettingError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(checks, "_records", {})


def record(**changes):
    call = {"id": "a.b", "title": "T", "expected": 1, "measured": 1, "passed": True} | changes
    checks.check(**call)
    return checks._records[call["id"]]


def test_a_record_and_its_line(capsys):
    checks.check("rope.max_abs_diff", "Rope", 0.0, 0.0, True, "float32, simulator")
    assert checks._records["rope.max_abs_diff"] == {
        "id": "rope.max_abs_diff",
        "title": "Rope",
        "expected": 0.0,
        "measured": 0.0,
        "passed": True,
        "detail": "float32, simulator",
    }
    assert capsys.readouterr().out == (
        "rope.max_abs_diff   expected 0.0   measured 0.0   float32, simulator   passed\n"
    )


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.Size([2, 3]), [2, 3]),
        ({"a": np.float64(2.0)}, {"a": 2.0}),
        (None, None),
        ("text", "text"),
    ],
)
def test_values_become_json(value, plain):
    kept = record(measured=value)
    assert kept["measured"] == plain
    assert json.loads(json.dumps(kept)) == kept
    assert kept["passed"] is True


@pytest.mark.parametrize(
    "value",
    [float("nan"), np.float32("inf"), torch.tensor(float("-inf")), [1.0, float("nan")]],
    ids=str,
)
@pytest.mark.parametrize("side", ["expected", "measured"])
def test_what_is_not_finite_never_passes(value, side):
    kept = record(**{side: value})
    assert kept["passed"] is False
    assert kept["detail"] == "not finite"
    json.loads(json.dumps(kept, allow_nan=False))


@pytest.mark.parametrize("passed", [1, "yes", None, np.array([True, True]), torch.tensor(True)])
def test_passed_must_be_a_bool(passed):
    with pytest.raises(SettingError, match="passed must be a bool"):
        record(passed=passed)


def test_a_numpy_bool_is_a_bool():
    assert record(passed=np.bool_(True))["passed"] is True
    assert record(passed=np.float64(1.0) < 0.5)["passed"] is False


@pytest.mark.parametrize("id", ["loss", "Hf.loss", "hf..loss", "hf.loss ", "hf/loss", ""])
def test_ids_are_dotted(id):
    with pytest.raises(SettingError, match="is not dotted lower case"):
        record(id=id)


def test_a_value_that_json_cannot_hold_is_refused():
    with pytest.raises(SettingError, match="found PosixPath"):
        record(measured=profiles.ROOT)


def test_the_same_id_replaces():
    record(passed=False)
    record(passed=True)
    checks.verdict()


def test_verdict_names_what_failed():
    record()
    record(id="c.d", passed=False)
    record(id="e.f", passed=False)
    with pytest.raises(checks.CheckFailed, match=r"^2 of 3 checks failed: c\.d, e\.f$"):
        checks.verdict()


def test_nothing_evaluated_is_a_failure():
    with pytest.raises(checks.CheckFailed, match="no check was evaluated"):
        checks.verdict()
    checks.skip("a.b", "T", "no device")
    assert checks._records["a.b"]["passed"] is None
    with pytest.raises(checks.CheckFailed, match="no check was evaluated"):
        checks.verdict()


def test_verdict_table_escapes_and_says_each_state_in_words():
    record(title="<b>bold</b>", measured="<script>")
    record(id="c.d", passed=False)
    checks.skip("e.f", "T", "no <device>")
    table = checks.verdict_html(list(checks._records.values()))
    assert "<b>bold" not in table
    assert "<script>" not in table
    assert all(word in table for word in ("✓ passed", "✗ FAILED", "– skipped", "no &lt;device&gt;"))
    assert table.endswith("<p>1 passed, 1 FAILED, 1 skipped</p>")


def test_in_a_notebook_the_record_is_displayed(monkeypatch):
    shown = []
    monkeypatch.setattr(checks, "get_ipython", lambda: "a kernel")
    monkeypatch.setattr(checks, "display", lambda bundle, raw: shown.append(bundle))
    kept = record()
    checks.verdict()
    assert shown[0][checks.CHECK] == kept
    assert shown[0]["text/plain"] == "a.b   expected 1   measured 1   passed"
    assert shown[1][checks.VERDICT] == {"ids": ["a.b"]}
    assert "<table" in shown[1]["text/html"]


def test_environment_names_versions_and_no_host(capsys):
    facts = checks.environment_facts(profiles.load("cpu"))
    assert facts["versions"]["torch"].startswith("2.14")
    assert list(facts["machine"]) == [
        "profile",
        "device",
        "ranks",
        "cpus",
        "memory_gib",
        "platform",
    ]
    checks.environment(profiles.load("cpu"))
    assert "torchtitan 0.3.0" in capsys.readouterr().out
