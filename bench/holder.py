"""The workers of bench.suites.dataplane: what they make stays with them, and travels by reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.peers.touching import look, timed_look
from podium import Batch, Worker, concat, endpoint, first, nothing, only, shard


class Holder(Worker):
    """Keeps a tensor, gives it, and looks at what it is given."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(1)

    @endpoint(collect=nothing())
    def prepare(self, nbytes: int) -> None:
        self._tensor = torch.rand(nbytes // 4)

    @endpoint(collect=first(), returns="ref")
    def give(self) -> Tensor:
        return self._tensor

    @endpoint(collect=nothing())
    def look(self, tensor: Tensor, pages: bool) -> None:
        look(tensor, pages)

    @endpoint(collect=nothing(), readonly=True)
    def look_only(self, tensor: Tensor, pages: bool) -> None:
        look(tensor, pages)

    @endpoint(collect=first(), receives="ref")
    def fetch(self, ref: Any, readonly: bool) -> float:  # a TensorRef; to a type checker, what `give` is typed as
        """Seconds inside the worker, from the reference to one element of the tensor."""
        return timed_look(lambda: ref.get(readonly=readonly), pages=False)


class Adder(Worker):
    """verl's own transfer test: one is added to two columns of int64."""

    @endpoint(dispatch=only(rank=0), collect=first(), returns="ref")
    def make(self, rows: int, columns: int) -> Batch:
        return make_columns(rows, columns)

    @endpoint(dispatch=shard(), collect=concat(), returns="ref")
    def add_one(self, batch: Batch) -> Batch:
        return Batch({name: batch.dense(name) + 1 for name in batch})


def make_columns(rows: int, columns: int) -> Batch:
    return Batch({name: torch.ones(rows, columns, dtype=torch.int64) for name in "ab"})
