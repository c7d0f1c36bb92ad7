"""Every backend of Podium's own keeps the contract; a further one only adds its name."""

from __future__ import annotations

import pytest

from podium.runtime import backends
from podium_testing import BackendContract, Target
from tests.contract.broken_backend import FAULTS
from tests.contract.conftest import PARAMETERS
from tests.contract.everyday import KINDS, NIGHTLY, is_exhaustive

BACKENDS = [
    pytest.param(Target("inline"), id="inline"),
    pytest.param(Target("inline", threads=True), id="inline_threads"),
    pytest.param(Target("local"), id="local"),
    # Its processes import torch one by one, two seconds each: only those do here that need it.
    pytest.param(Target("ray", preload=()), id="ray", marks=pytest.mark.ray),
]


def test_no_backend_of_podiums_own_is_left_out() -> None:
    own = {name for name, entry in backends().items() if entry.module.partition(".")[0] in ("podium", "podium_ray")}
    tried = {str(param.id).partition("_")[0] for param in BACKENDS}
    assert tried == own


def test_tests_that_find_the_faults_of_a_backend_run_every_day() -> None:
    assert not [test for test in FAULTS.values() if is_exhaustive(test, "ray")]


def test_every_kind_has_tests_for_every_day_and_names_tests_that_there_are(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash.get(PARAMETERS, {})
    for kind in KINDS:
        assert kind.everyday
        for name in (*kind.everyday, *kind.exhaustive, *NIGHTLY):
            test, _, parameters = name.partition("[")
            assert hasattr(BackendContract, test), name
            if parameters and test in collected:
                assert parameters.removesuffix("]") in collected[test], name


@pytest.fixture(scope="module", params=BACKENDS)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class TestBackends(BackendContract):
    limit_s = 240.0  # actors of Ray start slowly beside other tests
