"""One cluster of real processes for all integration tests: its fork server starts once, groups are cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import podium
from podium import Cluster


@pytest.fixture(scope="session")
def local() -> Iterator[Cluster]:
    """A local cluster that outlives the failures of its groups. A test closes the groups that it starts."""
    with podium.connect("local") as cluster:
        yield cluster
