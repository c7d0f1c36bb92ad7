"""Clusters of real processes for all integration tests: a fork server starts once, and then groups are cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import podium
from podium import Cluster, Worker
from podium.trainer import PRELOAD


@pytest.fixture(scope="session")
def local() -> Iterator[Cluster]:
    """A local cluster that outlives the failures of its groups. A test closes the groups that it starts."""
    with podium.connect("local") as cluster:
        cluster.start(Worker.bind()).group.close()  # the fork server is warm once a first process has started
        yield cluster


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Cluster]:
    """A local cluster for training: its fork server has imported what a run needs, which takes a run seconds."""
    with podium.connect("local", preload=PRELOAD) as cluster:
        yield cluster
