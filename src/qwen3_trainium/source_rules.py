"""What code must not say, read from its source: commands that fail unseen, and names gone from NKI.

    python -m qwen3_trainium.source_rules FOLDER…   # Python files, for names gone from NKI

`notebook_format` asks both questions of the lessons' cells.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from nki_sim.lint import REMOVED, REMOVED_ARGUMENTS
from qwen3_trainium.errors import SettingError
from qwen3_trainium.versions import NEURON

# They return an exit status, or what was printed, and never raise.
UNCHECKED = {
    *("os.system", "os.popen", "subprocess.call", "subprocess.Popen"),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
}
UNCHECKED_MAGICS = {"system", "sx", "!", "!!"}
INSTALLERS = {"pip", "conda", "mamba", "micromamba", "uv"}
# A magic of these runs Python; the cell magics of SCRIPTS raise when their script fails.
PYTHON_MAGICS = {"time", "timeit", "capture", "prun"}
SCRIPTS = {"bash", "sh", "script"}
OPTIONS = re.compile(r"^(\s*-\w+(\s+\d+)?\s)+")  # of a line magic, such as `-n 3 -r 1`
COMMAND = (
    "runs a command whose failure nobody sees: use %%bash, `launch`, or subprocess.run(…, "
    "check=True)"
)
INSTALLS = "installs a package: name it in pyproject.toml instead"


def parse_cell(source: str) -> ast.Module:
    """A cell's code as IPython runs it, where `!` and `%` have become calls; raises SyntaxError."""
    code = TransformerManager().transform_cell(source)
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(code, "<cell>", "exec", flags)


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `import nki.language as nl` gives nl → nki.language."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def command_faults(tree: ast.AST, names: dict[str, str]) -> list[str]:
    """Commands that leave the cell green when they fail, and installations."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _command_faults(node, names)
    return found


def _command_faults(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called = _dotted(call.func, names)
    if called.startswith("get_ipython().run_"):
        yield from _magic_faults(call, names)
    elif called in UNCHECKED or called.startswith("os.spawn"):
        yield COMMAND
    elif called == "subprocess.run":
        checked = any(
            keyword.arg == "check"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is True
            for keyword in call.keywords
        )
        if not checked:
            yield COMMAND
    # IPython's own, under whatever name its shell is held; `platform.system` is something else.
    elif called.endswith((".system", ".getoutput")) and not called.startswith("platform."):
        yield COMMAND


def _magic_faults(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    """Faults of a magic: IPython writes its name, line and (for a cell magic) body as literals."""
    written = [getattr(argument, "value", None) for argument in call.args]
    if len(written) < 2 or not all(isinstance(text, str) for text in written):
        yield COMMAND  # written by hand with variables: what it runs cannot be read here
        return
    name, line, *body = written
    if name in UNCHECKED_MAGICS:
        yield COMMAND
    elif name in INSTALLERS:
        yield INSTALLS
    elif name in SCRIPTS:
        if any(option in line for option in ("--no-raise-error", "--bg")):
            yield COMMAND
        yield from _script_faults(body[0] if body else "")
    elif name in PYTHON_MAGICS:
        code = body[0] if body else OPTIONS.sub("", line)
        yield from command_faults(parse_cell(code), names)


def _script_faults(script: str) -> Iterator[str]:
    """A script's exit status is that of its last command, and a pipe's that of its last part."""
    lines = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) > 1 and not re.match(r"set -\w*e", lines[0]):
        yield "goes on after a command of its script has failed: begin it with `set -euo pipefail`"
    elif re.search(r"[^|]\|[^|]", script) and "pipefail" not in script:
        yield "hides the failure of a command before a pipe: begin it with `set -euo pipefail`"


def old_nki_faults(tree: ast.AST, names: dict[str, str]) -> list[str]:
    """Names and arguments that the NKI of the tested SDK no longer has, by nki_sim's tables."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else modules
            if any(module.split(".")[0] == "neuronxcc" for module in modules):
                found.append("imports neuronxcc, whose nki is gone since NKI 0.4: import nki")
        if isinstance(node, (ast.Attribute, ast.Name)):
            dotted = _dotted(node, names)
            found += _old(dotted, dotted.rpartition(".")[2], "", REMOVED)
        if isinstance(node, ast.Call):
            called = _dotted(node.func, names)
            # One instruction still has an argument of a name that the others have lost.
            if called.endswith(".nc_match_replace8"):
                continue
            for keyword in node.keywords:
                found += _old(called, keyword.arg, "=", REMOVED_ARGUMENTS)
    return found


def _old(dotted: str, name: str | None, sign: str, table: dict) -> list[str]:
    of_nki = dotted.startswith(("nki.", "neuronxcc.nki."))
    if not of_nki or name not in table or table[name][0] > NEURON["nki"]:
        return []
    since, instead = table[name]
    return [f"uses {name}{sign}, which is gone since NKI {since}: {instead}"]


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`sp.run` as "subprocess.run", `get_ipython().system` as it stands; "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_dotted(node.func, names)}()"
    return ""


def main(folders: list[str]) -> int:
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    if not paths:
        raise SettingError(f"no Python file was found in {folders}: name the folders of the code")
    wrong = 0
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for fault in old_nki_faults(tree, imported_names(tree)):
            wrong += 1
            print(f"{path}: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
