"""The recorder that lessons call: named values that a machine can read out of an executed notebook.

Each call *displays* its result. The text is for the reader; beside it, in the same output, stands
the record itself under a MIME type of ours, and `runner` collects the records from there. Nothing
else is written, so a notebook and its checks cannot disagree.

    checks.environment(profile)                                          # near the top of a lesson
    checks.check("hf.loss.random", "Loss before training", 8.8, loss, abs(loss - 8.8) < 0.1)
    checks.skip("hf.loss.neuron", "Loss on the device", "no NeuronCore in this machine")
    checks.verdict()                                                     # the lesson's last cell
"""

import html
import importlib.metadata
import math
import os
import platform
import re

import numpy as np
from IPython import get_ipython
from IPython.display import display

from qwen3_trainium import versions
from qwen3_trainium.errors import SettingError

CHECK = "application/vnd.qwen3-trainium.check+json"
VERDICT = "application/vnd.qwen3-trainium.verdict+json"
ENVIRONMENT = "application/vnd.qwen3-trainium.environment+json"

# The checks of this kernel, by id, in the order of their first recording.
_records: dict[str, dict] = {}


class CheckFailed(AssertionError):  # noqa: N818, readers see this name: it says what happened
    """A lesson's checks did not all pass; the message is one sentence that names those."""

    def _render_traceback_(self):
        # IPython asks for this: the sentence says all there is; our stack would only hide it.
        return [f"CheckFailed: {self}"]


def check(id: str, title: str, expected, measured, passed: bool, detail: str = "") -> None:
    """Record and display one check. The same id again replaces the earlier record.

    expected, measured   numbers, strings, or lists and dicts of them; 0-d tensors are numbers too
    passed               a bool; a NaN or an infinity on either side makes it False
    detail               shape, dtype, bound and *what really ran*: device, simulator or reference
    """
    if not isinstance(passed, (bool, np.bool_)):
        raise SettingError(
            f"check {id}: passed must be a bool, found {passed!r}: compare the values first"
        )
    expected, measured = _plain(expected), _plain(measured)
    if passed and not (_finite(expected) and _finite(measured)):
        passed, detail = False, f"{detail}; not finite".lstrip("; ")
    _record(id, title, expected, measured, bool(passed), detail)


def skip(id: str, title: str, reason: str) -> None:
    """Record and display a check that could not run here. It never counts as passed."""
    _record(id, title, None, None, None, f"skipped: {reason}")


def verdict() -> None:
    """Display all checks of this kernel; raise CheckFailed if one failed or none was evaluated."""
    records = list(_records.values())
    _display(verdict_text(records), VERDICT, {"ids": list(_records)}, verdict_html(records))
    if failed := [record["id"] for record in records if record["passed"] is False]:
        raise CheckFailed(f"{len(failed)} of {len(records)} checks failed: {', '.join(failed)}")
    if not any(record["passed"] for record in records):
        raise CheckFailed("no check was evaluated")


def environment(profile) -> None:
    """Display and record the versions and the machine on which this kernel's checks are made."""
    facts = environment_facts(profile)
    lines = [
        "   ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "   ".join(f"{name} {value}" for name, value in facts["machine"].items()),
    ]
    _display("\n".join(lines), ENVIRONMENT, facts)


def environment_facts(profile) -> dict:
    """Versions and machine facts that may be published: no host name, no path, no time of day."""
    found = versions.installed(
        *("torch", "torchtitan", "transformers", "safetensors", "torch_neuronx", "nki")
    )
    # The simulator comes in this project's own package and has no version but the project's.
    found["nki_sim"] = importlib.metadata.version("qwen3-trainium")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "profile": profile.profile,
        "device": profile.device,
        "ranks": profile.ranks,
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return {"versions": found, "machine": machine}


def state(record: dict) -> str:
    return {True: "passed", False: "FAILED", None: "skipped"}[record["passed"]]


def line(record: dict) -> str:
    """One check as one line of text, the form in which notebooks and terminals show it."""
    parts = [record["id"]]
    if record["passed"] is not None:
        parts += [f"expected {show(record['expected'])}", f"measured {show(record['measured'])}"]
    if record["detail"]:
        parts.append(record["detail"])
    return "   ".join([*parts, state(record)])


def show(value) -> str:
    """A value as readers see it: floats to six significant digits, the record keeps them all."""
    if isinstance(value, float):
        # "0.0" says a float was compared exactly; "{:g}" would make an integer of it.
        return str(value) if value == round(value, 6) else f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return str(value)


def summary(records: list[dict]) -> str:
    states = [state(record) for record in records]
    counts = [f"{states.count(name)} {name}" for name in ("passed", "FAILED", "skipped")]
    return ", ".join(count for count in counts if not count.startswith("0 ")) or "no checks"


def verdict_text(records: list[dict]) -> str:
    return "\n".join([*(line(record) for record in records), f"verdict: {summary(records)}"])


# Blue, vermilion and grey differ for every kind of colour vision, and each state is also a word
# with a sign of its own, so the table can be read in black and white.
_BADGES = {
    "passed": ("✓ passed", "#0060a0"),
    "FAILED": ("✗ FAILED", "#b84300"),
    "skipped": ("– skipped", "#5c5c5c"),
}


def badge(state: str, word: str = "") -> str:
    text, colour = _BADGES[state]
    style = (
        f"background:{colour};color:#fff;padding:2px 8px;border-radius:4px;"
        "white-space:nowrap;font-weight:600"
    )
    return f'<span style="{style}">{html.escape(word or text)}</span>'


def verdict_html(records: list[dict]) -> str:
    """The table of a lesson's checks. Styles are inline because a notebook has no style sheet."""
    cell = 'style="text-align:left;vertical-align:top;padding:6px 12px;overflow-wrap:break-word"'
    # A value may be one long word, such as a list of keys; a heading must not be cut at all.
    code = cell.replace("overflow-wrap:break-word", "overflow-wrap:anywhere;font-family:monospace")
    name = cell.replace("overflow-wrap:break-word", "white-space:nowrap")
    head = "".join(
        f"<th {name}>{text}</th>" for text in ("check", "expected", "measured", "detail", "result")
    )
    rows = []
    for record in records:
        title, id, detail = (html.escape(record[key]) for key in ("title", "id", "detail"))
        skipped = record["passed"] is None
        values = [
            "–" if skipped else html.escape(show(record[key])) for key in ("expected", "measured")
        ]
        rows.append(
            f"<tr><td {cell}>{title}<br><code>{id}</code></td>"
            f"<td {code}>{values[0]}</td><td {code}>{values[1]}</td>"
            f"<td {cell}>{detail}</td><td {cell}>{badge(state(record))}</td></tr>"
        )
    return (
        '<table class="verdict" style="border-collapse:collapse;font-size:14px;line-height:1.5">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<p>{summary(records)}</p>"
    )


def _record(id, title, expected, measured, passed, detail):
    if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", id):
        raise SettingError(
            f"check id {id!r} is not dotted lower case: use one such as 'hf.loss.random'"
        )
    record = {
        "id": id,
        "title": str(title),
        "expected": expected,
        "measured": measured,
        "passed": passed,
        "detail": str(detail),
    }
    _records[id] = record
    _display(line(record), CHECK, record)


def _display(text, mime, record, html_text=None):
    if get_ipython() is None:  # a script: there is no output cell that could hold the record
        print(text)
        return
    bundle = {"text/plain": text, mime: record}
    if html_text:
        bundle["text/html"] = html_text
    display(bundle, raw=True)


def _plain(value):
    """The value as JSON can hold it: scalars and arrays of NumPy and torch as Python's own."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic) and type(value).__module__.startswith("ml_dtypes"):
        return _plain(float(value))  # bfloat16 and its kin have no Python type of their own
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise SettingError(
        f"a check's value must be a number, a string, or a list or dict of them, "
        f"found {type(value).__name__}: convert it first"
    )


def _finite(value) -> bool:
    if isinstance(value, list):
        return all(_finite(item) for item in value)
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    return value not in ("nan", "inf", "-inf")
