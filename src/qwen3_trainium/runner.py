"""`python -m qwen3_trainium run`: every lesson headless, then one report and one verdict.

Papermill executes a notebook; this module decides what its result means. A lesson passes only if
all of its cells ran, its `verdict()` cell was reached, and at least one check was evaluated: ending
early, dying quietly or checking nothing is a failure.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import nbformat
import papermill
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

from qwen3_trainium import checks, profiles, report
from qwen3_trainium.errors import SettingError
from qwen3_trainium.progress import Progress

NOTEBOOKS = profiles.ROOT / "notebooks"
# Seconds a single cell may take; papermill's own default is no limit. On cpu no cell of a lesson
# is meant to exceed two minutes. On the instance one cell may hold a first compilation of the 4B
# model and a download, so its limit only ends runs that hang.
CELL_TIMEOUT = {"cpu": 1800, "neuron": 6 * 3600}
# Bars are drawn with carriage returns, which a stored output shows as debris.
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# The laptop run never asks the hub; a lesson that does fails at once instead of trying for minutes.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


LOG = logging.getLogger("papermill")
LOG.setLevel(logging.CRITICAL)  # what it says of a failure, `settle` says in our own words


@dataclasses.dataclass
class Lesson:
    """One executed notebook. `status` is "passed" or says in two words what went wrong."""

    name: str
    notebook: NotebookNode
    status: str = "not run"
    seconds: float = 0.0
    error: str = ""
    current_cell: int | None = None  # index in notebook.cells of the last cell that was started
    broken_cell: int | None = None  # likewise, of the cell that the report shows first

    def records(self, mime: str) -> list[dict]:
        return [
            output.data[mime]
            for cell in self.notebook.cells
            for output in cell.get("outputs", [])
            if mime in output.get("data", {})
        ]

    def checks(self) -> list[dict]:
        return list({record["id"]: record for record in self.records(checks.CHECK)}.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qwen3_trainium run",
        description="Run the lessons headless and write executed notebooks, report and verdict.",
    )
    parser.add_argument(
        "--profile",
        default=profiles.detect(),
        help="name in configs/profiles/, or a file NAME.yaml; default: %(default)s",
    )
    parser.add_argument("--only", help="numbers of lessons, such as 00,01; default: all")
    parser.add_argument("--out", type=Path, help="folder for the results; default: out/PROFILE")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the results of an earlier run"
    )
    args = parser.parse_args(argv)
    out = args.out or profiles.ROOT / "out" / profiles.load(args.profile).profile
    lessons = run(select(NOTEBOOKS, args.only), args.profile, out, args.overwrite)
    return 0 if passed(lessons) else 1


def select(folder: Path, only: str | None = None) -> list[Path]:
    """The lessons `NN_*.ipynb` of a folder in order, or those whose numbers `only` lists."""
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    lessons = {path.name[:2]: path for path in paths}
    if len(lessons) < len(paths):
        raise SettingError(
            f"two lessons in {folder} have the same number: "
            f"renumber one of {', '.join(path.name for path in paths)}"
        )
    if not lessons:
        raise SettingError(f"no lesson NN_name.ipynb was found in {folder}: run from a checkout")
    if only is None:
        return list(lessons.values())
    numbers = [number.strip() for number in only.split(",")]
    if unknown := [number for number in numbers if number not in lessons]:
        raise SettingError(
            f"--only names lesson {unknown[0]!r}, which does not exist: "
            f"choose from {', '.join(lessons)}, separated by commas"
        )
    return [lessons[number] for number in sorted(set(numbers))]


def run(
    paths: list[Path],
    profile_name: str,
    out: Path,
    overwrite: bool = False,
    cell_timeout: int | None = None,
) -> list[Lesson]:
    """Execute the notebooks in order and write OUT. Settings are refused before the first cell.

    profile_name   as `profiles.load` takes it; each lesson reads the same file
    """
    profile = profiles.load(profile_name)
    parameters = {"profile": profile_name}
    if profile_name.endswith(".yaml"):  # lessons run in another folder
        parameters["profile"] = str(profiles.path_of(profile_name))
    lessons = [Lesson(path.stem, read_lesson(path, parameters)) for path in paths]
    out = out.resolve()  # papermill changes the working directory while a lesson runs
    prepare(out, overwrite)
    cell_timeout = cell_timeout or CELL_TIMEOUT[profile.device]
    progress = Progress(sys.stdout, scrub)
    progress.line(f"profile {profile.profile}, {profile.ranks} ranks on {profile.device}")
    progress.line(f"a cell may take {cell_timeout} s; results go to {out}")
    for number, (path, lesson) in enumerate(zip(paths, lessons, strict=True), start=1):
        progress.lesson(f"[{number}/{len(lessons)}] {lesson.name}")
        execute(lesson, parameters, profile.device, path.parent, out, cell_timeout, progress)
        refuse_repeated_ids(lesson, lessons[: number - 1])
        save(out / f"{lesson.name}.ipynb", nbformat.writes(lesson.notebook))
        (out / f"{lesson.name}.partial.ipynb").unlink(missing_ok=True)
        progress.line(f"  {lesson.name}: {lesson.status} in {lesson.seconds:.0f} s")
        if lesson.error:
            progress.line(f"  {lesson.error}")
        if lesson.name.startswith("00_") and lesson.status != "passed":
            break  # every other lesson needs what the set-up lesson makes
    facts = next(
        (found[-1] for lesson in lessons if (found := lesson.records(checks.ENVIRONMENT))),
        checks.environment_facts(profile),
    )
    result = verdict(lessons, facts)
    save(out / "verdict.json", json.dumps(result, indent=2) + "\n")
    save(out / "report.html", report.render(lessons, facts, result, paths[0].parent))
    progress.line("")
    for lesson in lessons:
        progress.line(f"{lesson.name}: {lesson.status}")
        for record in lesson.checks():
            progress.line(f"  {checks.line(record)}")
    progress.line(f"verdict: {'passed' if result['passed'] else 'FAILED'}")
    progress.line(f"report: {out / 'report.html'}")
    return lessons


def passed(lessons: list[Lesson]) -> bool:
    return bool(lessons) and all(lesson.status == "passed" for lesson in lessons)


def verdict(lessons: list[Lesson], facts: dict) -> dict:
    """What `verdict.json` holds; its shape is fixed by the design."""
    return {
        "profile": facts["machine"]["profile"],
        "versions": facts["versions"],
        "machine": facts["machine"],
        "notebooks": [
            {"name": lesson.name, "seconds": round(lesson.seconds, 1), "status": lesson.status}
            for lesson in lessons
        ],
        "checks": [record for lesson in lessons for record in lesson.checks()],
        "passed": passed(lessons),
    }


def read_lesson(path: Path, parameters: dict) -> NotebookNode:
    """Read a notebook that takes exactly these parameters; papermill would only warn."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, OSError) as error:
        raise SettingError(f"{path.name} is not a readable notebook: {error}") from error
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise SettingError(
            f"{path.name} has {len(tagged)} cells tagged 'parameters': tag exactly one"
        )
    try:
        body = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise SettingError(
            f"the parameters cell of {path.name} is not Python: {error.msg} in line {error.lineno}"
        ) from error
    known = [
        target.id
        for statement in body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in getattr(statement, "targets", None) or [statement.target]
        if isinstance(target, ast.Name)
    ]
    if unknown := [name for name in parameters if name not in known]:
        raise SettingError(
            f"{path.name} has no parameter {unknown[0]!r}: "
            f"its parameters cell assigns {', '.join(known) or 'nothing'}"
        )
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # The checks of a lesson that did not get to run are not those of its committed copy.
            cell.outputs, cell.execution_count = [], None
    return notebook


def prepare(out: Path, overwrite: bool) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise SettingError(
            f"results already exist at {out}: name another folder with --out, or use --overwrite"
        )
    out.mkdir(parents=True, exist_ok=True)


def execute(
    lesson: Lesson,
    parameters: dict,
    device: str,
    folder: Path,
    out: Path,
    cell_timeout: int,
    progress: Progress,
) -> None:
    """Run one lesson in a kernel of this interpreter and settle its status.

    The kernel is driven from a second thread: this one draws the elapsed time and takes Ctrl-C,
    which nbclient would otherwise turn into a dead kernel.
    """
    code_cells = [cell for cell in lesson.notebook.cells if cell.cell_type == "code"]
    environment = QUIET | (OFFLINE if device == "cpu" else {})
    kernels = kernel_manager(environment)
    failures: list[Exception] = []
    started = 0

    def on_start(notebook):
        lesson.notebook = notebook  # the copy that papermill fills, kept in case it raises

    def on_execute(cell, cell_index):
        nonlocal started
        started += 1
        lesson.current_cell = cell_index
        # papermill adds one cell, which sets the parameters
        progress.cell(lesson.name, started, len(code_cells) + 1)

    def on_executed(cell, cell_index, execute_reply):
        # For whoever wants to look into a long run, or one whose terminal was lost.
        save(out / f"{lesson.name}.partial.ipynb", nbformat.writes(lesson.notebook))

    def work():
        try:
            lesson.notebook = papermill.execute_notebook(
                lesson.notebook,
                None,
                parameters,
                engine_name="lessons",
                kernel_name="python3",
                progress_bar=False,
                cwd=folder,
                stdout_file=progress,
                timeout=cell_timeout,
                coalesce_streams=True,
                kernel_manager_class=kernels,
                on_notebook_start=on_start,
                on_cell_execute=on_execute,
                on_cell_executed=on_executed,
            )
        except Exception as error:
            failures.append(error)

    begin = time.monotonic()
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(timeout=1)
            progress.tick()
    finally:
        progress.end()
        # Also what the kernel started and left behind, when it was killed or we were interrupted.
        for group in kernels.process_groups:
            kill_group(group)
    lesson.seconds = time.monotonic() - begin
    lesson.notebook = remove_error_markers(lesson.notebook)
    settle(lesson, failures[0] if failures else None, cell_timeout)


class LessonClient(PapermillNotebookClient):
    """Papermill's client; it also shows checks, and the line that a long cell redraws."""

    def process_message(self, msg, cell, cell_index):
        content = msg["content"]
        if msg["msg_type"] in ("display_data", "update_display_data"):
            text = content["data"].get("text/plain", "")
            if checks.CHECK in content["data"]:
                self.stdout_file.line(f"  {text}")
            elif "display_id" in content.get("transient", {}):
                self.stdout_file.redraw(text)
        return super().process_message(msg, cell, cell_index)


class LessonEngine(Engine):
    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, input_path, start_timeout, **options):
        options |= {"kernel_name": kernel_name, "startup_timeout": start_timeout, "log": LOG}
        LessonClient(nb_man, **options).execute()


papermill_engines.register("lessons", LessonEngine)


def kernel_manager(environment: dict) -> type[AsyncKernelManager]:
    """A manager that starts kernels of the running interpreter.

    A kernel spec "python3" of the user's, found first on Jupyter's path, may belong to another
    environment: it would run the lessons with other versions than those that were checked.
    """

    class ThisInterpreter(AsyncKernelManager):
        process_groups: tuple = ()
        kernel_spec = KernelSpec(
            argv=[
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
                "--HistoryManager.enabled=False",  # lessons leave no trace in the user's history
                "--log-level=50",  # ipykernel warns of plain TCP, which here never leaves the host
            ],
            display_name="Python 3",
            language="python",
            env=environment,
        )

        async def _async_post_start_kernel(self, **options):
            await super()._async_post_start_kernel(**options)
            type(self).process_groups += (self.provisioner.pgid,)

        post_start_kernel = _async_post_start_kernel

    return ThisInterpreter


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # everything has ended, as it should
        os.killpg(group, signal.SIGKILL)


def settle(lesson: Lesson, failure: Exception | None, cell_timeout: int) -> None:
    """Decide a lesson's status from its cells; of papermill's own error only the kind is used.

    Papermill ends without an error after `SystemExit(0)`, and with one after an exception that a
    cell tagged `raises-exception` shows on purpose.
    """
    cells = [
        (index, cell)
        for index, cell in enumerate(lesson.notebook.cells)
        if cell.cell_type == "code" and cell.source.strip()
    ]
    evaluated = [record for record in lesson.checks() if record["passed"] is not None]
    failed = [record["id"] for record in evaluated if not record["passed"]]
    error = next(
        (
            (index, output)
            for index, cell in cells
            if "raises-exception" not in cell.metadata.get("tags", [])
            for output in cell.outputs
            if output.output_type == "error"
        ),
        None,
    )

    def fail(status, sentence, cell=lesson.current_cell):
        where = (
            f"cell {[index for index, _ in cells].index(cell) + 1}: " if cell is not None else ""
        )
        lesson.status, lesson.broken_cell = status, cell
        lesson.error = re.sub(r"\s+", " ", where + sentence).strip()

    if isinstance(failure, CellTimeoutError):
        fail("timed out", f"ran longer than the {cell_timeout} s that a cell may take")
    elif isinstance(failure, DeadKernelError):
        fail("kernel died", "the kernel died: out of memory is the usual cause")
    elif failure and not isinstance(failure, PapermillExecutionError):
        fail("kernel died", f"the kernel could not be run: {failure}")
    elif error and error[1].ename == "CheckFailed" and not evaluated:
        fail("no check", "no check was evaluated", error[0])
    elif error and error[1].ename == "CheckFailed":
        fail("check failed", error[1].evalue, error[0])
    elif error and not (error[1].ename == "SystemExit" and error[1].evalue in ("", "0")):
        fail("cell failed", f"{error[1].ename}: {error[1].evalue}", error[0])
    elif error or any(cell.get("execution_count") is None for _, cell in cells):
        fail("ended early", "ended the lesson before its verdict")
    elif not lesson.records(checks.VERDICT):
        fail("no verdict", "the last cell must call checks.verdict(), and none did", None)
    elif failed:  # recorded after the verdict, or in a cell that was allowed to raise
        fail("check failed", f"checks failed: {', '.join(failed)}", None)
    elif not evaluated:
        fail("no check", "no check was evaluated", None)
    else:
        lesson.status = "passed"


def refuse_repeated_ids(lesson: Lesson, earlier: list[Lesson]) -> None:
    """A check id names one value of the whole verdict."""
    ids = {record["id"]: other.name for other in earlier for record in other.checks()}
    repeated = [record["id"] for record in lesson.checks() if record["id"] in ids]
    if repeated and lesson.status == "passed":
        lesson.status = "repeated id"
        lesson.error = f"check id {repeated[0]} is also recorded by {ids[repeated[0]]}: rename one"


def save(path: Path, text: str) -> None:
    """Write a result beside its place and move it there, so that an old one is replaced whole."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(scrub(text), encoding="utf-8")
    beside.replace(path)


def scrub(text: str) -> str:
    """Take the values of secret environment variables out of a text that others may read."""
    for name, value in os.environ.items():
        if re.search(r"TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY", name) and len(value) >= 8:
            for form in (value, json.dumps(value)[1:-1]):
                text = text.replace(form, f"[{name} removed]")
    return text
