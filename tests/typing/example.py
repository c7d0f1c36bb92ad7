"""What an editor knows of a worker across the wire. test_typing.py runs pyright on this file and compares what it
reveals with the comment behind each line; nothing here is executed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, reveal_type

from torch import Tensor

import podium
from podium import (
    Batch,
    Handle,
    Mesh,
    Worker,
    concat,
    endpoint,
    first,
    gather,
    nothing,
    only,
    per_rank,
    reduce,
    scatter,
    shard,
)
from podium.runtime import Arguments, Collect, Colocated, Dispatch, Split, World, colocate


class Spread(Collect[float, tuple[float, float]]):
    """A user's own collect."""

    def collect(self, method: str, results: Sequence[float], split: Split) -> tuple[float, float]:
        return min(results), max(results)


class Twice(Dispatch):
    """A user's own dispatch."""

    def split(self, arguments: Arguments, world: World) -> Split:
        return Split(range(world.size), arguments.values, None, range(world.size))


class Scorer(Worker):
    def __init__(self, bias: float, *, name: str = "") -> None:
        self.bias = bias

    @endpoint
    def plain(self, x: int, label: str = "") -> str:
        """Documented."""
        return label * x

    @endpoint(dispatch=shard(), collect=concat())
    def score(self, batch: Batch) -> Batch:
        return batch

    @endpoint(collect=first())
    def metrics(self) -> dict[str, float]:
        return {}

    @endpoint(dispatch=only(rank=1), collect=gather())
    def gathered(self) -> Tensor: ...

    @endpoint(collect=nothing())
    def silent(self, path: str) -> int:
        return 0

    @endpoint(collect=reduce("mean"))
    def mean(self) -> float:
        return 0.0

    @endpoint(collect=Spread(), dispatch=Twice())
    def spread(self) -> float:
        return 0.0

    @endpoint(dispatch=scatter())
    def scattered(self, seed: int) -> bytes: ...

    @endpoint
    async def soon(self, x: int) -> bool:
        return x > 0

    @endpoint(collect=first(), concurrent=True)
    async def soon_first(self) -> bool:
        return True


class Inside(Scorer):
    """Inside a worker, endpoints are its plain methods."""

    @endpoint
    def plain(self, x: int, label: str = "") -> str:
        reveal_type(super().plain)  # (x: int, label: str = "") -> str
        return super().plain(x, label)

    @endpoint
    def untyped(self, x: Any) -> Any: ...

    async def use(self, other: Critic, batch: Batch) -> None:
        reveal_type(self.plain)  # (x: int, label: str = "") -> str
        reveal_type(self.plain(3, label="a"))  # str
        reveal_type(self.score(batch))  # Batch
        reveal_type(self.metrics())  # dict[str, float]
        reveal_type(self.silent("p"))  # int
        reveal_type(self.spread())  # float
        reveal_type(self.scattered(3))  # bytes
        reveal_type(self.soon(1))  # Coroutine[Any, Any, bool]
        reveal_type(await self.soon(1))  # bool
        reveal_type(await self.soon_first())  # bool
        reveal_type(self.untyped(1))  # Any
        reveal_type(other.value(batch, 1.0))  # list[float]
        reveal_type(self.ctx)  # WorkerContext
        reveal_type(self.ctx.declare_mesh("model", tp=0, dp=1, output={"pp": -1}))  # None


class Agent(Worker):
    """A worker that is given a handle reads it as the script does."""

    def __init__(self, scorer: Handle[Scorer]) -> None:
        self.scorer = scorer

    @endpoint
    async def play(self) -> None:
        reveal_type(self.scorer.plain(3))  # list[str]
        reveal_type(await self.scorer.soon.submit(3))  # list[bool]


class Critic(Scorer):
    @endpoint(dispatch=shard(args=("batch",)))
    def value(self, batch: Batch, temperature: float) -> list[float]: ...


class Both(Colocated):
    scorer: Handle[Scorer]
    critic: Handle[Critic]


def handed(scorer: Handle[Scorer]) -> None:
    reveal_type(scorer.plain(3))  # list[str]


def chosen_at_the_call(scorer: Handle[Scorer]) -> None:
    scored = scorer.score.submit(Batch({}))
    reveal_type([scored.arg()])  # list[Batch]
    reveal_type({"a": scored.arg()})  # dict[str, Batch]
    reveal_type(scorer.score.pad())  # Endpoint[(batch: Batch), Batch]
    reveal_type(scorer.score.pad(False).submit(scored.arg()))  # Call[Batch]
    reveal_type(podium.connect("inline").pool(2, gpus=1, accelerator="H100"))  # ResourcePool
    reveal_type(scorer.group.env)  # Mapping[str, str]
    reveal_type(scorer.group.meshes["model"])  # Mesh
    reveal_type(Mesh.from_coordinates([{"dp": 0}], output={"pp": -1}))  # Mesh


def any_kind(cluster: podium.Cluster, kind: type[Scorer]) -> Handle[Scorer]:
    return cluster.start(kind.bind(0.5))


async def main() -> None:
    cluster = podium.connect("inline")
    pool = cluster.pool([2])
    reveal_type(Scorer.bind(0.5, name="x"))  # Bound[type[Scorer]]
    scorer = cluster.start(Scorer.bind(0.5), pool)
    reveal_type(scorer)  # type[Scorer]
    reveal_type(scorer.plain)  # Endpoint[(x: int, label: str = ""), list[str]]
    reveal_type(scorer.plain(1, label="a"))  # list[str]
    reveal_type(scorer.plain.submit(1))  # Call[list[str]]
    reveal_type(scorer.plain.submit(1).result())  # list[str]
    reveal_type(scorer.plain.within(timeout_s=3.0))  # Endpoint[(x: int, label: str = ""), list[str]]
    reveal_type(await scorer.plain.submit(1))  # list[str]
    batch = scorer.metrics.submit().result()
    reveal_type(batch)  # dict[str, float]
    scored = scorer.score.submit(Batch({}))
    reveal_type(scored)  # Call[Batch]
    reveal_type(scored.arg())  # Batch
    reveal_type(scorer.score(scored.arg()))  # Batch
    reveal_type(scorer.gathered())  # list[Tensor]
    reveal_type(scorer.silent("p"))  # None
    reveal_type(scorer.mean())  # float
    reveal_type(scorer.spread())  # tuple[float, float]
    reveal_type(per_rank([1, 2]))  # int
    reveal_type(scorer.scattered(per_rank([1, 2])))  # list[bytes]
    reveal_type(scorer.soon(1))  # list[bool]
    reveal_type(scorer.soon_first())  # bool
    critic = cluster.start(Critic.bind(1.0), into=scorer)
    reveal_type(critic.value)  # Endpoint[(batch: Batch, temperature: float), list[list[float]]]
    reveal_type(critic.score(Batch({})))  # Batch
    reveal_type(critic.group)  # WorkerGroup[Critic]
    reveal_type(critic.group.on(1).score)  # Endpoint[(batch: Batch), Batch]
    reveal_type(critic.group.on(slice(2)).plain.submit(1))  # Call[list[str]]
    reveal_type(critic.group.function(_shipped))  # Endpoint[(x: int), list[str]]
    reveal_type(critic.group.function(_shipped, on=1, collect=first()).submit(3))  # Call[str]
    reveal_type(critic.group.function(_shipped, collect=nothing())(x=3))  # None
    reveal_type(critic.group.function(_measured, collect=Spread())())  # tuple[float, float]
    reveal_type(critic.group.run(_shipped, 3))  # list[str]
    reveal_type(critic.group.run_on(1, _shipped, x=3))  # str
    reveal_type(cluster.start(colocate(a=Scorer.bind(1.0)), pool))  # Colocated
    both = cluster.start(colocate(Both, scorer=Scorer.bind(1.0), critic=Critic.bind(1.0)), pool)
    reveal_type(both.critic.score)  # Endpoint[(batch: Batch), Batch]
    reveal_type(both.critic.group)  # WorkerGroup[Critic]
    handed(scorer)
    handed(critic)
    handed(critic.group.on(0))
    reveal_type(any_kind(cluster, Critic).plain(3))  # list[str]
    cluster.start(Agent.bind(critic))
    replicas = cluster.start_replicas(Critic.bind(1.0), 2)
    reveal_type(replicas)  # Replicas[type[Critic]]
    reveal_type(replicas[0].plain(3))  # list[str]
    scorer.group.restart()


def _measured(worker: Critic) -> float:
    return worker.bias


def _shipped(worker: Critic, x: int) -> str:
    return f"{worker.bias} {x}"
