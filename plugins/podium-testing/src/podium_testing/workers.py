"""The workers that the contract suite starts. Their endpoints are declared in every way that a user can write."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium import broadcast, concat, endpoint, first, gather, nothing, only, reduce, scatter, shard
from podium.runtime import Arguments, Collect, Dispatch, RowPlan, Split, Worker, World

if TYPE_CHECKING:  # torch takes seconds to import, which a worker without tensors saves
    from torch import Tensor

    from podium.data import Batch

__all__ = ["Agent", "Counter", "Framework", "Holder", "Keeper", "Place", "Probe", "RaisesOn", "Rows", "Sleeper"]
__all__ += ["Stash"]


class Backwards(Dispatch):
    """A user's own dispatch, which calls the ranks in reverse order and tells each its turn."""

    def split(self, arguments: Arguments, world: World) -> Split:
        ranks = list(reversed(range(world.size)))
        return Split(ranks, arguments.values, [{"turn": turn} for turn in range(world.size)], ranks)


class Spread(Collect[float, float]):
    """A user's own collect, which returns the largest result minus the smallest."""

    def collect(self, method: str, results: Sequence[float], split: Split) -> float:
        return max(results) - min(results)


class Wrong(Dispatch):
    """A user's own dispatch that is not right in the way that the call asks for."""

    def split(self, arguments: Arguments, world: World) -> Split:
        every, values = range(world.size), arguments.values
        wrong = {
            "type": every,
            "none": Split([], values, None, []),
            "outside": Split([0, world.size], values, None, [0]),
            "twice": Split([0, 0], values, None, [0]),
            "own": Split(every, values, [{}], every),
            "collectors": Split([0], values, None, [1]),
            "plan": Split(every, values, None, every, RowPlan(([0],), (0,), True)),
            "order": Split(every, values, None, every, RowPlan(([0, 3], [1], [2]), (0, 0, 0), True)),
            "padding": Split(every, values, None, every, RowPlan(([0], [1], [2]), (0,), False)),
        }
        return wrong[arguments.values["value"]]  # pyright: ignore[reportReturnType] - the point


class Probe(Worker):
    """Returns what it is given, and counts calls."""

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = bias * self.ctx.rank
        self.calls = 0

    @endpoint
    def echo(self, value: Any) -> Any:
        self.calls += 1
        return value

    @endpoint(collect=first())
    def echo_once(self, value: Any) -> Any:
        return value

    @endpoint
    def overwrite(self, value: Tensor) -> float:
        """Add this rank's number and one to what was received, in place."""
        value += self.ctx.rank + 1
        return float(value.sum())

    @endpoint(dispatch=broadcast(), collect=gather())
    def rank(self) -> int:
        return self.ctx.rank

    @endpoint(dispatch=only(rank=-1))
    def last(self) -> int:
        return self.ctx.rank

    @endpoint(dispatch=scatter())
    def scattered(self, own: int, common: str = "-") -> tuple[int, int, str]:
        return self.ctx.rank, own, common

    @endpoint(collect=nothing())
    def silent(self) -> str:
        self.calls += 1
        return "unheard"

    @endpoint(collect=reduce("mean"))
    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value * self.ctx.rank for name, value in values.items()}

    @endpoint(collect=reduce("sum"))
    def added(self, value: float) -> Tensor:
        import torch

        return torch.full((2,), value * (self.ctx.rank + 1))

    @endpoint(collect=reduce("max"))
    def largest(self) -> int:
        return self.ctx.rank

    @endpoint(collect=reduce("min"))
    def smallest(self) -> Tensor:
        import torch

        return torch.tensor([self.ctx.rank, -self.ctx.rank])

    @endpoint(dispatch=Backwards())
    def backwards(self, turn: int = -1) -> tuple[int, int]:
        return self.ctx.rank, turn

    @endpoint(dispatch=Wrong())
    def wrongly(self, value: str) -> str:
        """Return what it got."""
        return value

    @endpoint(collect=Spread())
    def spread(self) -> float:
        return self.bias

    @endpoint
    def seen(self) -> int:
        return self.calls

    @endpoint
    def options(self, **named: int) -> dict[str, int]:
        return named

    @endpoint
    def fail(self, ranks: Sequence[int], error: BaseException) -> int:
        if self.ctx.rank in ranks:
            raise error
        return self.ctx.rank

    def helper(self) -> str:
        """This method is no endpoint."""
        return "not for the controller"


class Rows(Worker):
    """Its endpoints split rows in every way."""

    @endpoint(dispatch=shard())
    def received(self, rows: Any) -> tuple[int, Any]:
        return self.ctx.rank, rows

    @endpoint(dispatch=shard(), collect=concat())
    def same(self, rows: Any) -> Any:
        return rows

    @endpoint(dispatch=shard(balance="tokens"), collect=concat())
    def same_by_tokens(self, rows: Any) -> Any:
        return rows

    @endpoint(dispatch=shard(balance="tokens"))
    def by_tokens(self, rows: Any) -> Any:
        return rows

    @endpoint(dispatch=shard(pad=True))
    def padded(self, rows: Any) -> Any:
        return rows

    @endpoint(dispatch=shard(pad=True), collect=concat())
    def same_padded(self, rows: Any) -> Any:
        return rows

    @endpoint(dispatch=shard(args=("rows",)))
    def scaled(self, rows: Tensor, factor: float, label: str = "") -> tuple[list[float], str]:
        return (rows * factor).tolist(), label

    @endpoint(dispatch=shard(), collect=concat(scalars=reduce("mean")))
    def rows_and_rank(self, rows: list[int]) -> dict[str, Any]:
        return {"rows": rows, "rank": self.ctx.rank, "at": {"rank": self.ctx.rank}}

    @endpoint(dispatch=shard(), collect=concat(scalars=gather()))
    def rows_and_ranks(self, rows: list[int]) -> dict[str, Any]:
        return {"rows": rows, "rank": self.ctx.rank}

    @endpoint(dispatch=shard(), collect=concat())
    def rows_and_odd(self, rows: list[int]) -> dict[str, Any]:
        return {"rows": rows, "rank": self.ctx.rank}

    @endpoint(dispatch=shard(group_size=2))
    def in_pairs(self, rows: list[int]) -> tuple[int, list[int]]:
        return self.ctx.rank, rows

    @endpoint(dispatch=shard(group_size=2, pad=True))
    def padded_pairs(self, rows: list[int]) -> tuple[int, list[int]]:
        return self.ctx.rank, rows

    @endpoint(dispatch=shard(group_size=2, balance="tokens"))
    def pairs_by_tokens(self, rows: Batch) -> tuple[int, Batch]:
        return self.ctx.rank, rows

    @endpoint(dispatch=shard(group_size=2, balance="tokens"), collect=concat())
    def same_pairs_by_tokens(self, rows: Batch) -> Batch:
        return rows

    @endpoint(dispatch=shard(), collect=concat())
    def summed(self, left: Tensor, right: Mapping[str, Tensor]) -> Tensor:
        return left + right["x"]

    @endpoint(dispatch=shard(), collect=concat())
    def joined(self, batch: Batch) -> Batch:
        import torch

        rank = torch.full((len(batch),), self.ctx.rank)
        return batch.with_columns(rank=rank).with_meta(seen_by="a worker")

    @endpoint(dispatch=shard(), collect=reduce("mean", weight="rows"))
    def mean_of_rows(self, rows: Tensor) -> float:
        return float(rows.mean()) if len(rows) else float("nan")

    @endpoint(dispatch=shard(balance="tokens"), collect=reduce("mean", weight="tokens"))
    def mean_of_tokens(self, batch: Batch) -> dict[str, float]:
        from podium.data import fields

        return {"mean": float(batch.jagged(fields.TOKENS).values.double().mean())}

    @endpoint(dispatch=shard("grid"))
    def over_grid(self, rows: list[int]) -> tuple[int, list[int]]:
        return self.ctx.rank, rows

    @endpoint(dispatch=shard("grid"), collect=nothing())
    def note(self, rows: list[int]) -> None:
        self.noted = rows

    @endpoint
    def notes(self) -> list[int]:
        return self.noted

    @endpoint(dispatch=shard("grid", axis="tp"), collect=concat())
    def over_tp(self, rows: list[int]) -> list[tuple[int, int]]:
        return [(self.ctx.rank, row) for row in rows]

    @endpoint(dispatch=shard(), collect=concat())  # pyright: ignore[reportArgumentType, reportCallIssue] - the point
    def no_rows(self, rows: list[int]) -> int:
        return len(rows)

    @endpoint(dispatch=shard(args=("rows",)), collect=concat())
    def with_odd_last(self, rows: Any, odd: Any) -> Any:
        """Return the rows, but ``odd`` from the last rank."""
        return odd if self.ctx.rank == self.ctx.world_size - 1 else rows


class Sleeper(Worker):
    """Its calls take time, and leave notes of what ran."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.event = threading.Event()
        self.entered = 0

    @endpoint
    def sleep(self, seconds: float, label: str = "sync") -> str:
        time.sleep(seconds)
        self.log.append(label)
        return label

    @endpoint
    async def nap(self, seconds: float, label: str = "async") -> str:
        self.entered += 1
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append(f"{label} cancelled")
            raise
        self.log.append(label)
        return label

    @endpoint
    def begun(self, seconds: float, kind: str) -> Any:
        """Return what is not done yet."""
        if kind == "coroutine":
            return self.nap(seconds, kind)
        return ThreadPoolExecutor(1).submit(lambda: self.sleep(seconds, kind))

    @endpoint
    async def begun_async(self, seconds: float, kind: str) -> Any:
        return asyncio.ensure_future(self.nap(seconds, kind))  # pyright: ignore[reportArgumentType, reportCallIssue]

    @endpoint
    def note(self, label: str) -> None:
        self.log.append(label)

    @endpoint
    def history(self) -> list[str]:
        return list(self.log)

    @endpoint(concurrent=True)
    def peek(self) -> list[str]:
        return list(self.log)

    @endpoint
    def wait_for_event(self, seconds: float, label: str = "") -> bool:
        """Return whether the event was set within ``seconds``. A label is noted then."""
        self.entered += 1
        was_set = self.event.wait(seconds)
        self.log += [label] if label else []
        return was_set

    @endpoint(concurrent=True)
    def count_entered(self) -> int:
        """How many calls of ``nap`` and ``wait_for_event`` have begun."""
        return self.entered

    @endpoint(concurrent=True)
    def set_event(self) -> None:
        self.event.set()

    @endpoint(concurrent=True)
    async def set_event_async(self) -> None:
        self.event.set()

    @endpoint
    def double(self, value: Any) -> Any:
        return value * 2

    @endpoint
    def forget(self) -> None:
        """Be as after the start."""
        self.log.clear()
        self.event.clear()
        self.entered = 0


class Counter(Worker):
    """Counts. Another worker may hold one as an ordinary object."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @endpoint
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    @endpoint(dispatch=shard(), collect=concat())
    def doubled(self, rows: list[int]) -> list[int]:
        return [2 * row for row in rows]


class Keeper(Worker):
    """Holds a worker of its own, finds its colocated neighbors, and leaves a file when it is closed."""

    def __init__(self, start: int = 0, closed_into: Path | None = None) -> None:
        self.inner = Counter(start=start + self.ctx.rank)
        self.closed_into = closed_into

    @endpoint
    def inner_add(self, amount: int) -> tuple[int, int, list[int]]:
        """Call endpoints of the inner worker, which are plain methods here: no dispatch, no list of ranks."""
        return self.inner.add(amount), self.inner.ctx.rank, self.inner.doubled([1, 2])  # pyright: ignore[reportReturnType]

    @endpoint
    def neighbors(self) -> list[str]:
        return sorted(self.ctx.colocated)

    @endpoint
    def add_to_neighbor(self, name: str, amount: int) -> int:
        return self.ctx.colocated[name].add(amount)

    def close(self) -> None:
        """Leave the file. The runtime calls this method when the group is closed."""
        if self.closed_into is not None:
            (self.closed_into / f"closed-{self.ctx.rank}").touch()


class Holder(Worker):
    """Changes the arguments that it was made of."""

    def __init__(self, names: list[str], table: dict[str, Tensor], weight: Tensor) -> None:
        self.names, self.table, self.weight = names, table, weight

    @endpoint
    def change(self) -> tuple[list[str], float, float]:
        self.names.append("changed")
        self.table["w"] += 1
        self.weight += 1
        return self.names, float(self.table["w"].sum()), float(self.weight.sum())


class RaisesOn(Worker):
    """Its constructor raises on one rank."""

    def __init__(self, rank: int) -> None:
        if self.ctx.rank == rank:
            raise ValueError(f"rank {rank} does not want to start")


class Place(Worker):
    """Tells what it knows about its place."""

    def __init__(self) -> None:
        self.at_start = (self.ctx.rank, self.ctx.world_size)

    @endpoint
    def facts(self) -> dict[str, Any]:
        names = ("rank", "world_size", "local_rank", "local_world_size", "node", "devices", "role", "threads")
        return {name: getattr(self.ctx, name) for name in names} | {"at_start": self.at_start}

    @endpoint
    def seeds(self) -> int:
        return self.ctx.seed


class Framework(Worker):
    """Declares a mesh as a framework lays it out, with the pipeline's stage varying fastest and ``dp`` backwards."""

    def __init__(self, fault: str = "") -> None:
        rank, last = self.ctx.rank, self.ctx.world_size - 1
        coordinates = {"dp": (last - rank) // 2, "pp": rank % 2, "cp": 0}
        if rank == last:
            coordinates |= {"twice": {"pp": 0}, "a gap": {"dp": 3}, "other axes": {"ep": 0}}.get(fault, {})
        if (rank, fault) != (last, "silence"):
            output = {"pp": 0 if (rank, fault) == (last, "another output") else -1}
            self.ctx.declare_mesh("train" if fault == "a name of the script" else "model", output=output, **coordinates)

    @endpoint(dispatch=shard("model"), collect=concat())
    def rows_and_ranks(self, rows: list[int]) -> list[tuple[int, int]]:
        return [(row, self.ctx.rank) for row in rows]

    @endpoint(dispatch=shard("model"))
    def parts(self, rows: list[int]) -> list[int]:
        return rows

    @endpoint(dispatch=shard("model"), collect=concat())
    def one_more(self, rows: list[int]) -> list[int]:
        return [*rows, 0] if self.ctx.rank == self.ctx.world_size - 1 else rows


class Agent(Worker):
    """Calls the endpoints of other groups, whose handles it was given."""

    def __init__(self, helper: Any = None) -> None:
        self.helper = helper

    @endpoint
    def ask(self, method: str, *, handle: Any = None, timeout_s: float = 600.0, values: Sequence[Any] = ()) -> Any:
        """Call an endpoint and wait for it."""
        return getattr(handle or self.helper, method).within(timeout_s)(*values)

    @endpoint
    async def ask_many(self, method: str, values: Sequence[Any]) -> list[Any]:
        """Call an endpoint for each value, and await all."""
        return await asyncio.gather(*[getattr(self.helper, method).submit(value) for value in values])

    @endpoint
    def ask_padded(self, method: str, value: Any, pad: bool) -> Any:
        """Call an endpoint with or without padding."""
        return getattr(self.helper, method).pad(pad)(value)

    @endpoint
    def begin(self, method: str, value: Any) -> Any:
        """Return a call that has not ended."""
        return getattr(self.helper, method).submit(value)

    @endpoint
    def keep_rows(self, rows: int) -> list[Any]:
        """Have references made and used elsewhere, and return one of them."""
        first, second = self.helper.make(rows, 1000)
        return [type(first).__name__, self.helper.total(second), second]

    @endpoint
    def tensor_total(self, rows: int) -> list[float]:
        """Send a tensor of one's own, and change it at once."""
        import torch

        value = torch.ones(rows, 1000)
        call = self.helper.total.submit(value)
        value.zero_()
        return call.result()

    @endpoint
    def reach(self, name: str) -> Any:
        """Read an attribute of the group at the handle."""
        return getattr(self.helper.group, name)


class Stash(Probe):
    """Makes, reads, keeps and passes on references."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    @endpoint(returns="ref")
    def make(self, rows: int, width: int) -> Tensor:
        """Return float32 ``[rows, width]``, filled with this rank's number."""
        import torch

        return torch.full((rows, width), float(self.ctx.rank))

    @endpoint(returns="ref", collect=first())
    def put(self, value: Any) -> Any:
        return value

    @endpoint(dispatch=shard(), collect=concat(), returns="ref")
    def double(self, batch: Batch) -> Batch:
        return batch.with_columns(x=batch.dense("x") * 2)

    @endpoint(dispatch=shard(balance="tokens"), collect=concat(), returns="ref")
    def balanced(self, batch: Batch) -> Batch:
        return batch

    @endpoint(dispatch=shard(pad=True), collect=concat(), returns="ref")
    def padded(self, batch: Batch) -> Batch:
        return batch

    @endpoint(dispatch=shard(), collect=concat())
    def values(self, batch: Batch) -> Batch:
        return batch

    @endpoint(collect=first())
    def kinds(self, value: Any) -> Any:
        """Return the name of the type of every entry of a dict."""
        return {key: type(entry).__name__ for key, entry in value.items()}

    @endpoint(readonly=True)
    def total(self, value: Tensor) -> float:
        return float(value.sum())

    @endpoint(receives="ref", returns="ref", collect=first())
    def hold(self, value: Any) -> Any:
        """Keep what was received, and return it as it is."""
        self.held.append(value)
        return value

    @endpoint(collect=first())
    def held_total(self) -> float:
        return sum(float(ref.get().sum()) for ref in self.held)

    @endpoint(collect=nothing())
    def drop(self) -> None:
        self.held.clear()

    @endpoint
    def refuse(self, value: Any) -> None:
        raise ValueError("as asked")

    @endpoint(concurrent=True)
    async def dawdle(self, value: Any, seconds: float) -> None:
        await asyncio.sleep(seconds)
