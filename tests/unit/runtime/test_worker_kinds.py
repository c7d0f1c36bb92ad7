"""Workers and endpoints of every make: each works as its class says, or is refused by its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium import Cluster, TensorRef, Worker, endpoint, only, shard
from podium.errors import ConfigError, WorkerStartError
from podium.runtime import Mesh
from podium.runtime.calls.relay import Outbox
from podium.runtime.group import RemoteGroup, WorkerHandle


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline") as cluster:
        yield cluster


def timed(function: Callable[..., Any]) -> Any:
    def wrapper(self: Any, value: Any) -> Any:
        return function(self, value)

    return wrapper


class Renamed(Worker):
    """Its endpoints are functions of other names."""

    @endpoint
    def score(self, value: Any) -> Any:
        return "score", value

    @endpoint(returns="ref")
    @timed
    def first(self, value: Any) -> Any:
        return value

    @endpoint
    @timed
    def second(self, value: Any) -> Any:
        return "second", value

    small = endpoint(lambda self, value: ("small", value))
    bound = endpoint(partial(lambda name, self, value: (name, value), "bound"))

    @endpoint
    @wraps(score.function)
    def careful(self, value: Any) -> Any:
        return "careful", value

    again = score


def test_an_endpoint_has_the_name_of_its_attribute(cluster: Cluster) -> None:
    """By the name of its function the worker would not find it, or find another one."""
    handle: Any = cluster.start(Renamed.bind())
    for name in ("score", "second", "small", "bound", "careful"):
        assert getattr(handle, name)(1) == [(name, 1)]
    assert handle.again(1) == [("score", 1)]
    assert Renamed.score.spec.name == "score", "a second name changes nothing of the first"
    (kept,) = handle.first(torch.ones(2))
    assert isinstance(kept, TensorRef), "what the endpoint declares holds under its name"


@dataclass(frozen=True)
class Frozen(Worker):
    bias: float = 0.5

    @endpoint
    def place(self) -> tuple[float, int]:
        return self.bias, self.ctx.rank


class Strict(Worker):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    @endpoint
    def place(self) -> int:
        return self.ctx.rank


def test_a_class_may_forbid_new_attributes(cluster: Cluster) -> None:
    assert cluster.start(Frozen.bind(2.0), cluster.pool(2)).place() == [(2.0, 0), (2.0, 1)]
    assert cluster.start(Strict.bind(), cluster.pool(2)).place() == [0, 1]


class OneOnly(Worker):
    made: OneOnly | None = None

    def __new__(cls) -> OneOnly:
        cls.made = cls.made or super().__new__(cls)
        return cls.made


class OwnContext(Worker):
    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx


class Hiding(Worker):
    def __init__(self) -> None:
        setattr(self, "loss", 0.5)  # noqa: B010 - a type checker refuses the plain line

    @endpoint
    def loss(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        (OneOnly.bind(), r"rank 1 of 2.*OneOnly\(\.\.\.\) is no worker of this rank.*made before"),
        (OwnContext.bind("mine"), r"OwnContext\(\.\.\.\) is no worker of this rank: its constructor sets self\.ctx"),
        (Hiding.bind(), r"Hiding: its constructor sets self\.loss to float, which hides the endpoint loss\(\)"),
    ],
)
def test_objects_that_are_no_workers_of_their_rank_are_refused(cluster: Cluster, bound: Any, says: str) -> None:
    with pytest.raises(WorkerStartError, match=says):
        cluster.start(bound, cluster.pool(2))


def test_what_is_no_method_is_refused_where_it_is_declared() -> None:
    def plain(self: Any) -> int:
        return 1

    kinds: list[Any] = [staticmethod(plain), classmethod(plain), property(plain), cached_property(plain), int, 3]
    for kind in [*kinds, partialmethod(plain)]:
        with pytest.raises(ConfigError, match=rf"is a {type(kind).__name__}; an endpoint is a plain method, def"):
            endpoint(kind)

    def values(self: Any) -> Iterator[int]:
        yield 1

    async def later_values(self: Any) -> Any:
        yield 1

    for generator in (values, later_values):
        with pytest.raises(ConfigError, match="is a generator, which cannot leave its process; return a list"):
            endpoint(generator)

    def __call__(self: Any) -> int:
        return 1

    with pytest.raises(ConfigError, match="__call__: a handle has no special methods"):
        endpoint(__call__)


class Names(Worker):
    def __init__(self, cls: int) -> None:
        self.cls = cls

    @endpoint
    def add(this, self: int) -> int:
        return this.cls + self


def test_parameters_may_have_any_names(cluster: Cluster) -> None:
    handle: Any = cluster.start(Names.bind(cls=2))
    assert handle.add(self=3) == [5]


class ClosesLater(Worker):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def touch(self) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(Path(self.path).touch)


def test_an_asynchronous_close_runs_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    workers = [cluster.start(ClosesLater.bind(str(tmp_path / "alone")), name="alone")]
    both = cluster.start(podium.colocate(one=ClosesLater.bind(str(tmp_path / "one")), two=Strict.bind()))
    for handle in (*workers, both.one):
        handle.group.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "one"]


def test_a_shipped_asynchronous_function_makes_workers_at_its_place(cluster: Cluster) -> None:
    async def make(worker: Strict) -> tuple[int, int]:
        await asyncio.sleep(0)
        return worker.ctx.rank, Strict().ctx.rank

    handle = cluster.start(Strict.bind(), cluster.pool(2), name="ships")
    assert handle.group.run(make) == [(0, 0), (1, 1)]


def test_numbers_that_are_none_are_refused_where_they_are_given(cluster: Cluster) -> None:
    handle: Any = cluster.start(Strict.bind(), name="numbers")
    wrong: list[Callable[[Any], object]] = [
        lambda number: Mesh(dp=number),
        lambda number: Mesh({"dp": number}),
        lambda number: shard(group_size=number),
        lambda number: handle.place.at_most(number),
    ]
    for number in (2.0, "2", None, True, 0):
        for use in wrong:
            with pytest.raises(ConfigError, match="expected a whole number from 1 up"):
                use(number)
    for rank in (1.0, "0", None):
        with pytest.raises(ConfigError, match=r"only\(rank=.*a rank is a whole number"):
            only(rank)  # pyright: ignore[reportArgumentType] - the point
        with pytest.raises(ConfigError, match=r"run_on\(rank="):
            handle.group.run_on(rank, lambda worker: 1)
    with pytest.raises(ConfigError, match=r"within\(timeout_s='60'\)"):
        handle.place.within("60")
    with pytest.raises(ConfigError, match=r"Mesh\(\[2\]\): expected axes"):
        Mesh([2])  # pyright: ignore[reportArgumentType, reportCallIssue] - the point


def test_a_process_that_a_worker_forked_cannot_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the worker's handles and no connection: nobody would hear of the call, nor end it at its deadline."""
    outbox = Outbox(lambda label, value: value)
    monkeypatch.setattr(Outbox, "here", outbox)
    handle: Any = WorkerHandle(RemoteGroup("key", "far", Strict, 1, 60.0))  # pyright: ignore[reportArgumentType]
    assert not handle.place.submit().done()
    outbox.process += 1
    with pytest.raises(ConfigError, match=r"far\.place: process \d+ is neither the script .* call in the worker, and"):
        handle.place.submit()


FORKS = """
import os, sys
from podium import Worker, endpoint
from podium.runtime import WorkerContext
from podium.runtime.worker import Bound
from podium.runtime.worker_process import WorkerProcess

class Forks(Worker):
    @endpoint
    def fork(self):
        if (child := os.fork()) == 0 and sys.argv[1] == "raises":
            raise ValueError("of the fork")
        return child

process = WorkerProcess()
values = {"name": "forks", "bound": Bound(Forks, (), {}), "context": WorkerContext(), "distributed": False}
process.execute(1, "", "construct", values)
child = process.execute(2, "forks", "fork", {}).value
os.write(1, f"answered by {'the worker' if child else 'a fork'}, ".encode())
os.write(1, f"which left {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}".encode() if child else b"")
"""


@pytest.mark.parametrize(("how", "says"), [("returns", ""), ("raises", "ValueError: of the fork")])
def test_a_fork_that_comes_back_from_an_endpoint_answers_nothing(how: str, says: str) -> None:
    """It has its parent's connections: its answers would be taken for those of other calls."""
    command = [sys.executable, "-c", FORKS, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stdout == "answered by the worker, which left 1", done.stderr
    assert "came back from forks.fork; it ends here, where a fork has to call os._exit()" in done.stderr
    assert says in done.stderr
