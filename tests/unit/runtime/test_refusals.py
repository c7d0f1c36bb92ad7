"""Arguments that no cluster can take: each is refused in words when it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import podium
from podium import Cluster, Handle, Worker, concat, endpoint, shard
from podium.errors import CallCancelled, ConfigError, EndpointError, PodiumError


class Echo(Worker):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ask_itself(self, me: Any) -> Any:
        return me.echo(1)

    @endpoint(concurrent=True)
    def peek(self) -> int:
        return 5

    @endpoint
    def peek_at(self, me: Any) -> Any:
        return me.peek()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(cluster: Cluster) -> Handle[Echo]:
    return cluster.start(Echo.bind(), name="the_echo")


@pytest.mark.parametrize("slots", [2.0, "2", [2.0], np.array([[1, 1]]), 1.5, [1, "1"], float("nan"), object()])
def test_slots_that_are_no_whole_numbers(cluster: Cluster, slots: Any) -> None:
    for given in ({"slots": slots}, {"spread": slots}):
        with pytest.raises(ConfigError, match=r"pool\(.*whole"):
            cluster.pool(**given)
    with pytest.raises(ConfigError, match=r"split\(.*whole"):
        cluster.pool(2).split(slots)


def test_slots_may_be_whole_numbers_of_any_kind(cluster: Cluster) -> None:
    kinds: list[Any] = [np.int64(2), np.array([2]), (2,)]
    assert [len(cluster.pool(slots)) for slots in kinds] == [2, 2, 2]
    assert [len(part) for part in cluster.pool(4).split(kinds[1].repeat(2))] == [2, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": "5"}, "timeout_s='5'"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"start_timeout_s": None}, "start_timeout_s=None"),
        ({"start_timeout_s": -1}, "start_timeout_s=-1"),
        ({"env": {"A": 1}}, r"env=.'A': 1"),
        ({"env": {"A=B": "1"}}, "env=.'A=B'"),
        ({"env": {"A": "\0"}}, "env=.'A'"),
        ({"env": {"A": "x" * (128 << 10)}}, "env=.'A': .*too long for Linux.*pass the text to the constructor"),
        ({"env": {"A": "\ud800"}}, "env=.'A'.*its text"),
        ({"env": [("A", "1")]}, "env=list .*expected a dict of names"),
        ({"env": "A=1"}, "env=str 'A=1'.*expected a dict of names"),
        ({"name": "n" * 101}, "at most 100 letters"),
        ({"name": 5}, "name=5"),
        ({"meshes": {"default": 1}}, "expected a mesh, as in"),
    ],
)
def test_arguments_of_a_start(cluster: Cluster, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster.start(Echo.bind(), **given)


def test_a_limit_may_be_infinite(cluster: Cluster) -> None:
    handle = cluster.start(Echo.bind(), start_timeout_s=float("inf"), timeout_s=float("inf"))
    assert handle.echo.submit(1).result(float("inf")) == [1]


@pytest.mark.parametrize("first", [0.5, 1.0, "1", float("nan"), 2, -1])
def test_a_number_of_calls_to_wait_for(echo: Handle[Echo], first: Any) -> None:
    with pytest.raises(ConfigError, match=r"wait\(first=.*a whole number from 0 to the 1 calls"):
        podium.wait([echo.echo.submit(1)], first=first)


def test_what_is_no_call_cannot_be_waited_for(echo: Handle[Echo]) -> None:
    with pytest.raises(ConfigError, match=r"int is no call; endpoint.submit\(\.\.\.\) returns one"):
        podium.wait([echo.echo.submit(1), 5])  # pyright: ignore[reportArgumentType] - the point
    assert len(podium.wait(echo.echo.submit(1) for _ in range(2))[0]) == 2  # pyright: ignore[reportArgumentType]


def test_what_belongs_to_another_cluster(cluster: Cluster, echo: Handle[Echo]) -> None:
    pool = cluster.pool(1, cpus=1)
    with podium.connect("inline") as other:
        for use in (lambda: other.release(pool), lambda: other.start(Echo.bind(), pool)):
            with pytest.raises(ConfigError, match="belongs to another cluster"):
                use()
        with pytest.raises(ConfigError, match="of another cluster"):
            other.start(Echo.bind(), into=echo)
    assert echo.echo(1) == [1], "the other cluster's end is not this one's"
    cluster.release(pool)
    cores = cluster.nodes[0].resources["cpu"]
    cluster.release(cluster.pool(1, cpus=cores))  # all that it held is free again
    cluster.release(pool)


def test_replicas_draw_from_seeds_of_their_own(cluster: Cluster) -> None:
    def seeds(**how: Any) -> list[int]:
        replicas = cluster.start_replicas(Echo.bind(), 2, **how)
        drawn = [handle.group.run_on(0, lambda worker: worker.ctx.seed) for handle in replicas]
        replicas.close()
        return drawn

    assert len({*seeds(), *seeds(seed=5)}) == 4
    assert seeds(seed=5) == seeds(seed=5)
    with pytest.raises(ConfigError, match=r"start_replicas\(count=1\.0\): a whole number from 1 up"):
        cluster.start_replicas(Echo.bind(), 1.0)  # pyright: ignore[reportArgumentType] - the point


def test_a_mask_is_no_choice_of_ranks(echo: type[Echo]) -> None:
    """True and False are whole numbers to Python: a mask would choose the ranks 1 and 0."""
    ranks: list[Any] = [np.array([0]), np.int64(-1)]
    assert [echo.group.on(some).echo(3) for some in ranks] == [[3], [3]]
    masks: list[Any] = [[False], False, np.array([True])]
    for mask in masks:
        with pytest.raises(ConfigError, match=r"on\(.*: a rank, a slice or a list"):
            echo.group.on(mask)


def test_a_group_that_is_closed_while_a_call_is_sent(cluster: Cluster) -> None:
    pair = cluster.start(Echo.bind(), cluster.pool(2), name="pair")
    with pytest.raises(CallCancelled, match="group pair was closed while this call was in flight"):
        pair.group.run(lambda worker, pair: pair.group.close(), pair)


def test_a_worker_that_would_wait_for_itself(cluster: Cluster, echo: Handle[Echo]) -> None:
    """In one thread that is a deadlock for ever, and no deadline ends it."""
    with pytest.raises(EndpointError, match=r"the_echo\.echo: a worker of the same processes called it"):
        echo.ask_itself(echo)
    back = cluster.start(Echo.bind(), name="back")
    with pytest.raises(EndpointError, match=r"the_echo\.echo: a worker of the same processes called it"):
        echo.group.run(lambda me, back, echo: back.ask_itself(echo), back, echo)
    assert echo.peek_at(echo) == [[5]], "a concurrent endpoint runs beside the caller"
    assert echo.echo(2) == [2]


class Declares(Worker):
    def __init__(self, *meshes: tuple[Any, dict[str, Any]]) -> None:
        for name, how in meshes:
            self.ctx.declare_mesh(name, **how)

    @endpoint
    def declare(self) -> None:
        self.ctx.declare_mesh("late", dp=0)

    @endpoint(dispatch=shard(), collect=concat())
    def score(self, rows: list[int]) -> list[int]:
        return rows

    @endpoint(dispatch=shard("m", axis="tp"))
    def over_tp(self, rows: list[int]) -> list[int]:
        return rows


@pytest.mark.parametrize(
    ("meshes", "says"),
    [
        ([("", {"dp": 0})], r"declare_mesh\(''\): the first argument is the mesh's name"),
        ([(3, {"dp": 0})], r"declare_mesh\(3\): the first argument is the mesh's name"),
        ([("m", {"dp": 0}), ("m", {"dp": 1})], r"declare_mesh\('m'\): this rank has declared .*before, and now"),
        ([("m", {"dp": 0, "output": ["dp"]})], r"declare_mesh\('m', output=\['dp'\]\): expected an axis"),
        ([("m", {"dp": 0, "output": {"dp": "last"}})], r"mesh 'm', which its workers .*output of axis 'dp' is 'last'"),
        ([("m", {"dp": "0"})], r"declare_mesh\('m'\): coordinates are whole numbers"),
    ],
)
def test_what_a_worker_declares_wrongly(cluster: Cluster, meshes: Any, says: str) -> None:
    with pytest.raises(PodiumError, match=says):
        cluster.start(Declares.bind(*meshes))


def test_a_mesh_is_declared_in_the_constructor_and_has_the_axis_of_the_call(cluster: Cluster) -> None:
    handle = cluster.start(Declares.bind(("m", {"dp": 0}), ("m", {"dp": 0})), name="declares")
    with pytest.raises(EndpointError, match=r"declare_mesh\('late'\): .*declare it in the constructor"):
        handle.declare()
    with pytest.raises(
        ConfigError, match=r"declares\.over_tp shards over axis 'tp' of mesh 'm', whose axes are \['dp'\]"
    ):
        handle.over_tp([1])


@pytest.mark.parametrize("pad", [3, "yes", None, 1])
def test_padding_is_true_or_false(cluster: Cluster, pad: Any) -> None:
    handle = cluster.start(Declares.bind(), name="pads")
    with pytest.raises(ConfigError, match=rf"pads\.score\.pad\({pad}\): pad={pad!r}: expected True.* or False"):
        handle.score.pad(pad)
    with pytest.raises(ConfigError, match=rf"pad={pad!r}: expected True"):
        shard(pad=pad)
    handle.group.close()


@pytest.mark.parametrize("kind", [100, ["H100"], None])
def test_the_kind_of_an_accelerator_is_text(cluster: Cluster, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"pool\(accelerator=.*expected words of a model"):
        cluster.pool(1, gpus=1, accelerator=kind)
