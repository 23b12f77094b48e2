"""What a run shows in a terminal, or in the log of a machine that has none."""

import re
import shutil
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
        self.redrawn = ""  # the last state of a line that the running cell redraws
        self.redrawn_at = 0.0
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
            self.status, self.redrawn = f"  {lesson}  cell {number}/{count}", ""
            if not self.terminal:
                self.stream.write(f"{self.status}  {time.monotonic() - self.since:.0f} s\n")
                self.stream.flush()

    def lesson(self, text: str) -> None:
        self.since = time.monotonic()
        self.line(text)

    def redraw(self, text: str) -> None:
        """Show the new state of a cell's line; a log gets a sign of life every ten seconds."""
        with self.lock:
            self.redrawn = self.scrub(ANSI.sub("", text)).partition("\n")[0]
            if not self.terminal and time.monotonic() - self.redrawn_at > 10:
                self.redrawn_at = time.monotonic()
                self.stream.write(f"    {self.redrawn}\n")
                self.stream.flush()

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
            text = f"{self.status}  {time.monotonic() - self.since:.0f} s  {self.redrawn}"
            # A longer one would wrap, and only its last row would be erased.
            self.stream.write(text[: shutil.get_terminal_size().columns - 1].rstrip())
