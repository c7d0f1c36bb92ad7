"""The backend ``monarch`` keeps the contract. It needs Monarch, and is skipped and counted where that is absent."""

from __future__ import annotations

import importlib.util

import pytest

from podium import Cluster
from podium_testing import BackendContract, Target

if importlib.util.find_spec("monarch") is None:
    pytest.skip("torchmonarch is not installed here: make test-monarch", allow_module_level=True)


@pytest.fixture(scope="module", params=[Target("monarch")], ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class TestMonarch(BackendContract):
    limit_s = 240.0

    def test_the_capabilities_are_those_of_the_page_on_backends(self, cluster: Cluster) -> None:
        assert cluster.capabilities.processes
        assert not cluster.capabilities.exit_status, "Monarch tells no exit codes"
