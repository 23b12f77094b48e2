"""Writing so that nothing is ever half there."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, and move it into place when the block ends well.

    A reader sees the whole folder or none of it. `path` must not exist; what an interrupted
    block left behind is removed. Two processes may race: the later one's result is dropped.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text at once: no reader ever sees a part of it."""
    beside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
