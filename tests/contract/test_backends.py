"""Every backend of Podium's own keeps the contract; a further one only adds its name."""

from __future__ import annotations

import pytest

from podium.runtime import backends
from podium.testing import BackendContract, Target

BACKENDS = [
    Target("inline"),
    Target("inline", threads=True),
    Target("local"),
    # Its processes import torch one by one, two seconds each: only those do here that need it.
    pytest.param(Target("ray", preload=()), id="ray", marks=pytest.mark.ray),
    pytest.param(Target("monarch"), marks=pytest.mark.monarch),
]


def test_no_backend_of_podiums_own_is_left_out() -> None:
    own = {name for name, entry in backends().items() if entry.module.startswith("podium.")}
    tried = {str(getattr(one, "values", (one,))[0]).partition("-")[0] for one in BACKENDS}
    assert tried == own


@pytest.fixture(scope="module", params=BACKENDS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class TestBackends(BackendContract):
    limit_s = 240.0  # actors of Ray start slowly beside other tests
