"""One line that changes while something runs: in a notebook, in a terminal, or in a log."""

import sys
import time


class StatusLine:
    """A line that is replaced in place; what remains at the end is the last one alone."""

    def __init__(self):
        self.handle = None
        self.notebook = _in_notebook()
        self.terminal = not self.notebook and sys.stdout.isatty()
        self.shown_at = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        print(text, flush=True)

    def show(self, text: str) -> None:
        if self.notebook:
            self._display(text)
        elif self.terminal:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif time.monotonic() - self.shown_at > 10:  # a log needs a sign of life, not every step
            print(text, flush=True)
            self.shown_at = time.monotonic()

    def end(self, text: str) -> None:
        """The line that stays: no speeds and times, which no two runs share."""
        if self.notebook:
            self._display(text)
        else:
            self._clear()
            print(text, flush=True)

    def _clear(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="")

    def _display(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
