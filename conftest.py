"""The lessons under nbval: `pytest --nbval-lax notebooks` runs them and compares what is tagged.

Lax: every cell runs once, in order, and must not raise; a lesson's last cell, `checks.verdict()`,
raises on any wrong value. Text is compared only in cells tagged `nbval-check-output`, whose output
is the same on every machine. No cell is skipped, because later cells need what earlier ones made.
"""

import os

import pytest


def pytest_configure(config):
    if config.getoption("nbval_lax", False):
        from qwen3_trainium import runner

        os.environ.update(runner.QUIET | runner.OFFLINE)  # for the kernels that nbval starts
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run beside them
        config.pluginmanager.register(ComparedCells())


class ComparedCells:
    """nbval passes over a tagged cell without a stored output; a run that compares none is void."""

    def __init__(self):
        self.passed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        result = yield
        compared = item.options["check"] and item.cell.execution_count and item.cell.outputs
        self.passed += bool(result.when == "call" and result.passed and compared)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.passed == 0 and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(f"{self.passed} cells compared with their committed output")
        if self.passed == 0:
            terminalreporter.write_line("no cell was compared: tag one nbval-check-output")
