"""Run NKI kernels on any machine, and see what a trn2 would be asked to do.

    import nki_sim
    nki_sim.install()              # from here on `import nki` works
    out = nki_sim.simulate(kernel)(a, b)
    with nki_sim.trace() as trace:
        kernel[2](a, b)
    print(trace.table())

See README.md in this folder for what is modelled and what is not.
"""

from .errors import KernelError
from .install import install, real_nki
from .kernel import Kernel, LintWarning, jit, simulate
from .lint import lint
from .tracing import trace

__all__ = [
    "Kernel",
    "KernelError",
    "LintWarning",
    "install",
    "jit",
    "lint",
    "real_nki",
    "simulate",
    "trace",
]
