"""Fixtures that real runs share: a toy release, text, and a profile that names both."""

import dataclasses
import os

# Before torch is imported: on tensors as small as ours a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import toys

from qwen3_trainium import profiles


@pytest.fixture(scope="session")
def toy_release(tmp_path_factory):
    """A random Qwen3 in two shards, in the place of a published checkpoint."""
    return toys.qwen3(tmp_path_factory.mktemp("models") / "toy", shards=2)


@pytest.fixture(scope="session")
def toy_profile(toy_release):
    """Two ranks over Gloo, short sequences; the text is the standard library's documentation."""
    return dataclasses.replace(
        profiles.load("cpu"), model=str(toy_release), seq_len=64, steps=8, global_batch_size=2
    )
