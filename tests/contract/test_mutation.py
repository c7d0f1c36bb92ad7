"""The public suite finds each mutant of the example backend, and the page that lists them is as the code is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from podium_testing import BackendContract
from podium_testing.loads import MOST_BYTES, available_bytes
from podium_testing.target import time_limit
from tests.contract.broken_backend import FAULTS
from tests.contract.everyday import NIGHTLY
from tests.contract.mutants import MUTANTS
from tests.contract.mutation import PAGE, find_failures, render_page, write_mutant

PARTS = 12
BY_TEST = sorted(MUTANTS, key=lambda name: MUTANTS[name].test)  # those that share a test, and a run without a fault
EVERY_DAY = ("swaps replies now and then",)


def test_the_page_lists_mutants_faults_and_tests_as_they_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), "python -m tests.contract.mutation --write"


def test_mutants_fit_the_example_and_name_tests_of_the_suite(tmp_path: Path) -> None:
    for number, (name, mutant) in enumerate(MUTANTS.items()):
        write_mutant(tmp_path, f"mutant_{number}", name)
        assert mutant.edits, name
        assert hasattr(BackendContract, mutant.test), name
    assert all(hasattr(BackendContract, test) for test in FAULTS.values())


def test_the_limit_also_ends_what_waits_after_it() -> None:
    never = threading.Event()
    with pytest.raises(pytest.fail.Exception, match=r"longer than 0\.05 s"), time_limit(0.05):
        with suppress(pytest.fail.Exception):  # as a call that cannot be sent, which is then cancelled
            never.wait(60)
        never.wait(60)
        pytest.fail("the limit passed once")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(EVERY_DAY, id="every day"),
        *[
            pytest.param(BY_TEST[part::PARTS], id=f"part {part}", marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for part in range(PARTS)
        ],
    ],
)
def test_each_mutant_is_found_and_the_example_is_not(tmp_path: Path, names: Sequence[str]) -> None:
    if available_bytes() < MOST_BYTES:  # the test skips itself
        names = [name for name in names if MUTANTS[name].test not in NIGHTLY]
    failures = find_failures(tmp_path, ["", *names])
    assert not failures.pop(""), "the example itself fails"
    assert [name for name, tests in failures.items() if not tests] == []
