"""Real English text on every machine, with no download.

A C4-shaped folder of JSON lines (one document a line, its text under `text`), made from the
documentation that Python carries with it: the language reference in `pydoc_data.topics` and the
docstrings of standard modules. The text depends on the Python version, so the folder's name does.
"""

import importlib
import inspect
import json
import re
import sys
import warnings
from pathlib import Path

from qwen3_trainium.files import written_beside
from qwen3_trainium.profiles import ROOT

CACHE = ROOT / ".cache"
HELD_OUT_EVERY = 12  # one document in twelve is never trained on
SHORTEST = 200  # characters: shorter docstrings are signatures, not prose
# Tools that open windows or browsers, run code or print on import, and the test suite itself.
NOT_IMPORTED = re.compile(
    r"^(_|test|idlelib|turtledemo|lib2to3|antigravity|this|tkinter|turtle|msilib|curses|distutils)"
)


def _module_docstrings() -> list[str]:
    """Docstrings of the standard library's modules, classes and functions, in a fixed order."""
    found = []
    for name in sorted(sys.stdlib_module_names):
        if NOT_IMPORTED.match(name):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # a module of another operating system
            continue
        parts = [inspect.getdoc(module) or ""]
        for member_name, member in sorted(vars(module).items()):
            if member_name.startswith("_") or getattr(member, "__module__", None) != name:
                continue
            parts.append(inspect.getdoc(member) or "")
            if inspect.isclass(member):
                parts += [
                    inspect.getdoc(method) or ""
                    for method_name, method in sorted(vars(member).items())
                    if inspect.isroutine(method) and not method_name.startswith("_")
                ]
        found.append("\n\n".join(part for part in parts if part))
    return found


def documents() -> list[str]:
    """Every document once, topics of the language reference first, each source sorted by name."""
    topics = importlib.import_module("pydoc_data.topics").topics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules are still documented ones
        texts = [topics[name].strip() for name in sorted(topics)] + _module_docstrings()
    return [text for text in dict.fromkeys(texts) if len(text) >= SHORTEST]


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
