"""`nki.jit`, `kernel[lnc]` and `simulate`: what a caller holds."""

import functools
import inspect
import os
import warnings

from . import arch, tracing
from .errors import KernelError, fail
from .launch import Argument, Launch, is_array, shape_only, to_caller
from .lint import lint
from .machine import running
from .table import require_written
from .tensors import NkiTensor


class LintWarning(UserWarning):
    """A kernel uses Python that an NKI compiler would refuse."""


class Kernel:
    """A jitted function. Call it with numpy arrays or torch CPU tensors; `kernel[2]` sets LNC 2."""

    def __init__(self, fn, lnc=1, version=None, strict_python=False):
        self.fn, self.lnc = fn, lnc
        self.version, self.strict_python = version, strict_python
        functools.update_wrapper(self, fn)

    def __getitem__(self, lnc):
        lnc = lnc[0] if isinstance(lnc, tuple) and len(lnc) == 1 else lnc
        if lnc not in (1, 2):
            raise ValueError(f"a launch has 1 or 2 cores, kernel[{lnc}] asks for another number")
        return Kernel(self.fn, lnc, self.version, self.strict_python)

    def with_schedule(self, schedule):
        """Ordering hints change no result, so the simulator takes and ignores them."""
        return self

    def __call__(self, *args, **kwargs):
        if running():
            fail(
                f"kernel {self.fn.__name__} is called from a kernel",
                rule="@nki.jit marks the entry only; helpers are plain functions",
            )
        version = _known(self.version or os.environ.get("NKI_SIM_VERSION", arch.DEFAULT_VERSION))
        _lint_once(self.fn, version, self.strict_python)
        _check_lnc(self.lnc)
        launch = Launch(self.lnc, version, tracing.active())
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        arguments = {}

        def convert(name, value):
            if isinstance(value, list):
                raise TypeError(f"argument {name} is a list; NKI takes tuples")
            if isinstance(value, tuple):
                return tuple(convert(f"{name}[{i}]", v) for i, v in enumerate(value))
            if not is_array(value):
                return value
            # The same array given twice is one HBM tensor, so that aliasing shows.
            if id(value) not in arguments:
                argument = Argument(name, value, self.lnc, launch.shapes_only)
                argument.storage.shown = launch.unique_name(name)
                arguments[id(value)] = argument
            return arguments[id(value)].tensor

        for name, value in bound.arguments.items():
            bound.arguments[name] = convert(name, value)
        try:
            result = launch.run(lambda: self.fn(*bound.args, **bound.kwargs))
        finally:
            if launch.trace is not None:
                launch.trace.finish(launch)
        return _results(self.fn, result, list(arguments.values()), launch)


def _check_lnc(lnc):
    """The launch must match the runtime's logical core, where the environment names one."""
    runtime = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
    if runtime is not None and runtime != str(lnc):
        fail(
            f"a launch on {lnc} cores, but NEURON_LOGICAL_NC_CONFIG is {runtime}",
            rule="kernel[lnc] equals the runtime's NEURON_LOGICAL_NC_CONFIG",
        )


def _results(fn, result, arguments, launch):
    several = isinstance(result, (tuple, list))
    returned = list(result) if several else [result]
    by_storage = {id(a.storage): a for a in arguments}
    as_torch = any(a.torch for a in arguments)
    values = []
    for at, t in enumerate(returned):
        if not isinstance(t, NkiTensor):
            values.append(t)
            continue
        argument = by_storage.get(id(t.storage))
        if argument is not None:
            argument.write_back()
            values.append(argument.value)
            continue
        if t.storage.region.name != "shared_hbm":
            fail(
                f"{fn.__name__} returns {t.describe()}",
                rule="outputs are allocated with buffer=nl.shared_hbm",
            )
        if launch.shapes_only:
            values.append(shape_only(t, as_torch))
            continue
        require_written(t, f"return of {fn.__name__}", f"output {at}")
        values.append(to_caller(t, as_torch))
    _check_inputs(fn, arguments, {id(t.storage) for t in returned if isinstance(t, NkiTensor)})
    return tuple(values) if several else values[0]


def _check_inputs(fn, arguments, returned):
    for argument in arguments:
        where = argument.storage.first_write
        if where is not None and id(argument.storage) not in returned:
            raise KernelError(
                f"{fn.__name__} writes to its input '{argument.name}' but does not return it\n"
                "  rule: an input that is changed in place is declared by returning it\n"
                f"  at {where[0]}:{where[1]}"
            )


@functools.cache
def _lint_once(fn, version, strict):
    findings = lint(fn, version)
    if findings and strict:
        raise KernelError("\n".join(str(f) for f in findings))
    for finding in findings:
        text = f"{finding.construct}: {finding.reason}"
        warnings.warn_explicit(text, LintWarning, finding.file, finding.line)


def jit(fn=None, **kwargs):
    """Decorate a kernel's entry function; `mode` is ignored as NKI ignores it since 0.3."""
    if "platform_target" in kwargs:
        raise TypeError("platform_target was removed in NKI 0.3; the simulator models trn2")
    if fn is None:
        return functools.partial(jit, **kwargs)
    return Kernel(fn)


def _known(version):
    if version not in arch.VERSIONS:
        raise ValueError(f"version {version!r} is unknown, use one of {', '.join(arch.VERSIONS)}")
    return version


def simulate(kernel, *, version=None, strict_python=False):
    """A callable that runs `kernel` on the simulator and returns what it returns.

    kernel         a function, a jitted kernel, or `kernel[lnc]`
    version        "0.3" to "0.7": whose rules apply where versions differ; NKI_SIM_VERSION or
                   else 0.7 without it
    strict_python  raise, rather than warn, on Python that NKI's compiler would refuse
    Arguments: numpy arrays or torch CPU tensors become HBM tensors, other values stay as they are.
    Raises KernelError for anything that trn2 or NKI's documentation does not allow.
    """
    if version is not None:
        _known(version)
    fn, lnc = (kernel.fn, kernel.lnc) if isinstance(kernel, Kernel) else (kernel, 1)
    return Kernel(fn, lnc, version, strict_python)
