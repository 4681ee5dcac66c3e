"""The stand-in hub that the tests of a module share, and a cache of each test's own."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from bringing import MODEL, split_demo

from muster.testing.hub import Hub, hub


@pytest.fixture(scope="module")
def stand_in() -> Generator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture(scope="module")
def weights(stand_in: Hub, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the weight files of the model that the hub has."""
    source = tmp_path_factory.mktemp("model")
    names = split_demo(source)
    stand_in.add(MODEL, source)
    return names


@pytest.fixture
def hub_here(stand_in: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and nothing wrong with the hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
    stand_in.faults.clear()
    stand_in.asked.clear()
