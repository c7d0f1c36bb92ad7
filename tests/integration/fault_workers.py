"""Workers that fail in every way a worker can."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from podium.runtime import Worker, endpoint, first

__all__ = ["Faulty", "Slow", "StartsBadly", "all_gather"]


def all_gather(value: float, world_size: int) -> list[float]:
    """A collective that every rank must join."""
    out = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(out, torch.tensor([value]))
    return [float(entry) for entry in out]


class StartsBadly(Worker):
    """Fails in its constructor on one rank, in a given way, the first ``times`` times."""

    def __init__(self, rank: int, how: str, *, siblings: str = "", times: int = 1 << 30, notes: str = "") -> None:
        mine = self.ctx.rank == rank
        if mine and self._starts(notes) <= times:
            if how == "raise":
                raise LookupError("the constructor's own error")
            if how == "exit":
                os._exit(5)
            if how == "sleep":
                time.sleep(600)
        if siblings == "collective":
            all_gather(1.0, self.ctx.world_size)
        if siblings == "sleep" and not mine:
            time.sleep(600)

    def _starts(self, notes: str) -> int:
        """How often this rank has started, counted in a file."""
        if not notes:
            return 0
        path = Path(notes)
        count = int(path.read_text()) + 1 if path.exists() else 1
        path.write_text(str(count))
        return count

    @endpoint
    def rank(self) -> int:
        return self.ctx.rank


class Faulty(Worker):
    """Endpoints that fail on chosen ranks while the others do something else."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def rank(self) -> int:
        return self.ctx.rank

    @endpoint
    def raise_one_after_the_other(self, signal: str, then: str) -> list[float]:
        """Rank 0 raises at once. The other ranks wait for the file ``signal``, and ``then`` raise the same error, are
        done, wait in a collective, or wait for a message of rank 0."""
        if self.ctx.rank != 0:
            while not Path(signal).exists():
                time.sleep(0.01)
        if self.ctx.rank == 0 or then == "raise":
            raise KeyError("the same on all ranks")
        if then == "receive":
            dist.recv(torch.zeros(1), src=0)
        return all_gather(1.0, self.ctx.world_size) if then == "gather" else []

    @endpoint
    def gather_ranks(self) -> list[float]:
        return all_gather(float(self.ctx.rank), self.ctx.world_size)

    @endpoint
    def sleep_or_gather(self, sleeper: int) -> None:
        """One rank is not where the others wait for it."""
        if self.ctx.rank == sleeper:
            time.sleep(600)
        all_gather(1.0, self.ctx.world_size)

    @endpoint
    def fail_on(self, rank: int, how: str, siblings: str = "sleep", after_s: float = 0.0) -> int:
        """``rank`` fails in the way ``how`` after a while; the others wait in a collective, sleep, or return."""
        if self.ctx.rank == rank:
            time.sleep(after_s)
            sys.stderr.write(f"rank {rank} is about to {how}\n")
            self._fail(how)
        if siblings == "collective":
            all_gather(1.0, self.ctx.world_size)
        elif siblings == "sleep":
            time.sleep(600)
        return self.ctx.rank

    @endpoint
    async def fail_on_async(self, rank: int, how: str) -> int:
        if self.ctx.rank == rank:
            await asyncio.sleep(0.01)
            self._fail(how)
        await asyncio.sleep(600)
        return self.ctx.rank

    def _fail(self, how: str) -> None:
        if how == "raise":
            raise LookupError("the first cause")
        if how == "sys.exit":
            sys.exit(4)
        if how == "os._exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupt":
            raise KeyboardInterrupt
        raise AssertionError(f"no way to fail called {how!r}")

    @endpoint
    def raise_everywhere(self) -> None:
        raise LookupError("alike on all ranks")

    @endpoint(collect=first())
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def echo_or_raise(self, value: Tensor, fail: bool) -> Tensor:
        if fail:
            raise LookupError("with four megabytes in its frame")
        return value

    @endpoint
    def hold_the_interpreter(self, seconds: int) -> None:
        """No other thread of this process runs meanwhile."""
        ctypes.PyDLL(None).sleep(seconds)


class Slow(Worker):
    """Busy until told otherwise, and a log of what came in which order."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.seen: list[int] = []

    @endpoint
    def wait(self) -> bool:
        return self.free.wait(600.0)

    @endpoint(concurrent=True)
    def let_go(self) -> None:
        self.free.set()

    @endpoint(concurrent=True)
    def ping(self, number: int) -> int:
        return number

    @endpoint
    def note(self, number: int) -> None:
        self.seen.append(number)

    @endpoint(collect=first())
    def noted(self) -> list[int]:
        return self.seen

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
