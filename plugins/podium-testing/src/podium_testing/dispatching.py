"""Contract: how arguments reach the ranks and how results become one."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from podium.data import Batch, Jagged, Rows as HasRows, fields
from podium.errors import ConfigError
from podium.runtime import Cluster, Handle, Mesh, concat, gather, nothing, per_rank, scatter, shard
from podium_testing.target import refuses, started
from podium_testing.values import make_batch, same_batch
from podium_testing.workers import Probe, Rows

__all__ = ["DispatchContract"]


@dataclasses.dataclass
class Letters(HasRows):
    """A user's own rows: the letters of a text."""

    text: str

    def __len__(self) -> int:
        return len(self.text)

    def slice(self, start: int, stop: int) -> Letters:
        return Letters(self.text[start:stop])

    def take(self, index: Sequence[int]) -> Letters:
        return Letters("".join(self.text[row] for row in index))

    @classmethod
    def concat(cls, parts: Sequence[Letters], names: Sequence[str] = ()) -> Letters:
        return Letters("".join(part.text for part in parts))


def _same(worker: Rows, rows: Any) -> Any:
    return rows


def _place(worker: Rows, value: Any) -> tuple[int, Any]:
    return worker.ctx.rank, value


GRID = Mesh(pp=2, dp=2, tp=2, output={"pp": -1})
ONES, THREE = torch.ones(3), make_batch([1, 2, 3])


class DispatchContract:
    probe = started(Probe.bind(bias=2.0), 3, name="shared_probe")
    rows = started(Rows.bind(), 3, name="shared_rows")
    grid = started(Rows.bind(), 8, name="shared_grid", meshes={"grid": GRID}, distributed=False)

    def test_broadcast_reaches_every_rank_and_gathers_in_rank_order(self, probe: Handle[Probe]) -> None:
        assert probe.rank() == [0, 1, 2]
        assert probe.echo({"a": [1, (2, None)]}) == [{"a": [1, (2, None)]}] * 3
        assert probe.echo(value="by keyword") == ["by keyword"] * 3
        assert probe.echo([1, 2, 3]) == [[1, 2, 3]] * 3, "a list as long as the group is like any other"

    def test_scatter_gives_each_rank_its_own_and_only_calls_one(self, probe: Handle[Probe]) -> None:
        assert probe.scattered(per_rank([10, 20, 30])) == [(0, 10, "-"), (1, 20, "-"), (2, 30, "-")]
        assert probe.scattered(per_rank([1, 2, 3]), common="c") == [(0, 1, "c"), (1, 2, "c"), (2, 3, "c")]
        assert probe.last() == [2]

    def test_first_nothing_and_reduce(self, probe: Handle[Probe]) -> None:
        assert probe.echo_once("one") == "one"
        before = probe.seen()
        assert probe.silent() is None
        assert probe.seen() == [count + 1 for count in before], "nothing() waits for every rank"
        assert probe.mean({"loss": 3.0, "kl": 1.0}) == {"loss": 3.0, "kl": 1.0}
        assert torch.equal(probe.added(2.0), torch.tensor([12.0, 12.0]))
        assert probe.largest() == 2
        assert torch.equal(probe.smallest(), torch.tensor([0, -2]))

    def test_a_users_own_dispatch_collect_and_keywords(self, probe: Handle[Probe]) -> None:
        assert probe.backwards() == [(2, 0), (1, 1), (0, 2)]
        assert probe.spread() == 4.0
        assert probe.options(x=1, y=2) == [{"x": 1, "y": 2}] * 3

    def test_the_script_chooses_ranks_and_the_endpoints_rules_hold_for_these(
        self, probe: Handle[Probe], rows: Handle[Rows]
    ) -> None:
        two = probe.group.on(slice(1, 3))
        assert probe.group.on(1).rank() == [1]
        assert probe.group.on(-1).rank.within(timeout_s=60.0).submit().result() == [2]
        assert two.rank() == [1, 2]
        assert probe.group.on([2, 0]).rank() == [2, 0]
        assert probe.group.on([2, 0]).scattered(per_rank([7, 8])) == [(2, 7, "-"), (0, 8, "-")]
        assert two.last() == [2]
        assert two.echo_once("x") == "x"
        assert two.largest() == 2
        assert rows.group.on(slice(1, 3)).received([1, 2, 3]) == [(1, [1]), (2, [2, 3])]
        batch = make_batch([3, 1, 4, 1, 5])
        assert same_batch(rows.group.on([2, 0]).same_by_tokens(batch), batch)
        before = probe.seen()
        two.silent()
        assert probe.seen() == [before[0], before[1] + 1, before[2] + 1], "the other ranks are not called"

    def test_ranks_that_cannot_be_chosen_are_named(self, probe: Handle[Probe], grid: Handle[Rows]) -> None:
        for wrong in (3, -4, [0, 3], "0", 0.5):
            refuses(ConfigError, rf"on\({re.escape(repr(wrong))}\) in shared_probe, which has 3", probe.group.on, wrong)
        for wrong in ([], [0, 0], slice(3, 3), [2, -1]):
            refuses(ConfigError, "at least one rank, and none of them twice", probe.group.on, wrong)
        says = r"shared_grid\.over_grid shards over mesh 'grid', which needs all ranks"
        refuses(ConfigError, says, grid.group.on([0, 1]).over_grid, [1])
        refuses(
            ConfigError, r"argument 'own' has 3 values for 1 rank", probe.group.on(0).scattered, per_rank([1, 2, 3])
        )

    def test_functions_are_shipped_with_every_dispatch_and_collect(
        self, rows: Handle[Rows], grid: Handle[Rows]
    ) -> None:
        batch = make_batch([3, 1, 4, 1, 5])
        joined = rows.group.function(_same, dispatch=shard(balance="tokens"), collect=concat())
        assert same_batch(joined(batch), batch)
        assert same_batch(joined.within(timeout_s=60.0).submit(rows=batch).result(), batch)
        ranks = rows.group.function(_place, on=[2, 1], dispatch=scatter())
        assert ranks.submit(per_rank([7, 8])).result() == [(2, 7), (1, 8)]
        assert grid.group.function(_place, dispatch=shard("grid"), collect=gather())([1, 2, 3]) == [
            (4, [1]),
            (6, [2, 3]),
        ]
        assert rows.group.function(_place, collect=nothing())(1) is None
        refuses(ConfigError, r"shared_rows\._same\(\) misses \['rows'\]", rows.group.function(_same))
        refuses(ConfigError, r"shared_rows\._same\(\) takes 1 positional", rows.group.run, _same, 1, 2)

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 12])
    def test_rows_are_split_evenly_and_joined_in_order(self, rows: Handle[Rows], count: int) -> None:
        numbers = list(range(count))
        parts = rows.received(numbers)
        assert [rank for rank, _ in parts] == [0, 1, 2]
        assert [row for _, part in parts for row in part] == numbers
        assert max(len(part) for _, part in parts) - min(len(part) for _, part in parts) <= 1
        assert rows.same(numbers) == numbers

    @pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 9, 2], [5, 5], [], [0, 0, 7]], ids=str)
    def test_batches_come_back_as_they_were(self, rows: Handle[Rows], lengths: list[int]) -> None:
        batch = make_batch(lengths)
        assert same_batch(rows.same(batch), batch)
        assert same_batch(rows.same_by_tokens(batch), batch)
        assert rows.same(batch).meta == {"temperature": 0.5}

    def test_every_kind_of_rows_can_be_sharded(self, rows: Handle[Rows]) -> None:
        tensor = torch.arange(14.0).reshape(7, 2)
        jagged = Jagged.from_rows([torch.arange(at) for at in range(1, 6)])
        assert torch.equal(rows.same(tensor), tensor)
        assert torch.equal(rows.same(jagged).values, jagged.values)
        assert torch.equal(rows.same_by_tokens(jagged).values, jagged.values)
        mixed = rows.same({"a": tensor, "b": list("abcdefg")})
        assert torch.equal(mixed["a"], tensor)
        assert mixed["b"] == list("abcdefg")
        assert torch.equal(rows.summed(torch.ones(5), {"x": torch.arange(5.0)}), torch.arange(5.0) + 1)

    def test_arrays_and_own_rows_stay_what_they_are(self, rows: Handle[Rows]) -> None:
        array = np.arange(14.0, dtype=np.float32).reshape(7, 2)
        for same in (rows.same, rows.same_padded):
            got = same(array)
            assert got.dtype == np.float32
            assert np.array_equal(got, array)
            assert same(Letters("abcdefg")) == Letters("abcdefg")
        assert rows.same(np.array(["a", "bcd", "ef", "g"])).tolist() == ["a", "bcd", "ef", "g"]
        assert len(rows.same(np.zeros((0, 2)))) == 0
        batch = rows.joined(Batch({"x": array}))
        assert torch.equal(batch.dense("x"), torch.from_numpy(array))

    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_nested_tensors_become_jagged(self, rows: Handle[Rows], layout: torch.layout) -> None:
        nested = torch.nested.nested_tensor([torch.arange(at) for at in (3, 1, 4, 2)], layout=layout)
        for same in (rows.same, rows.same_by_tokens, rows.same_padded):
            jagged = same(nested)
            assert isinstance(jagged, Jagged)
            assert [row.tolist() for row in jagged.unbind()] == [list(range(at)) for at in (3, 1, 4, 2)]
        assert isinstance(rows.same({"a": [1, 2, 3, 4], "b": nested, "c": 3})["b"], Jagged)

    def test_tokens_are_balanced_over_the_ranks(self, rows: Handle[Rows]) -> None:
        parts = rows.by_tokens(make_batch([100, 1, 1, 1, 50, 50, 97]))
        assert sum(len(part) for part in parts) == 7
        assert [len(part.jagged(fields.TOKENS).values) for part in parts] == [100, 100, 100]

    def test_padding_repeats_rows_and_concat_takes_them_off(self, rows: Handle[Rows]) -> None:
        assert rows.padded([1, 2, 3, 4]) == [[1, 1], [2, 2], [3, 4]]
        assert rows.padded([7]) == [[7], [7], [7]]
        for count in (1, 2, 4, 5, 6):
            assert rows.same_padded(list(range(count))) == list(range(count))
        batch = make_batch([2, 3, 4, 5])
        assert same_batch(rows.same_padded(batch), batch)
        refuses(ConfigError, r"shared_rows\.padded.*empty", rows.padded, [])

    def test_padding_is_chosen_at_the_call(self, rows: Handle[Rows]) -> None:
        assert [part for _, part in rows.received.pad()([1, 2, 3, 4])] == [[1, 1], [2, 2], [3, 4]]
        assert rows.padded.pad(False)([1, 2, 3, 4]) == [[1], [2], [3, 4]]
        assert rows.padded([7]) == [[7], [7], [7]], "the endpoint itself is as it was declared"
        assert rows.padded.pad(False).pad().within(60.0)([7]) == [[7], [7], [7]]
        for count in (1, 2, 5):
            assert rows.same.pad()([*range(count)]) == rows.same_padded.pad(False)([*range(count)]) == [*range(count)]
        batch = make_batch([9, 1, 1, 1])
        assert same_batch(rows.same_by_tokens.pad()(batch), batch)
        assert rows.group.on([0, 1]).padded.pad(False)([1]) == [[], [1]]
        assert rows.group.function(_pass_rows, dispatch=shard()).pad()([1, 2, 3, 4]) == [[1, 1], [2, 2], [3, 4]]
        refuses(ConfigError, r"\.received\(\)?.*cannot pad an empty|\.received.*empty", rows.received.pad(), [])

    def test_what_splits_no_rows_cannot_be_padded(self, cluster: Cluster) -> None:
        probe = cluster.start(Probe.bind(), name="unpadded", distributed=False)
        for endpoint in (probe.echo, probe.scattered, probe.last, probe.backwards):
            refuses(ConfigError, r"unpadded\.\w+\.pad\(True\): \w+ splits no rows", endpoint.pad)

    def test_single_values_beside_rows_reach_every_rank_and_come_back_as_one(self, rows: Handle[Rows]) -> None:
        arguments = {
            "x": torch.arange(4.0),
            "rate": 0.5,
            "name": "n",
            "none": None,
            "in": {"k": 2, "t": torch.tensor(3)},
        }
        for rank, part in rows.received(arguments):
            assert part["rate"] == 0.5
            assert (part["name"], part["none"], part["in"]["k"], int(part["in"]["t"])) == ("n", None, 2, 3)
            assert part["x"].tolist() == [[0.0], [1.0], [2.0, 3.0]][rank]
        for same in (rows.same, rows.same_padded):
            back = same(arguments)
            assert torch.equal(back["x"], arguments["x"])
            assert {**back, "x": 0} == {**arguments, "x": 0}
        assert rows.rows_and_rank([1, 2, 3]) == {"rows": [1, 2, 3], "rank": 1.0, "at": {"rank": 1.0}}
        assert rows.rows_and_ranks([1, 2, 3]) == {"rows": [1, 2, 3], "rank": [0, 1, 2]}
        says = r"rows_and_odd: .* rank 0\['rank'\] is 0 and the result of rank 1\['rank'\] is 1; .*concat\(scalars="
        refuses(ConfigError, says, rows.rows_and_odd, [1, 2, 3])

    def test_rows_of_one_group_stay_together(self, rows: Handle[Rows]) -> None:
        assert [part for _, part in rows.in_pairs(list(range(8)))] == [[0, 1], [2, 3], [4, 5, 6, 7]]
        batch = make_batch([9, 1, 5, 5, 1, 1, 2, 2, 30, 1])
        for _, part in rows.pairs_by_tokens(batch):
            firsts = part.dense(fields.REWARDS).int().tolist()
            assert all(b == a + 1 for a, b in zip(firsts[::2], firsts[1::2], strict=True))
        assert same_batch(rows.same_pairs_by_tokens(batch), batch)
        assert [part for _, part in rows.padded_pairs([1, 2, 3, 4])] == [[1, 2], [1, 2], [3, 4]]
        for wrong in (0, -1, 1.5):
            refuses(ConfigError, rf"shard\(group_size={wrong}\)", shard, group_size=wrong)

    def test_named_arguments_are_split_and_the_others_broadcast(self, rows: Handle[Rows]) -> None:
        parts = rows.scaled(torch.arange(4.0), 2.0, label="x")
        assert [part for part, _ in parts] == [[0.0], [2.0], [4.0, 6.0]]
        assert {label for _, label in parts} == {"x"}

    def test_columns_that_workers_add_are_in_row_order(self, rows: Handle[Rows]) -> None:
        joined = rows.joined(make_batch([1, 2, 3, 4, 5]))
        assert joined.dense("rank").tolist() == [0, 1, 1, 2, 2]
        assert joined.meta["seen_by"] == "a worker"

    def test_means_weighted_by_rows_and_tokens_are_those_of_the_whole(self, rows: Handle[Rows]) -> None:
        values = torch.tensor([1.0, 2.0, 3.0, 10.0])
        assert rows.mean_of_rows(values) == pytest.approx(4.0)
        assert rows.mean_of_rows(values[:1]) == pytest.approx(1.0)  # two parts are empty
        batch = make_batch([3, 1, 4, 1, 5])
        expected = float(batch.jagged(fields.TOKENS).values.double().mean())
        assert rows.mean_of_tokens(batch)["mean"] == pytest.approx(expected)

    def test_a_mesh_gives_rows_along_one_axis_and_collects_once_a_coordinate(self, grid: Handle[Rows]) -> None:
        assert grid.over_grid([0, 1, 2, 3, 4]) == [(4, [0, 1]), (6, [2, 3, 4])]
        grid.note([0, 1, 2, 3, 4])
        assert grid.notes() == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]] * 2
        assert grid.over_tp([5, 6]) == [(4, 5), (5, 6)]

    def test_the_callers_batch_is_not_changed(self, rows: Handle[Rows]) -> None:
        batch, kept = make_batch([3, 1, 4, 1, 5]), make_batch([3, 1, 4, 1, 5])
        rows.same_padded(batch)
        rows.same_by_tokens(batch)
        assert same_batch(batch, kept)
        assert batch.meta == kept.meta

    @pytest.mark.parametrize(
        ("method", "args", "kwargs", "says"),
        [
            ("echo", (), {}, r"shared_probe\.echo\(\) misses \['value'\]"),
            ("echo", (1, 2), {}, r"shared_probe\.echo\(\) takes 1 positional argument and got 2"),
            ("echo", (1,), {"value": 2}, r"shared_probe\.echo\(\) got \['value'\] twice"),
            ("echo", (1,), {"wrong": 2}, r"shared_probe\.echo\(\) has no parameter \['wrong'\]"),
            ("echo", (per_rank([1, 2, 3]),), {}, r"shared_probe\.echo: argument 'value' is per_rank"),
            ("scattered", (per_rank([1, 2]),), {}, r"shared_probe\.scattered: argument 'own' has 2 values for 3 ranks"),
            ("scattered", (1,), {}, r"shared_probe\.scattered scatters: wrap at least one argument in per_rank"),
            ("echo_once", (per_rank([1, 2, 3]),), {}, r"shared_probe\.echo_once: argument 'value'"),
        ],
        ids=lambda value: value if isinstance(value, str) and "\\" not in value else "",
    )
    def test_wrong_arguments_are_named_before_anything_is_sent(
        self, probe: Handle[Probe], method: str, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
    ) -> None:
        before = probe.seen()
        refuses(ConfigError, says, getattr(probe, method).submit, *args, **kwargs)
        assert probe.seen() == before

    @pytest.mark.parametrize(
        ("method", "args", "says"),
        [
            ("same", (5,), r"shared_rows\.same cannot shard: argument 'rows' is int, which has no rows"),
            ("same", ("abc",), r"argument 'rows' is str, which has no rows"),
            ("same", (torch.tensor(1.0),), r"argument 'rows' is a single number, a tensor without dimensions"),
            ("same", ({"a": [1], "b": (1, 2)},), r"argument 'rows'\['b'\] is tuple, which has no rows"),
            ("same", ({"a": 1, "b": {"c": 2}},), r"argument 'rows' has no entry with rows"),
            ("in_pairs", ([1, 2, 3],), r"in_pairs: 3 rows are no whole number of groups of 2 rows"),
            ("same", ({"a": [1], "b": [1, 2]},), r"argument 'rows' has entries with unequal numbers of rows: \{'a': 1"),
            ("summed", (torch.ones(2), {"x": torch.ones(3)}), r"unequal numbers of rows: \{'left': 2, 'right': 3\}"),
            ("same", (per_rank([1, 2, 3]),), r"argument 'rows' is per_rank"),
            ("scaled", (torch.ones(3), per_rank([1.0, 2.0, 3.0])), r"argument 'factor' is per_rank"),
            ("same_by_tokens", ([1, 2],), r"argument 'rows' has no jagged column whose tokens"),
            ("over_grid", ([1],), r"no mesh 'grid' in this group; it has \['default'\]"),
        ],
    )
    def test_what_cannot_be_sharded_is_named(
        self, rows: Handle[Rows], method: str, args: tuple[Any, ...], says: str
    ) -> None:
        refuses(ConfigError, says, getattr(rows, method).submit, *args)

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ("type", "returned range, not a Split"),
            ("none", r"has ranks=\[\]; they are some of 0\.\.2"),
            ("outside", r"has ranks=\[0, 3\]; they are some of 0\.\.2"),
            ("twice", r"has ranks=\[0, 0\], some of them twice"),
            ("own", r"has 1 entry in own= for 3 ranks; it needs one for each"),
            ("collectors", r"collects from ranks \[1\], which it does not call"),
            ("plan", "plans rows for 1 part and collects from 3 ranks"),
            ("order", r"has a RowPlan that is contiguous=True, and sends rows in another order: \[0, 3, 1, 2\]"),
            ("padding", "has a RowPlan that has padding for 1 of 3 parts"),
        ],
    )
    def test_a_users_dispatch_that_splits_wrongly_is_named(self, probe: Handle[Probe], wrong: str, says: str) -> None:
        before = probe.seen()
        refuses(ConfigError, rf"^shared_probe\.wrongly: the Split of Wrong {says}", probe.wrongly.submit, wrong)
        assert probe.seen() == before

    @pytest.mark.parametrize(
        ("given", "odd", "says"),
        [
            (ONES, torch.tensor(1.0), "rank 2 is a single number, without dimensions"),
            (ONES, [1.0], "rank 0 is Tensor and the result of rank 2 is list"),
            (ONES, ONES.long()[:1], r"rank 0 has rows of float32\[\] and .* rank 2 has rows of int64\[\]"),
            (ONES[:, None], torch.ones(1, 3), r"rank 0 has rows of float32\[1\] and .* rank 2 .* float32\[3\]"),
            (np.ones(3), np.ones(1, np.float32), r"rank 0 has rows of float64\[\] and .* rank 2 .* float32\[\]"),
            ({"a": [1, 2, 3]}, {"b": [1]}, r"rank 0 and the result of rank 2 differ in their entries: only one .*'a'"),
            ({"a": ONES}, {"a": ONES.half()}, r"rank 0\['a'\] has rows of float32.*rank 2\['a'\] .*16"),
            (THREE, Batch({fields.TOKENS: [1]}), r"rank 0 has the column 'finish_reason' .*rank 2 has not"),
            (THREE, THREE.with_columns(rewards=ONES.double()), r"column 'rewards': .* 0 .*float32\[\] .* 2 .* float64"),
        ],
    )
    def test_results_that_do_not_fit_together_are_named_with_their_ranks(
        self, rows: Handle[Rows], given: Any, odd: Any, says: str
    ) -> None:
        refuses(ConfigError, rf"^shared_rows\.with_odd_last: .*{says}", rows.with_odd_last, given, odd)

    def test_results_without_rows_are_named(self, rows: Handle[Rows]) -> None:
        says = r"shared_rows\.no_rows: the result of rank 0 is int, which has no rows"
        refuses(ConfigError, says, rows.no_rows, [1, 2, 3])

    def test_what_is_no_endpoint_is_named_with_what_there_is(self, probe: Handle[Probe]) -> None:
        for name, says in (
            (
                "helper",
                r"'helper' is no endpoint of Probe; its endpoints are .*'echo'.*put @endpoint before it, or call",
            ),
            ("ecko", r"'ecko' is no endpoint of Probe; .*; did you mean echo\?"),
            ("restart", r"shared_probe\.group\.restart"),
        ):
            refuses(AttributeError, says, getattr, probe, name)
        assert not hasattr(probe, "bias")

    def test_an_endpoint_tells_its_signature_and_its_help(self, probe: Handle[Probe]) -> None:
        assert str(inspect.signature(probe.scattered)) == "(own: 'int', common: 'str' = '-') -> 'tuple[int, int, str]'"
        plain = vars(pydoc)["plaintext"]
        assert str(inspect.signature(Probe.scattered)).startswith("(self, own: 'int'")
        assert "wrongly(value: 'str') -> 'str'" in pydoc.render_doc(probe.wrongly, renderer=plain)
        for shown in (probe.wrongly, Probe.wrongly, Probe):
            assert "Return what it got." in pydoc.render_doc(shown, renderer=plain)

    def test_a_call_in_the_place_of_its_result_says_how_to_pass_it(self, rows: Handle[Rows]) -> None:
        call: Any = rows.same.submit([1, 2, 3])
        refuses(ConfigError, r"argument 'rows' is Call.*pass its result, by call\.arg\(\)", rows.same, call)
        assert rows.same(call.arg()) == [1, 2, 3]


def _pass_rows(worker: Rows, rows: list[int]) -> list[int]:
    return rows
