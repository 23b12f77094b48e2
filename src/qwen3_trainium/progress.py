"""What a run shows in a terminal, or in the log of a machine that has none."""

import re
import threading
import time

# Colours and cursor movements: letters for a terminal, debris in a log.
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Progress:
    """Lines that scroll, and in a terminal below them one status line that counts the seconds.

    It is also the file to which papermill writes what a cell prints.
    """

    def __init__(self, stream, scrub):
        self.stream = stream
        self.scrub = scrub
        self.terminal = stream.isatty()
        self.status = ""
        self.since = time.monotonic()
        self.pending = ""
        self.lock = threading.Lock()  # a cell prints from papermill's thread, `tick` from another

    def line(self, text: str) -> None:
        with self.lock:
            self._erase()
            self.stream.write(self.scrub(text) + "\n")
            self._draw()
            self.stream.flush()

    def cell(self, lesson: str, number: int, count: int) -> None:
        with self.lock:
            self.status = f"  {lesson}  cell {number}/{count}"
            if not self.terminal:
                self.stream.write(f"{self.status}  {time.monotonic() - self.since:.0f} s\n")
                self.stream.flush()

    def lesson(self, text: str) -> None:
        self.since = time.monotonic()
        self.line(text)

    def tick(self) -> None:
        with self.lock:
            self._erase()
            self._draw()
            self.stream.flush()

    def end(self) -> None:
        with self.lock:
            self._erase()
            self.status = ""

    def write(self, text: str) -> None:
        """Show the complete lines of a cell's output; of a redrawn line its last state."""
        *lines, self.pending = (self.pending + text).split("\n")
        for text in lines:
            self.line("    " + (ANSI.sub("", text).rstrip("\r").rsplit("\r", 1)[-1]))

    def flush(self) -> None:
        self.stream.flush()

    def _erase(self):
        if self.terminal and self.status:
            self.stream.write("\r\x1b[K")

    def _draw(self):
        if self.terminal and self.status:
            self.stream.write(f"{self.status}  {time.monotonic() - self.since:.0f} s")
