"""The canonical form of committed notebooks: a difference in git is one of text, code or result.

    python -m qwen3_trainium.notebook_format --check notebooks
    python -m qwen3_trainium.notebook_format --fix notebooks
    python -m qwen3_trainium.notebook_format --save out/cpu notebooks   # outputs of `run` into them

`--fix` settles what has one right form, also in outputs: no address of an object, and the ids in
pandas' tables are counted, not random. The rest is for the author: outputs must come from one
complete run, show no path, time of day, progress bar or token, and no command or import that is
known to go wrong. Measured seconds and tokens a second stay, in lessons whose subject is time: they
differ from run to run, and so do the versions and the machine that a lesson begins with.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from qwen3_trainium import source_rules
from qwen3_trainium.errors import SettingError
from qwen3_trainium.progress import ANSI

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# The random part of the ids in a table that pandas styled, and the address in its other form.
STYLED = re.compile(r"\bT_([0-9a-f]{5})(?=_|\b)")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+>")
# What a committed notebook must not show, and what its author can do about it.
UNWANTED = {
    r"(?<![\w.:/-])/(home|root|tmp|work|Users|var/folders)/": "an absolute path: print it relative",
    r"\b\d{1,2}:\d{2}:\d{2}\b": "a time of day: leave it out, or print seconds",
    r"\d+%\||\bit/s\b|\bs/it\b|\r": "a progress bar: switch it off or clear the output",
    r"\x1b": "an escape code of a terminal: print plain text",
    r"\b0x[0-9a-f]{6,}": "an address of one process: show the value",
    r"\bhf_[A-Za-z0-9]{20,}": "what looks like a Hugging Face token: revoke it and remove it",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwen3_trainium.notebook_format")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="FOLDER")
    action.add_argument("--fix", type=Path, metavar="FOLDER")
    action.add_argument("--save", type=Path, metavar="FOLDER", nargs=2)
    args = parser.parse_args(argv)
    if args.save:
        executed, folder = args.save
        for path in find(folder):
            save_outputs(executed / path.name, path)
    folder = args.check or args.fix or args.save[1]
    wrong = 0
    for path in find(folder):
        text = path.read_text(encoding="utf-8")
        # Unlike nbformat.reads, it mends nothing silently.
        right = canonical(nbformat.v4.reads(text))
        if args.fix and text != right:
            path.write_text(right, encoding="utf-8")
            print(f"{path}: rewritten")
        elif text != right:
            wrong += 1
            print(f"{path}: not in canonical form: run notebook_format --fix {folder}")
        for fault in faults(nbformat.v4.reads(right)):
            wrong += 1
            print(f"{path}: {fault}")
    return 1 if wrong else 0


def find(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise SettingError(f"no notebook was found in {folder}: name the folder of the lessons")
    return paths


def canonical(notebook: NotebookNode) -> str:
    """The one right text: fixed metadata, short unique ids, sorted keys, a newline at the end."""
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    ids = [cell.get("id") for cell in notebook.cells]
    for number, cell in enumerate(notebook.cells):
        if not cell.get("id") or ids.count(cell.id) > 1:
            cell.id = f"cell-{number}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.source = "\n".join(line.rstrip() for line in cell.source.splitlines()).strip("\n")
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [ANSI.sub("", line) for line in output.traceback]
    settle_tables(notebook)
    return nbformat.v4.writes(notebook).rstrip("\n") + "\n"


def settle_tables(notebook: NotebookNode) -> None:
    """Number the ids of styled tables in reading order; drop the text that stands for a table.

    That text is a class name and an address, and no reader of a notebook sees it.
    """
    ids: dict[str, str] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" not in data:
                continue
            if ADDRESS.search(data.get("text/plain", "")):
                del data["text/plain"]
            data["text/html"] = STYLED.sub(
                lambda match: ids.setdefault(match.group(), f"T_{len(ids):05}"), data["text/html"]
            )


def faults(notebook: NotebookNode) -> list[str]:
    """What only the author can mend, each as a sentence that names the cell."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        found.append(f"{len(tagged)} cells are tagged 'parameters': tag exactly one")
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(
            f"execution counts are not 1 to {len(code)}: commit the outputs of one complete run"
        )
    for number, cell in enumerate(notebook.cells, start=1):
        found += [f"cell {number} {fault}" for fault in cell_faults(cell)]
    return found + source_faults(notebook)


def source_faults(notebook: NotebookNode) -> list[str]:
    """What the lesson's code must not do; an import in one cell holds for the later ones."""
    found, names = [], {}
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code":
            continue
        try:
            tree = source_rules.parse_cell(cell.source)
            names |= source_rules.imported_names(tree)
            wrong = source_rules.command_faults(tree, names)
            wrong += source_rules.old_nki_faults(tree, names)
        except SyntaxError as error:
            wrong = [f"is not Python ({error.msg}): mend it"]
        found += [f"cell {number} {fault}" for fault in dict.fromkeys(wrong)]
    return found


def cell_faults(cell: NotebookNode) -> list[str]:
    found = [
        f"holds {what} (found {match.group()!r})"
        for text in [cell.source, *output_texts(cell)]
        for pattern, what in UNWANTED.items()
        if (match := re.search(pattern, text))
    ]
    if cell.cell_type != "code":
        return found
    if not cell.source.strip():
        found.append("is empty: delete it")
    allowed = "raises-exception" in cell.metadata.get("tags", [])
    for output in cell.outputs:
        if output.output_type == "error" and not allowed:
            found.append(f"ended in {output.ename}: commit the outputs of a run that passed")
        if output.output_type == "stream" and output.name == "stderr":
            found.append(
                f"shows a message on stderr: mend its cause ({output.text.strip()[:60]!r})"
            )
    return found


def output_texts(cell: NotebookNode) -> list[str]:
    """All that an output says in words: pictures are left out, their bytes may spell anything."""
    texts = []
    for output in cell.get("outputs", []):
        texts.append(output.get("text", ""))
        texts += output.get("traceback", [])
        for mime, data in output.get("data", {}).items():
            if not mime.startswith("image/"):
                texts.append(data if isinstance(data, str) else json.dumps(data))
    return texts


def save_outputs(executed: Path, path: Path) -> None:
    """Put the outputs of an executed copy into a lesson, without papermill's traces."""
    if not executed.is_file():
        raise SettingError(f"{executed} does not exist: run the lessons first")
    lesson = nbformat.read(path, as_version=4)
    ran = [
        cell
        for cell in nbformat.read(executed, as_version=4).cells
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", [])
    ]
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    if [cell.source for cell in ran] != [cell.source for cell in code]:
        raise SettingError(f"{path} was edited after {executed} was run: run the lessons again")
    if any(cell.execution_count is None for cell in ran):
        raise SettingError(f"{executed} did not run to its end: mend the lesson and run it again")
    for count, (cell, source) in enumerate(zip(code, ran, strict=True), start=1):
        cell.outputs, cell.execution_count = source.outputs, count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    path.write_text(canonical(lesson), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
