"""Fixtures of the tests of the Hugging Face integration."""

import pytest


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to connect fails the test."""
    import socket

    def refuse(*_, **__):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(params=[False, True], ids=["tiled codes", "fused codes"])
def codes(request, monkeypatch):
    """Masks as they are made on a CPU, and as they are made for the fused kernels of a GPU."""
    from lssar.hf import masks

    monkeypatch.setattr(masks, "fused_on", lambda device: request.param)
