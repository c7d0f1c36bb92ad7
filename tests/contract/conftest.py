"""Marks the tests of the contract suite that `make test` leaves out on some backends."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.contract.everyday import ENGINES_NIGHTLY, is_exhaustive

PARAMETERS = pytest.StashKey[defaultdict[str, set[str]]]()
"""The parameters with which each test of the suite was collected, whether it is selected or not."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.parent is None or not isinstance(item, pytest.Function):
        return
    of_engines = item.parent.name == "TestEngines" and item.originalname in ENGINES_NIGHTLY
    if of_engines and item.callspec.id not in ("native", "transformers", "vllm"):
        item.add_marker(pytest.mark.exhaustive)
    if item.parent.name != "TestBackends":
        return
    # pytest names the target first: [ray], or [ray-large] for a test that has parameters of its own.
    target, _, parameters = item.callspec.id.partition("-")
    item.config.stash.setdefault(PARAMETERS, defaultdict(set))[item.originalname].add(parameters)
    if is_exhaustive(item.originalname, target, parameters):
        item.add_marker(pytest.mark.exhaustive)
