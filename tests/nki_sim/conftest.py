"""The simulator stands in for `nki` in these tests, also where a real one is installed."""

import sys

import hypothesis
import pytest

import nki_sim.isa
import nki_sim.language
import nki_sim.nki
import nki_sim.typing

sys.modules["nki"] = nki_sim.nki
sys.modules["nki.isa"] = nki_sim.isa
sys.modules["nki.language"] = nki_sim.language
sys.modules["nki.typing"] = nki_sim.typing

# Machines differ in speed, examples must not differ between runs.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _warnings(recwarn):
    """Test kernels are closures and use all of Python; lint may say so, unread."""
