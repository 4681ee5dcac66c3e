"""Clusters that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit import Stage, stage


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A coordinator and workers a and b for the tests of a module that leave them as they were."""
    with stage(tmp_path_factory.mktemp("shared")) as made:
        yield made
