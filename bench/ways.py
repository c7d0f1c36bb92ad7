"""How peers move tensors, for bench.suites.dataplane: their processes, their ways, and what fits into the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.context import Context
from bench.groups import peer_processes
from bench.peer import PeerClient

MIB, GIB = 1 << 20, 1 << 30
PEERS = ("ray", "verl", "areal", "monarch")
SCRIPTS = {peer: f"{peer}_tensors" for peer in PEERS}
CLUSTERED = ("ray", "verl")  # need one before workers start

Hop = dict[str, float]  # seconds by the names in FIGURES
FIGURES = ("put", "hop", "inside", "touch")


class Way(NamedTuple):
    """How a peer moves a tensor: its own word for it, the largest that is tried, and from where there is one turn."""

    peer: str
    variant: str
    largest_mib: int
    once_from_mib: int = 1 << 20


WAYS = {
    "ray": Way("ray", "torch", 512),
    "ray_numpy": Way("ray", "numpy", 2048),
    "verl": Way("verl", "torch", 128),
    "verl_numpy": Way("verl", "numpy", 512),
    "areal": Way("areal", "http", 512, once_from_mib=128),
    "monarch": Way("monarch", "message", 512),
    "monarch_rdma": Way("monarch", "rdma", 128),
}
# How peers send weights; Monarch's messages to four generators, all at once, took more memory than there was.
WEIGHT_WAYS = ("ray", "ray_numpy", "monarch_rdma")


@contextmanager
def tensor_peers(
    context: Context, names: Sequence[str], *, object_store_bytes: int | None = None
) -> Iterator[dict[str, PeerClient]]:
    """The installed peers; those on Ray have a cluster, and an object store of so many bytes."""
    room = {"object_store_bytes": object_store_bytes} if object_store_bytes else {}
    with peer_processes(context, names, SCRIPTS) as peers:
        for name in CLUSTERED:
            if name in peers:
                peers[name].call("init", **room)
        yield peers


def start_pairs(peers: Mapping[str, PeerClient]) -> None:
    """A producer and a consumer in each."""
    for name, peer in peers.items():
        if name == "verl":
            peer.call("start_pair")
        else:
            peer.call("start", workers=2)


def hops_of(peers: Mapping[str, PeerClient], mib: int) -> dict[str, Callable[[], Hop]]:
    """A subject for each way in which a peer that runs moves a tensor of this size."""
    ways = {name: way for name, way in WAYS.items() if way.peer in peers and mib <= way.largest_mib}
    return {
        name: partial(peers[way.peer].call, "hop", nbytes=mib * MIB, variant=way.variant) for name, way in ways.items()
    }


def weight_ways_of(peers: Mapping[str, PeerClient]) -> dict[str, Callable[[], float]]:
    """A subject for each way in which a peer that runs sends weights."""
    ways = {name: WAYS[name] for name in WEIGHT_WAYS if WAYS[name].peer in peers}
    return {name: partial(peers[way.peer].call, "publish", variant=way.variant) for name, way in ways.items()}


def room_for(context: Context, what: str, gib: int) -> bool:
    """Whether so much memory is available. If not, it is said, and what needs it is left out."""
    available = available_bytes()
    if available < gib * GIB:
        context.say(f"{what} is left out: {available / GIB:.1f} GiB of memory are available, and it needs {gib}")
        return False
    return True


def available_bytes() -> int:
    """What the kernel would give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no line MemAvailable")


def size_of(nbytes: int) -> str:
    """As rows are named: "512MiB", "2GiB"."""
    mib = nbytes // MIB
    return f"{mib // 1024}GiB" if mib >= 1024 else f"{mib}MiB"
