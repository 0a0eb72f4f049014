import socket

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; needs --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def two_threads():
    """Every test starts with two intra-op threads, on any machine, and must leave them so."""
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2


@pytest.fixture
def one_thread(two_threads):
    """For torch's own modules on small tensors, where two intra-op threads only wait for each other."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


@pytest.fixture
def no_requests(monkeypatch):
    """Any use of the network fails the test: an AssertionError is not taken for a dead network."""

    def touched(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr(socket, "getaddrinfo", touched)


@pytest.fixture
def no_network(monkeypatch):
    """A machine without a network."""

    def unreachable(*args, **kwargs):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
