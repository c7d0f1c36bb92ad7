"""What is reduced is what each rank returned: nothing is dropped, broadcast, cut off or joined in its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium import Handle, Worker, concat, endpoint, per_rank, reduce, shard
from podium.errors import ConfigError
from podium.runtime import Collect, Split
from podium.runtime.dispatch import PerRank


class Echo(Worker):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint(dispatch=shard(), collect=concat())
    def rows(self, value: Any) -> Any:
        return value


@pytest.fixture(scope="module")
def pair() -> Iterator[Handle[Echo]]:
    with podium.connect("inline") as cluster:
        yield cluster.start(Echo.bind(), cluster.pool(2), name="pair")


def reduced(pair: Any, how: Any, values: Sequence[Any]) -> Any:
    return pair.group.function(lambda worker, values: values[worker.ctx.rank], collect=reduce(how))(values)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, torch.tensor, lambda value: np.array([value])])
@pytest.mark.parametrize("how", ["min", "max", "sum", "mean"])
def test_nan_of_any_rank_is_seen(pair: Handle[Echo], how: str, kind: Any) -> None:
    """Python's max(1.0, nan) is 1.0, and max(nan, 1.0) is nan."""
    for values in ([1.0, math.nan], [math.nan, 1.0]):
        total = reduced(pair, how, [kind(value) for value in values])
        assert np.isnan(np.asarray(total)).all()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32"])
def test_sums_of_small_numbers_do_not_overflow(pair: Handle[Echo], dtype: str) -> None:
    top = 1 if dtype == "bool" else int(np.iinfo(dtype).max)
    array = np.array([top, 0]).astype(dtype)
    for values in ([array] * 2, [torch.from_numpy(array)] * 2, [array[0]] * 2):
        assert np.asarray(reduced(pair, "sum", values)).reshape(-1)[0] == 2 * top
        assert np.asarray(reduced(pair, "mean", values)).reshape(-1)[0] == pytest.approx(top)


def test_half_floats_are_summed_in_float32_and_stay_half_floats(pair: Handle[Echo]) -> None:
    for dtype, value in ((torch.float16, 40_000.0), (torch.bfloat16, 3.0)):
        mean = reduced(pair, "mean", [torch.tensor([value], dtype=dtype)] * 2)
        assert mean.dtype == dtype
        assert mean.item() == value
    assert reduced(pair, "mean", [np.float16(40_000)] * 2) == 40_000
    assert reduced(pair, "sum", [torch.ones(1, dtype=torch.bfloat16), torch.ones(1)]).dtype == torch.float32


@pytest.mark.parametrize("how", ["min", "max", "sum", "mean"])
@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(3), torch.ones(1)],
        [torch.ones(3), torch.ones(2)],
        [torch.ones(2, 1), torch.ones(2)],
        [np.ones(3), np.ones(1)],
        [torch.ones(2), 1.0],
        [1.0, np.ones(2)],
    ],
)
def test_values_of_different_shapes_are_not_broadcast(pair: Handle[Echo], how: str, values: Any) -> None:
    with pytest.raises(ConfigError, match=rf"reduce\('{how}'\): the ranks returned values of different shapes, .*\[\("):
        reduced(pair, how, values)


@pytest.mark.parametrize("how", ["min", "max", "sum", "mean"])
@pytest.mark.parametrize("value", [[1, 2], (1,), "a", b"a", np.array(["a"]), np.str_("a")])
def test_what_python_joins_or_compares_is_no_number(pair: Handle[Echo], how: str, value: Any) -> None:
    for values, label in (([value] * 2, ""), ([{"loss": value}] * 2, r"\['loss'\]")):
        with pytest.raises(ConfigError, match=rf"{label}: reduce\('{how}'\) cannot reduce \w+"):
            reduced(pair, how, values)


def test_entries_that_differ_are_named(pair: Handle[Echo]) -> None:
    with pytest.raises(ConfigError, match=r"ranks returned different entries: \[\['1'\], \[1\]\]"):
        reduced(pair, "sum", [{"1": 1.0}, {1: 1.0}])


@pytest.mark.parametrize("values", [{0: "a", 1: "b"}, {"a", "b"}, "ab", b"ab"])
def test_values_for_each_rank_are_in_a_list(values: Any) -> None:
    """A dict would give each rank a key, and a text a letter."""
    with pytest.raises(ConfigError, match=r"per_rank\(\w+\): expected a list with one value for each rank"):
        per_rank(values)
    assert [*PerRank(range(2)).values] == [0, 1]


def test_rows_keep_their_masks(pair: Handle[Echo]) -> None:
    masked = np.ma.masked_array(np.arange(5), mask=np.arange(5) % 2 == 1)
    joined = pair.rows(masked)
    assert np.array_equal(np.ma.getmaskarray(joined), masked.mask)


def test_rows_of_tensors_that_cannot_be_cut_are_named(pair: Handle[Echo]) -> None:
    with pytest.raises(ConfigError, match=r"argument 'value' is a tensor of layout torch\.sparse_coo, .*to_dense"):
        pair.rows(torch.eye(4).to_sparse())


def test_a_single_element_travels_at_any_stride(pair: Handle[Echo]) -> None:
    """As the values of one row, values[:, -1], are. torch calls it contiguous, and views no bytes of it."""
    for dtype in (torch.bfloat16, torch.complex64, torch.float32, torch.float8_e4m3fn):
        column = torch.arange(4).to(dtype).reshape(1, 4)[:, 1]
        (value, _) = pair.echo(column)
        assert (value.dtype, value.shape, value.to(torch.complex64).item()) == (dtype, (1,), 1)


class Chooses(Collect[Any, Any]):
    def __init__(self, ranks: Any) -> None:
        self.chosen = ranks

    def ranks(self, split: Split) -> Sequence[int]:
        return self.chosen

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        return list(results)


@pytest.mark.parametrize("ranks", [[5], [-1], [0, 2], "0", None, iter([0]), [None]])
def test_a_users_collect_names_ranks_that_are_called(pair: Handle[Echo], ranks: Any) -> None:
    """Whoever hears the replies would fail on other ranks, and the caller would wait until its deadline."""
    with pytest.raises(ConfigError, match=r"pair\.<lambda>: Chooses\.ranks\(\) returned .*expected a list of some of"):
        pair.group.function(lambda worker: worker.ctx.rank, collect=Chooses(ranks))()


def test_a_users_collect_may_choose_some_ranks(pair: Handle[Echo]) -> None:
    assert pair.group.function(lambda worker: worker.ctx.rank, collect=Chooses([1]))() == [1]
    assert pair.group.function(lambda worker: worker.ctx.rank, collect=Chooses(range(0)))() == []
    with pytest.raises(ConfigError, match=r"returned \[0\]; expected a list of some of \[1\]"):
        pair.group.function(lambda worker: 1, on=1, collect=Chooses([0]))()
