"""What every test keeps to, and fixtures that real runs share: a toy release, text, a profile."""

import dataclasses
import ipaddress
import os
import socket

# Before torch is imported: on tensors as small as ours a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import toys

from qwen3_trainium import data, profiles


@pytest.fixture(scope="session")
def refused_addresses():
    """Connections that leave this machine are refused, and listed here, in the tests' processes."""
    refused = []

    def guarded(connect):
        def only_to_this_machine(self, address):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
                refused.append(address)
                raise ConnectionRefusedError(f"tests are offline: {address}")
            return connect(self, address)

        return only_to_this_machine

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
        yield refused


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(autouse=True)
def _offline(refused_addresses):
    """A test passes with what is on this machine, also where the code would bear a refusal."""
    yield
    asked, refused_addresses[:] = list(refused_addresses), []
    assert asked == []


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """Fresh tensors hold NaN, so that reading one by mistake does not pass by luck."""
    import torch

    torch.use_deterministic_algorithms(True)  # without it torch fills nothing
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def toy_release(tmp_path_factory):
    """A Qwen3 in two shards, hardly trained, in the place of a published checkpoint."""
    folder = toys.qwen3(tmp_path_factory.mktemp("models") / "toy", shards=2)
    text = "\n".join(data.read(data.make() / "train"))
    return toys.learn_tokens(folder, text[:2000], toys.TWO_SHARDS)


@pytest.fixture(scope="session")
def toy_profile(toy_release):
    """Two ranks over Gloo, short sequences; the text is the standard library's documentation."""
    return dataclasses.replace(
        profiles.load("cpu"), model=str(toy_release), seq_len=64, steps=8, global_batch_size=2
    )
