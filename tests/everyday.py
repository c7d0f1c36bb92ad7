"""Which cases of a grid run every day: one of each kind. ``make test-all`` runs the others, too.

A test of a list of cases names those that run every day: ``@pytest.mark.everyday("llama", "gpt2")``. A test of a
product of parameters has ``@pytest.mark.each_value``: each value of each parameter runs every day, but not all of
their combinations. Where a list is longer than its names, ``mark_others`` chooses by the value of a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest

__all__ = ["mark_other_cases", "mark_others", "select_each_value"]


def mark_others(cases: Iterable[Any], is_everyday: Callable[[Any], bool]) -> list[Any]:
    """Return the parameters of a test for ``pytest.mark.parametrize``, those that are not everyday as exhaustive.

    A case that is a tuple has the values of several parameters.

    >>> [param.marks for param in mark_others("ab", "a".__eq__)]
    [(), (MarkDecorator(mark=Mark(name='exhaustive', args=(), kwargs={})),)]
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if is_everyday(case) else pytest.mark.exhaustive
        )
        for case in cases
    ]


def mark_other_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as exhaustive the cases that do not run every day by the marks ``everyday`` and ``each_value``.

    Raises:
        pytest.UsageError: a test with the mark ``everyday`` has none of the cases that the mark names.
    """
    for function, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        tests = [case for case in cases if hasattr(case, "callspec") and not _has_other_days(case)]
        if tests and (mark := tests[0].get_closest_marker("everyday")):
            others = [test for test in tests if test.callspec.id not in mark.args]
            if len(others) == len(tests) > 1:
                raise pytest.UsageError(f"{function} has no case of {mark.args}: it has {_list_ids(tests)}")
        elif tests and tests[0].get_closest_marker("each_value"):
            kept = select_each_value([test.callspec.params for test in tests])
            others = [test for index, test in enumerate(tests) if index not in kept]
        else:
            continue
        if len(tests) > 1:  # a case that is asked for by its name runs
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


def _has_other_days(test: pytest.Item) -> bool:
    """Whether something else decides when ``test`` runs: it is exhaustive, or tests/ray_selection.py selects it."""
    return any(test.get_closest_marker(mark) for mark in ("exhaustive", "ray"))


def _list_ids(tests: Sequence[pytest.Item]) -> list[str]:
    return [test.nodeid.partition("[")[2].removesuffix("]") for test in tests]
