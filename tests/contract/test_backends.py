"""Every backend of Podium's own keeps the contract; a further one only adds its name."""

from __future__ import annotations

import pytest

from podium.testing import BackendContract, Target

BACKENDS = [
    Target("inline"),
    Target("inline", threads=True),
    Target("local"),
    pytest.param(Target("ray"), marks=pytest.mark.ray),
    pytest.param(Target("monarch"), marks=pytest.mark.monarch),
]


@pytest.fixture(scope="module", params=BACKENDS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class TestBackends(BackendContract):
    pass
