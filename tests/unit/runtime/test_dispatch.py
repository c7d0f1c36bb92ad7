"""Splitting arguments and joining results, without any process: plans, order, padding, wrong declarations."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from podium.data import Batch, Jagged
from podium.errors import ConfigError
from podium.runtime import Arguments, Mesh, Split, Worker, World, concat, endpoint, only, reduce, shard


def world(size: int) -> World:
    return World(size, {"default": Mesh(dp=size)})


def split(dispatch: shard, size: int, **values: Any) -> Split:
    return dispatch.split(Arguments("w.m", values), world(size))


def own(parts: Split, name: str) -> list[Any]:
    assert parts.own is not None
    return [part[name] for part in parts.own]


@pytest.mark.parametrize("seed", range(10))
def test_tokens_are_balanced_and_every_row_goes_once(seed: int) -> None:
    """Longest first to the lightest part is within 4/3 of the best possible (Graham 1969)."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, 200) for _ in range(rng.randint(1, 40))]
    size = rng.randint(1, 6)
    jagged = Jagged.from_rows([torch.full((length,), at) for at, length in enumerate(lengths)])
    parts = split(shard(balance="tokens"), size, rows=jagged)
    assert parts.plan is not None
    assert sorted(row for rows in parts.plan.rows for row in rows) == list(range(len(lengths)))
    assert all(list(rows) == sorted(rows) for rows in parts.plan.rows)
    assert parts.plan.tokens == tuple(sum(lengths[row] for row in rows) for rows in parts.plan.rows)
    best_possible = max(max(lengths), sum(lengths) / size)
    assert max(parts.plan.tokens) <= 4 / 3 * best_possible + 1
    joined = concat().collect("w.m", own(parts, "rows"), parts)
    assert torch.equal(joined.values, jagged.values)


def test_rows_of_a_group_stay_together_where_parts_stay_equal() -> None:
    def groups_of(lengths: list[int], groups: list[int], parts: int) -> list[list[int]]:
        rows = Jagged.from_rows([torch.zeros(length) for length in lengths])
        batch = Batch({"tokens": rows, "group": torch.tensor(groups)})
        dispatched = split(shard(balance="tokens"), parts, batch=batch)
        return [part.dense("group").tolist() for part in own(dispatched, "batch")]

    assert groups_of([5] * 8, [0, 1, 0, 1, 0, 1, 0, 1], 2) == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert groups_of([5] * 8, [0, 0, 0, 0, 1, 1, 1, 1], 4) == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert groups_of([5, 5, 5, 15], [0, 0, 0, 1], 2) == [[0, 0, 0], [1]]
    assert groups_of([9, 1, 1, 9], [0, 0, 1, 1], 2) == [[0, 0], [1, 1]]
    assert groups_of([9, 1, 9, 1], [0, 1, 0, 1], 2) == [[0, 1], [0, 1]]
    assert groups_of([5, 5], [7, 7], 1) == [[7, 7]]


@pytest.mark.parametrize("balance", ["rows", "tokens"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_padding_gives_parts_of_one_size_and_is_taken_off(balance: Any, count: int) -> None:
    rows = Jagged.from_rows([torch.full((at + 1,), at) for at in range(count)])
    batch = Batch({"tokens": rows, "n": torch.arange(count)})
    parts = split(shard(balance=balance, pad=True), 3, batch=batch)
    sizes = {len(part) for part in own(parts, "batch")}
    assert len(sizes) == 1
    assert sizes != {0}
    joined = concat().collect("w.m", own(parts, "batch"), parts)
    assert joined.dense("n").tolist() == list(range(count))


def test_ranks_that_share_a_coordinate_get_the_very_same_part() -> None:
    """It is packed once because it is the same object."""
    mesh = Mesh(dp=2, tp=2)
    parts = shard().split(Arguments("w.m", {"x": torch.arange(6)}), World(4, {"default": mesh}))
    assert parts.own is not None
    assert parts.own[0] is parts.own[1]
    assert parts.own[2] is parts.own[3]
    assert parts.own[1] is not parts.own[2]
    assert parts.collectors == (0, 2)


def test_row_parts_are_views() -> None:
    values = torch.arange(10.0)
    for part in own(split(shard(), 3, x=values), "x"):
        assert part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def test_arrays_and_lists_are_split_and_joined_without_torch() -> None:
    script = """if True:
        import sys, numpy, podium
        class Worker(podium.Worker):
            @podium.endpoint(dispatch=podium.shard(), collect=podium.concat())
            def same(self, rows):
                return rows
        with podium.connect("inline") as cluster:
            worker = cluster.start(Worker.bind(), cluster.pool([2]), distributed=False)
            print(worker.same({"a": numpy.arange(3), "b": ["x", "y", "z"]}), "torch" in sys.modules)
    """
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "{'a': array([0, 1, 2]), 'b': ['x', 'y', 'z']} False\n"


def test_arguments_that_are_not_given_are_not_sharded() -> None:
    declared = shard(args=("x", "mask"))
    assert own(split(declared, 2, x=[1, 2]), "x") == [[1], [2]]
    parts = split(declared, 2, x=[1, 2], mask=None, other="o")
    assert parts.shared == {"mask": None, "other": "o"}
    with pytest.raises(ConfigError, match=r"w\.m shards its arguments, but none of \['x', 'mask'\] was given"):
        split(declared, 2, other=1)


ARRAYS = [("sum", 4.0, 6.0), ("mean", 2.0, 3.0), ("min", 1.0, 2.0), ("max", 3.0, 4.0)]


@pytest.mark.parametrize(
    ("how", "values", "expected"),
    [
        ("sum", [1, 2, 3], 6),
        ("mean", [1.0, 2.0, 6.0], 3.0),
        ("min", [3, 1, 2], 1),
        ("max", [3.0, 1.0, 2.0], 3.0),
        ("sum", [{"a": 1, "b": 2}, {"a": 3, "b": 4}], {"a": 4, "b": 6}),
        *((how, [np.array([1.0, 4.0]), np.array([3.0, 2.0])], [low, high]) for how, low, high in ARRAYS),
        *((how, [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])], [low, high]) for how, low, high in ARRAYS),
    ],
)
def test_reduce(how: Any, values: Sequence[Any], expected: Any) -> None:
    ranks = range(len(values))
    got = reduce(how).collect("w.m", values, Split(ranks, {}, None, ranks))
    assert (got.tolist() if hasattr(got, "tolist") else got) == expected


def test_what_cannot_be_reduced_is_named() -> None:
    ranks = Split(range(2), {}, None, range(2))
    with pytest.raises(ConfigError, match=r"w\.m: ranks returned different entries: \[\['a'\], \['b'\]\]"):
        reduce("sum").collect("w.m", [{"a": 1}, {"b": 1}], ranks)
    with pytest.raises(ConfigError, match=r"w\.m: reduce\('mean'\) cannot reduce str"):
        reduce("mean").collect("w.m", ["a", "b"], ranks)
    with pytest.raises(ConfigError, match=r"different entries: \[\['a'\], 'int'\]"):
        reduce("sum").collect("w.m", [{"a": 1}, 1], ranks)
    with pytest.raises(ConfigError, match="needs an endpoint that shards"):
        reduce("mean", weight="rows").collect("w.m", [1.0, 2.0], ranks)
    with pytest.raises(ConfigError, match=r"needs shard\(balance='tokens'\)"):
        reduce("mean", weight="tokens").collect("w.m", [1.0, 2.0], split(shard(), 2, x=[1, 2]))


def test_an_endpoint_may_return_several_rows_for_every_row() -> None:
    parts = split(shard(), 3, x=[1, 2])
    assert concat().collect("w.m", [[], [1, 1, 1], [2, 2, 2]], parts) == [1, 1, 1, 2, 2, 2]
    assert concat().collect("w.m", [[], [], []], split(shard(), 3, x=[])) == []
    assert concat().collect("w.m", [{"loss": 1.0}] * 3, parts) == {"loss": 1.0}


def test_what_cannot_be_joined_is_named() -> None:
    parts = split(shard(balance="tokens"), 2, x=Jagged.from_rows([torch.ones(3), torch.ones(1), torch.ones(1)]))
    with pytest.raises(ConfigError, match=r"w\.m: the result of rank 1 has 1 row for the 2 rows that it got"):
        concat().collect("w.m", [[1], [2]], parts)
    with pytest.raises(ConfigError, match=r"the result of rank 0 is list and the result of rank 1 is Tensor"):
        concat().collect("w.m", [[1], torch.ones(2)], parts)
    with pytest.raises(ConfigError, match=r"rank 0 has 1 row for the 2 rows that it got; with pad=True"):
        concat().collect("w.m", [[1], [2, 3]], split(shard(pad=True), 2, x=[1, 2, 3]))
    with pytest.raises(
        ConfigError, match=r"w\.m: the result of rank 1 has 1 row for the 2 rows that it got, .* for its 2"
    ):
        concat().collect("w.m", [[1, 2], [3]], split(shard(), 2, x=[1, 2, 3, 4]))
    with pytest.raises(ConfigError, match=r"rank 1 has 2 rows for the 2 rows that it got, .* rank 0 has 4 for its 2"):
        concat().collect("w.m", [[1, 1, 2, 2], [3, 4]], split(shard(), 2, x=[1, 2, 3, 4]))
    with pytest.raises(ConfigError, match=r"rank 0 has 1 row for the 0 rows that it got"):
        concat().collect("w.m", [[9], [1]], split(shard(), 2, x=[1]))
    with pytest.raises(ConfigError, match=r"rank 0 has entries with unequal numbers of rows: {'a': 2, 'b': 1}"):
        concat().collect("w.m", [{"a": [1, 2], "b": [1]}] * 2, split(shard(), 2, x=[1, 2, 3, 4]))
    with pytest.raises(ConfigError, match=r"rank 0 and the result of rank 1 differ in their entries.*'[ab]'"):
        concat().collect("w.m", [{"a": [1]}, {"b": [1]}], split(shard(), 2, x=[1, 2]))


def test_wrong_declarations_are_refused_where_they_stand() -> None:
    for declare, says in (
        (lambda: shard(balance="bytes"), r"shard\(balance='bytes'\)"),  # pyright: ignore[reportArgumentType]
        (lambda: shard(args="batch"), r"shard\(args=\('batch',\)\)"),
        (lambda: reduce("average"), r"reduce\('average'\)"),  # pyright: ignore[reportArgumentType]
        (lambda: reduce("sum", weight="rows"), r"goes with 'mean'"),
        (lambda: endpoint(dispatch="shard"), r"endpoint\(dispatch='shard'\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
        (lambda: endpoint(collect=concat), r"endpoint\(collect=<class"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    ):
        with pytest.raises(ConfigError, match=says):
            declare()
    with pytest.raises(ConfigError, match=r"only\(rank=3\) in a group of 2 ranks"):
        only(rank=3).split(Arguments("w.m", {}), world(2))
    with pytest.raises(ConfigError, match=r"endpoint .*spread: parameter \*values.* has no name"):

        class Spread(Worker):
            @endpoint  # pyright: ignore[reportArgumentType, reportCallIssue]
            def spread(self, *values: int) -> None: ...

    with pytest.raises(ConfigError, match=r"endpoint .*Groups\.group: every worker has a 'group' already"):

        class Groups(Worker):
            @endpoint
            def group(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
                return 0

    with pytest.raises(
        ConfigError, match=r"endpoint .*Typo\.score: shard\(args=\.\.\.\) names \['bacth'\].*\['batch'\]"
    ):

        class Typo(Worker):
            @endpoint(dispatch=shard(args=("bacth",)))
            def score(self, batch: Batch) -> None: ...
