"""Groups of workers to measure: Podium's on a backend, and those of the peers that run on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import podium
from bench.context import Context
from bench.peer import PeerClient, peer_command, start_peer
from bench.probe import Probe
from podium import Handle

# Each has an environment of its own name, and a cluster of its own.
SCRIPTS = {"ray": "ray_actors", "verl": "verl_groups"}


@contextmanager
def probes(cluster: podium.Cluster, workers: int) -> Iterator[Handle[Probe]]:
    """A group that has answered once; it ends, and its pool is free again, when the block does."""
    pool = cluster.pool([workers])
    group = cluster.start(Probe.bind(), pool)
    group.noop()
    yield group
    group.group.close()
    cluster.release(pool)


@contextmanager
def peer_processes(
    context: Context, names: Sequence[str], scripts: Mapping[str, str] = SCRIPTS
) -> Iterator[dict[str, PeerClient]]:
    """The processes of those peers that are installed; no cluster runs yet, and any ends with its process."""
    with ExitStack() as stack:
        peers: dict[str, PeerClient] = {}
        for name in names:
            if python := context.peer_python(name):
                command = peer_command(python, scripts[name])
                peers[name] = stack.enter_context(start_peer(command, context.log_of(scripts[name])))
        yield peers


@contextmanager
def peer_clusters(context: Context, names: Sequence[str]) -> Iterator[dict[str, PeerClient]]:
    """The same with a cluster running in each."""
    with peer_processes(context, names) as peers:
        for peer in peers.values():
            peer.call("init")
        yield peers


@contextmanager
def peer_groups(peers: Mapping[str, PeerClient], workers: int) -> Iterator[None]:
    """A group of so many workers in each peer, while the block runs."""
    for peer in peers.values():
        peer.call("start", workers=workers)
    yield
    for peer in peers.values():
        peer.call("stop")


def peer_calls(peers: Mapping[str, PeerClient], method: str, **arguments: Any) -> dict[str, Callable[[], float]]:
    """A subject for each peer: call the method, which returns its figure."""
    return {name: partial(peer.call, method, **arguments) for name, peer in peers.items()}
