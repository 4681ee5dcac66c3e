"""A fake coordinator, and the API over it on a port of loopback."""

from __future__ import annotations

from collections.abc import Generator

import httpx
import pytest
from fake_backend import FakeBackend
from serving import Served, served


@pytest.fixture
def backend() -> FakeBackend:
    """Answers "Hello there." to everything, until a test says otherwise."""
    return FakeBackend()


@pytest.fixture
def server(backend: FakeBackend) -> Generator[Served]:
    """The API over `backend`."""
    with served(backend) as running:
        yield running


@pytest.fixture(scope="session")
def web() -> Generator[httpx.Client]:
    """One client for all: to make one reads certificates for a tenth of a second."""
    with httpx.Client(timeout=20) as client:
        yield client
