"""One cluster of real processes for all integration tests: its fork server starts once, groups are cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import podium
from podium import Cluster, Worker


@pytest.fixture(scope="session")
def local() -> Iterator[Cluster]:
    """A local cluster that outlives the failures of its groups. A test closes the groups that it starts."""
    with podium.connect("local") as cluster:
        cluster.start(Worker.bind()).group.close()  # the fork server is warm once a first process has started
        yield cluster
