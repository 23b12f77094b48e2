"""What `conftest.py` promises of every test."""

import socket

import pytest
import torch


def test_a_connection_that_leaves_this_machine_is_refused_and_listed(refused_addresses):
    with pytest.raises(ConnectionRefusedError, match="tests are offline"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)  # an address of no machine
    assert refused_addresses == [("192.0.2.1", 80)]
    refused_addresses.clear()  # or this test would fail when it ends


def test_this_machine_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def test_uninitialised_memory_is_nan():
    assert torch.empty(1000).isnan().all()
