"""The backend ``monarch`` keeps the contract. It needs Monarch, and is skipped and counted where that is absent."""

from __future__ import annotations

import importlib.util

import pytest

from podium_testing import BackendContract, Target

if importlib.util.find_spec("monarch") is None:
    pytest.skip("torchmonarch is not installed here: make test-monarch", allow_module_level=True)


@pytest.fixture(scope="module", params=[Target("monarch")], ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class TestMonarch(BackendContract):
    limit_s = 240.0
