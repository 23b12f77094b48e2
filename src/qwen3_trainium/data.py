"""Real English text on every machine, with no download.

A C4-shaped folder of JSON lines (one document a line, its text under `text`), made from the
documentation that Python carries with it: the language reference in `pydoc_data.topics` and the
docstrings of standard modules. The text depends on the Python version, so the folder's name does.
"""

import json
import subprocess
import sys
from pathlib import Path

from qwen3_trainium.files import written_beside
from qwen3_trainium.profiles import ROOT

CACHE = ROOT / ".cache"
HELD_OUT_EVERY = 12  # one document in twelve is never trained on


def documents() -> list[str]:
    """Every document once, topics of the language reference first, each source sorted by name.

    Collected by an interpreter of its own, so that they depend on the Python version alone.
    """
    command = [sys.executable, "-I", "-S", Path(__file__).with_name("stdlib_text.py")]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def default_folder() -> Path:
    """Where `make` puts the text, whether or not it is there yet."""
    return CACHE / f"pydoc-py{sys.version_info.major}{sys.version_info.minor}"


def make(folder: Path | None = None) -> Path:
    """Write `train/` and `heldout/` under `folder` if they are not there yet; returns it.

    The split is by document: no held-out document shares a line of the file with a trained one.
    """
    folder = folder or default_folder()
    if folder.exists():
        return folder
    texts = documents()
    with written_beside(folder) as partial:
        for split in ("train", "heldout"):
            (partial / split).mkdir(parents=True)
            with (partial / split / f"{split}.jsonl").open("w") as lines:
                for i, text in enumerate(texts):
                    if (i % HELD_OUT_EVERY == 0) == (split == "heldout"):
                        lines.write(json.dumps({"text": text}) + "\n")
    return folder


def read(folder: Path) -> list[str]:
    """The texts of a folder of JSON lines, in file and line order."""
    return [
        json.loads(line)["text"]
        for path in sorted(folder.glob("*.json*"))
        for line in path.read_text().splitlines()
        if line.strip()
    ]
