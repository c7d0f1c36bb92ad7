"""The share of a step outside worker calls: the union of spans that overlap, clipped to the step."""

from __future__ import annotations

import pytest

from bench.measure import covered


@pytest.mark.parametrize(
    ("spans", "total"),
    [
        ([], 0),
        ([(10, 20), (30, 35)], 15),
        ([(15, 30), (10, 20), (12, 14)], 20),
        ([(0, 12), (38, 99)], 4),
        ([(0, 5), (50, 60)], 0),
    ],
)
def test_spans_count_once_and_only_within_the_step(spans: list[tuple[int, int]], total: int) -> None:
    assert covered(spans, 10, 40) == total
