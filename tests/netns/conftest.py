"""What the tests on real hosts share."""

from __future__ import annotations

from collections.abc import Iterator

import bed
import pytest
from net_cluster import NetCluster


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Skip every test here where the machine cannot carry a bed."""
    if reason := bed.unavailable():
        pytest.skip(reason)


@pytest.fixture
def mended(cluster: NetCluster) -> Iterator[None]:
    """Put every cable back after a test, also after one that failed in between."""
    yield
    cluster.bed.mend()
