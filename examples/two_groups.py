"""Two groups, one channel: two actors send tensors to one rollout worker, point to point, through torch.distributed.

python examples/two_groups.py
python examples/two_groups.py --backend ray

Podium gives every group a default process group of its own. What crosses groups as arguments and results needs nothing
more. Where a collective or a send between two groups is wanted (weights from GPU to GPU, as ray.util.collective gives
elsewhere), the workers form one more process group among themselves, as an object of its own beside the default one:

    controller       actors (2 ranks)                rollout (1 rank)
    listen ────────▶ rank 0 opens a TCPStore
    join ──────────▶ 0, 1 of 3                       2 of 3              all three at once
    send, receive ─▶ send(half of the weight) ─────▶ receive both        both calls in flight

All of them are on one node here; across nodes, listen at an address that all of them reach. On accelerators
ProcessGroupNCCL takes the place of ProcessGroupGloo.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - they are documented

import podium
from podium import Handle, Worker, endpoint, first, nothing, only

TIMEOUT = timedelta(seconds=60)  # of the channel: a rank that waits in it for a dead one is freed by nothing else


class Member(Worker):
    """A worker that can join a process group which spans several groups of workers."""

    store: TCPStore | None = None
    channel: dist.ProcessGroupGloo

    @endpoint(dispatch=only(rank=0), collect=first())
    def listen(self) -> tuple[str, int]:
        """Open the store through which the members meet: its address, where this group meets too, and its port."""
        address = urlsplit(self.ctx.rendezvous).hostname or "127.0.0.1"
        listener = socket.create_server((address, 0))  # a TCPStore by itself listens on every interface
        port = listener.getsockname()[1]
        handed_over = listener.detach()
        self.store = TCPStore(address, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=handed_over)
        return address, port

    @endpoint(collect=nothing())
    def join(self, address: str, port: int, first_rank: int, size: int) -> None:
        """Become rank ``first_rank + ctx.rank`` of ``size``. Returns when all members have come."""
        store = PrefixStore("two-groups", self.store or TCPStore(address, port, None, False, TIMEOUT))
        self.channel = dist.ProcessGroupGloo(store, first_rank + self.ctx.rank, size, TIMEOUT)


class Actor(Member):
    """Holds a part of the rows of a weight."""

    def __init__(self, rows: int, columns: int) -> None:
        share = rows // self.ctx.world_size
        start = self.ctx.rank * share
        self.weight = torch.arange(start * columns, (start + share) * columns, dtype=torch.float32).view(share, columns)

    @endpoint(collect=first())
    def step(self) -> float:
        """Scale the weight to norm 1 over all actors, in the group's own process group; the norm it had."""
        square = self.weight.square().sum()
        dist.all_reduce(square)
        self.weight /= square.sqrt()
        return float(square.sqrt())

    @endpoint(collect=nothing())
    def send(self, to: int) -> None:
        """Send the rows to rank ``to`` of the channel."""
        self.channel.send([self.weight], to, self.ctx.rank).wait()  # pyright: ignore[reportAttributeAccessIssue] - as below


class Rollout(Member):
    """Receives the parts."""

    def __init__(self, rows: int, columns: int) -> None:
        self.weight = torch.zeros(rows, columns)

    @endpoint(collect=first())
    def receive(self, senders: Sequence[int]) -> torch.Tensor:
        """Receive each sender's rows into its place: the weight ``[rows, columns]``."""
        receive = self.channel.recv  # pyright: ignore[reportAttributeAccessIssue] - a method; the stubs leave it out
        parts = self.weight.chunk(len(senders))
        for work in [receive([part], sender, sender) for part, sender in zip(parts, senders, strict=True)]:
            work.wait()
        return self.weight


def connect_groups(actors: Handle[Actor], rollout: Handle[Rollout]) -> tuple[list[int], int]:
    """Make the channel; the ranks in it of the actors, and that of the rollout worker."""
    address, port = actors.listen()
    count = actors.group.world_size
    joins = [
        actors.join.submit(address, port, 0, count + 1),
        rollout.join.submit(address, port, count, count + 1),
    ]
    for call in joins:  # all of them are on their way before the first is waited for
        call.result()
    return list(range(count)), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    backend = parser.parse_args().backend
    rows, columns = 512, 256
    with podium.connect(backend) as cluster:
        if not cluster.capabilities.collectives:
            parser.error(f"backend {backend!r} has no collectives over several ranks; use local")
        for_actors, for_rollout = cluster.pool([3]).split([2, 1])
        actors = cluster.start(Actor.bind(rows, columns), for_actors)
        rollout = cluster.start(Rollout.bind(rows, columns), for_rollout)
        senders, receiver = connect_groups(actors, rollout)
        expected = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        for step in range(2):
            norm = actors.step()  # the default process group of the actors is as it was
            sent = actors.send.submit(receiver)
            weight = rollout.receive(senders)
            sent.result()
            expected = expected / norm
            assert torch.allclose(weight, expected), "what came is not what was sent"
            print(f"step {step}: {weight.numel()} values from {len(senders)} actors, norm {float(weight.norm()):.3f}")


if __name__ == "__main__":
    main()
