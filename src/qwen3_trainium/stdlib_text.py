"""Prints the documentation that Python carries with it, as a JSON list of texts.

    python -I -S src/qwen3_trainium/stdlib_text.py

Imports nothing but the standard library, and is run as above: pytest, Jupyter and others replace
functions of `builtins`, `logging` or `inspect`, and the text would be another one beside them.
"""

import importlib
import inspect
import json
import re
import sys
import warnings

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


if __name__ == "__main__":
    json.dump(documents(), sys.stdout)
