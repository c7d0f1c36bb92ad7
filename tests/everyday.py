"""Which cases of a grid run every day: one of each kind. ``make test-all`` runs the others, too.

A test of a list of cases names those that run every day: ``@pytest.mark.everyday("llama", "gpt2")``. A test of a
product of parameters has ``@pytest.mark.each_value``: each value of each parameter runs every day, but not all of
their combinations. The other cases are ``exhaustive``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

__all__ = ["mark_other_cases", "select_each_value"]


def mark_other_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as exhaustive the cases that do not run every day by the marks ``everyday`` and ``each_value``.

    Where the command line asks for cases by their ids, or for the tests that failed last (``--lf``), nothing is marked:
    all of these run.

    Raises:
        pytest.UsageError: the mark ``everyday`` of a test has a name that is none of its cases.
    """
    if items and _asks_for_cases(items[0].config):
        return
    functions = defaultdict[str, list[Any]](list)  # the cases of one need not follow each other
    for item in items:
        if hasattr(item, "callspec") and not _has_other_days(item):
            functions[item.nodeid.partition("[")[0]].append(item)
    for function, tests in functions.items():
        if mark := tests[0].get_closest_marker("everyday"):
            others = [test for test in tests if test.callspec.id not in mark.args]
            ids = [test.callspec.id for test in tests]
            if absent := [name for name in mark.args if name not in ids]:
                raise pytest.UsageError(f"{function} has no case {_join(absent)}; its cases are {_join(ids)}")
        elif tests[0].get_closest_marker("each_value"):
            kept = select_each_value([test.callspec.params for test in tests])
            others = [test for index, test in enumerate(tests) if index not in kept]
        else:
            continue
        for test in others:
            test.add_marker(pytest.mark.exhaustive)


def select_each_value(cases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the indices of a few ``cases`` in which each value of each parameter occurs.

    Values are compared as objects: pytest gives those of one list to all cases.

    >>> sorted(select_each_value([{"a": a, "b": b} for a in "xyz" for b in (False, True)]))
    [0, 3, 4]
    """
    values = [{(name, id(value)) for name, value in case.items()} for case in cases]
    missing = set[tuple[str, int]]().union(*values)
    selected = set[int]()
    while missing:
        index = max(range(len(values)), key=lambda index: (len(values[index] & missing), -index))
        selected.add(index)
        missing -= values[index]
    return selected


def _asks_for_cases(config: pytest.Config) -> bool:
    return config.getoption("lf", False) or any("[" in argument for argument in config.args)


def _has_other_days(test: pytest.Item) -> bool:
    """Whether something else decides when ``test`` runs: it is exhaustive, or tests/ray_selection.py selects it."""
    return any(test.get_closest_marker(mark) for mark in ("exhaustive", "ray"))


def _join(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
