"""How samples become rows: turns, warm-ups, medians, and which way round a ratio reads."""

from __future__ import annotations

import pytest

from bench.measure import alternate, compare


def test_subjects_take_turns_in_an_order_that_rotates() -> None:
    calls: list[str] = []

    def subject(name: str, figure: float) -> float:
        calls.append(name)
        return figure

    figures = alternate({name: lambda name=name: subject(name, len(calls)) for name in "abc"}, repetitions=3, warmups=1)

    rounds = ["".join(calls[start : start + 3]) for start in range(0, 12, 3)]
    assert sorted(rounds[1:]) == ["abc", "bca", "cab"]
    assert all(len(samples) == 3 for samples in figures.values())
    assert min(min(samples) for samples in figures.values()) >= 3  # the first round was a warm-up


@pytest.mark.parametrize(("better", "ratio"), [("lower", 2.0), ("higher", 0.5)])
def test_a_ratio_over_one_means_that_podium_is_better(better: str, ratio: float) -> None:
    row = compare("x", {"podium": [1.0, 9.0, 2.0], "peer": [4.0]}, unit="ms", floor="none", scale=10, better=better)  # type: ignore[arg-type]
    assert row.median == 20
    assert row.ratio == {"peer": ratio}


def test_rows_are_written_with_the_keys_that_readers_rely_on() -> None:
    row = compare("noop_8_local", {"podium": [1e-4], "pipe": [5e-5]}, unit="us", scale=1e6, floor="pipe: a byte")
    read = row.as_json()
    assert {key: read[key] for key in ("name", "median", "unit", "ratio", "floor")} == {
        "name": "noop_8_local",
        "median": 100.0,
        "unit": "us",
        "ratio": {"pipe": 0.5},
        "floor": "pipe: a byte",
    }
