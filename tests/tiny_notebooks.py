"""One tiny lesson for each way in which a lesson can end, named for what must happen.

`write` puts them into a folder under the names that the runner's own selection finds; the order
of this table makes the numbers, which carry no meaning.
"""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PARAMETERS = ("parameters", 'profile = "cpu"  # "cpu" or "trn2"')
IMPORT = """import os
import signal
import sys
import time

from qwen3_trainium import checks, profiles"""
VERDICT = "checks.verdict()"


def two_and_two(id):
    return f'checks.check("{id}", "Two and two", 4, 2 + 2, 2 + 2 == 4, "plain Python")'


LESSONS = {
    "passes": [
        "# A lesson that passes\nA uniform guess has the loss $\\ln V$:\n\n$$L = \\ln 4096$$\n\n"
        "![a picture from elsewhere](https://example.org/x.png)",
        PARAMETERS,
        IMPORT,
        "checks.environment(profiles.load(profile))",
        "from IPython.display import display\n\n"
        "line = display({'text/plain': 'step 1'}, raw=True, display_id=True)\n"
        "line.update({'text/plain': 'step 2'}, raw=True)",
        "print('profile is', profile)\nprint('offline is', os.environ.get('HF_HUB_OFFLINE'))\n"
        "print('interpreter is', sys.executable)",
        two_and_two("tiny.sum"),
        'checks.skip("tiny.device", "The same on the device", "no NeuronCore in this machine")',
        VERDICT,
    ],
    "shows_intended_exception": [
        PARAMETERS,
        IMPORT,
        ("raises-exception", "1 / 0"),
        two_and_two("intended.sum"),
        VERDICT,
    ],
    "check_fails": [
        PARAMETERS,
        IMPORT,
        'checks.check("wrong.sum", "Two and two", 5, 2 + 2, 2 + 2 == 5)',
        VERDICT,
    ],
    "check_fails_after_verdict": [
        PARAMETERS,
        IMPORT,
        two_and_two("late.sum"),
        VERDICT,
        'checks.check("late.wrong", "Too late", 5, 4, False)',
    ],
    "cell_raises": [
        PARAMETERS,
        IMPORT,
        two_and_two("raises.sum"),
        "def train():\n    raise ValueError('seq_len 200 is not a multiple of 256')\n\ntrain()",
        VERDICT,
    ],
    "kernel_dies": [
        PARAMETERS,
        IMPORT,
        "import subprocess\n\nprint(subprocess.Popen(['sleep', '1000']).pid)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        VERDICT,
    ],
    "hangs_until_timeout": [PARAMETERS, IMPORT, "time.sleep(3600)", VERDICT],
    "exits_zero_early": [PARAMETERS, IMPORT, two_and_two("early.sum"), "sys.exit(0)", VERDICT],
    "no_verdict": [PARAMETERS, IMPORT, two_and_two("alone.sum")],
    "no_checks": [PARAMETERS, IMPORT, VERDICT],
    "only_skips": [PARAMETERS, IMPORT, 'checks.skip("no.core", "Device", "no device")', VERDICT],
    "repeats_id": [PARAMETERS, IMPORT, two_and_two("tiny.sum"), VERDICT],
    "prints_secret": [
        PARAMETERS,
        IMPORT,
        "print('token:', os.environ['HF_TOKEN'])",
        two_and_two("secret.sum"),
        VERDICT,
    ],
}

# Refused before anything runs.
REFUSED = {
    "untagged_parameters": [PARAMETERS[1], IMPORT, two_and_two("untagged.sum"), VERDICT],
    "two_parameters_cells": [PARAMETERS, PARAMETERS, IMPORT, VERDICT],
    "unknown_parameter": [("parameters", "steps = 10"), IMPORT, two_and_two("a.sum"), VERDICT],
    "parameters_are_not_python": [("parameters", "profile = = 3"), VERDICT],
    "empty": [],
}


def notebook(sources):
    cells = []
    for number, source in enumerate(sources):
        tag, text = source if isinstance(source, tuple) else (None, source)
        cell = new_markdown_cell(text) if text.startswith("# ") else new_code_cell(text)
        cell.id = f"cell-{number}"
        cell.metadata = {"tags": [tag]} if tag else {}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def write(folder, table):
    """Write a table's notebooks into the folder; returns their paths by name."""
    paths = {}
    for number, (name, sources) in enumerate(table.items(), start=10):
        paths[name] = folder / f"{number}_{name}.ipynb"
        nbformat.write(notebook(sources), paths[name])
    return paths
