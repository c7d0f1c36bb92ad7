"""The whole contract suite as one class."""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from podium.runtime import Cluster
from podium_testing.calls import CallContract
from podium_testing.dispatching import DispatchContract
from podium_testing.edges import EdgeContract
from podium_testing.ends import EndContract
from podium_testing.handles import HandleContract
from podium_testing.lifetimes import LifetimeContract
from podium_testing.loads import LoadContract
from podium_testing.placing import PlacingContract
from podium_testing.processes import ProcessContract
from podium_testing.references import ReferenceContract
from podium_testing.scripts import ScriptContract
from podium_testing.target import Target, time_limit
from podium_testing.values import ValueContract

__all__ = ["BackendContract"]


class BackendContract(
    DispatchContract,
    ValueContract,
    ReferenceContract,
    CallContract,
    HandleContract,
    PlacingContract,
    LifetimeContract,
    ProcessContract,
    ScriptContract,
    LoadContract,
    EndContract,
    EdgeContract,
):
    """The tests that every backend must pass. Subclass it in a test module that has a fixture ``target``:

    >>> @pytest.fixture(scope="module", params=[Target("mine"), Target("mine", option=1)], ids=str)
    ... def target(request):
    ...     return request.param
    >>> class TestMine(BackendContract):
    ...     pass

    A test is skipped if the backend's :class:`~podium.runtime.Capabilities` say that it cannot do what is tested. The
    backend needs room for some 30 slots without declared resources on one node. Tests of processes read ``/proc``.
    """

    limit_s: ClassVar[float] = 120.0
    """Seconds that a test may take, and that connecting may take. The subclass may set another limit."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, target: Target) -> Iterator[Cluster]:
        with time_limit(cls.limit_s):
            cluster = target.connect()
        with cluster:
            yield cluster

    @pytest.fixture(autouse=True)
    def _ends_in_time(self, cluster: Cluster) -> Iterator[None]:
        with time_limit(self.limit_s):
            yield

    @pytest.fixture(autouse=True)
    def _nothing_is_left_running(self, cluster: Cluster) -> Iterator[None]:
        """Close the groups that a test started. Together their processes, each with torch, would fill the memory."""
        before = {*cluster.groups}
        yield
        for name, group in cluster.groups.items():
            if name not in before:
                group.close()
