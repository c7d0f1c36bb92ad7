"""Rows of unequal length."""

from __future__ import annotations

import pytest
import torch

from podium.data import Jagged
from podium.errors import DataError

ROWS = [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4]), torch.tensor([5, 6])]


def lists(jagged: Jagged) -> list[list[int]]:
    return [row.tolist() for row in jagged.unbind()]


def test_rows_go_in_and_come_out() -> None:
    jagged = Jagged.from_rows(ROWS)
    assert len(jagged) == 4
    assert jagged.lengths.tolist() == [3, 0, 1, 2]
    assert lists(jagged) == [[1, 2, 3], [], [4], [5, 6]]
    assert jagged.row(3).tolist() == [5, 6]
    assert [row.tolist() for row in jagged] == lists(jagged)
    assert len(Jagged.from_rows([])) == 0


def test_values_may_have_more_dimensions() -> None:
    jagged = Jagged.from_rows([torch.ones(2, 3), torch.zeros(1, 3)])
    assert jagged.padded(9.0).shape == (2, 2, 3)
    assert jagged.take([1]).row(0).shape == (1, 3)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 2), (0, 0), (3, 4)])
def test_slices_are_views_of_the_rows(start: int, stop: int) -> None:
    jagged = Jagged.from_rows(ROWS)
    part = jagged.slice(start, stop)
    assert lists(part) == lists(jagged)[start:stop]
    if len(part.values):
        part.values[0] = 99
        assert 99 in jagged.values


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 0], [1], [2, 2, 0], []], ids=str)
def test_take_copies_rows_in_the_order_given(index: list[int]) -> None:
    jagged = Jagged.from_rows(ROWS)
    taken = jagged.take(index)
    assert lists(taken) == [lists(jagged)[row] for row in index]
    assert lists(jagged.take(torch.tensor(index, dtype=torch.int64))) == lists(taken)
    taken.values.add_(100)
    assert lists(jagged) == [[1, 2, 3], [], [4], [5, 6]]


def test_padding_is_on_the_right() -> None:
    jagged = Jagged.from_rows(ROWS)
    assert jagged.padded(0).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0], [5, 6, 0]]
    assert jagged.padded(-1, length=4).shape == (4, 4)
    assert Jagged.from_rows([]).padded(0).shape == (0, 0)
    with pytest.raises(DataError, match="cannot pad rows of up to 3 values to 2"):
        jagged.padded(0, length=2)


def test_concat_and_like() -> None:
    jagged = Jagged.from_rows(ROWS)
    assert lists(Jagged.concat([jagged, jagged.slice(0, 1)])) == [*lists(jagged), [1, 2, 3]]
    doubled = jagged.like(jagged.values.float() * 2)
    assert lists(doubled) == [[2, 4, 6], [], [8], [10, 12]]


@pytest.mark.parametrize(
    "offsets",
    [[0, 2], [1, 3], [0, 2, 1, 3], [], [[0, 3]], [0.0, 3.0]],
    ids=["too short", "does not start at 0", "falls", "empty", "two dimensions", "floats"],
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="offsets of a Jagged"):
        Jagged(torch.arange(3), torch.tensor(offsets))
