"""Errors that read like a good compiler's: what, where in the kernel, and the rule."""

import linecache
import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class KernelError(AssertionError):
    """A kernel asks for something that trn2 or NKI's documentation does not allow.

    NKI itself raises `AssertionError` and `NkiValidationError`; `nki.isa.NkiValidationError` is
    this class, so kernels and tests written for either catch it.
    """


def fail(problem, *, rule="", instruction="", hint=""):
    """Raise `KernelError`: the problem, the documented rule, and the kernel's own source line."""
    lines = [f"{instruction}: {problem}" if instruction else problem]
    if rule:
        lines.append(f"  rule: {rule}")
    if hint:
        lines.append(f"  do:   {hint}")
    where = kernel_line()
    if where:
        lines.append(f"  at {place(where)}")
    raise KernelError("\n".join(lines))


def place(line):
    """A source line (file, number) as text: where it is and what it says."""
    return f"{line[0]}:{line[1]}: {linecache.getline(*line).strip()}" if line else "unknown line"


def kernel_frame():
    """The innermost stack frame outside this package, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return frame
        frame = frame.f_back
    return None


def kernel_line():
    """(file, line) of the innermost call that does not belong to this package."""
    frame = kernel_frame()
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def variable_name(storage):
    """What the kernel calls a tensor: searched in the callers' variables, so only errors pay."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            for name, value in frame.f_locals.items():
                if getattr(value, "storage", None) is storage:
                    return name
        frame = frame.f_back
    return ""
