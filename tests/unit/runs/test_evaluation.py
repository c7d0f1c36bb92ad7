"""The statistics of an evaluation, against published values."""

from __future__ import annotations

import pytest

from podium.runs.evaluation import Evaluation, gain_interval


def found(correct: int, items: int) -> Evaluation:
    return Evaluation(step=0, correct=correct, items=items, reward_mean=0.0)


@pytest.mark.parametrize(
    ("correct", "items", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_a_share_is_the_published_one(correct: int, items: int, low: float, high: float) -> None:
    assert found(correct, items).interval() == pytest.approx((low, high), abs=5e-5)


def test_the_interval_holds_the_share_at_both_ends() -> None:
    for items in (1, 7, 500):
        for correct in (0, items):
            low, high = found(correct, items).interval()
            assert 0 <= low <= correct / items <= high <= 1


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10: p1 - p2.
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_gain_is_the_published_one(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    assert gain_interval(found(*other), found(*one)) == pytest.approx((low, high), abs=5e-5)
