"""Calls, bytes and start-up of local workers, beside raw pipes, raw shared memory and raw Ray actors.

In each case all subjects are alive at once and take turns; those that wait are blocked on a read. Ray's daemons poll a
little, and slow the other subjects by the same few per cent while they are measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import podium
from bench.context import Context
from bench.floors import PipeFloor, SharedFloor
from bench.groups import peer_calls, peer_clusters, peer_groups, peer_processes, probes
from bench.measure import Row, Subjects, alternate, compare, median_call_s
from bench.peer import PeerClient
from bench.probe import Probe
from bench.suites.training_start import import_alone, two_steps
from podium import Batch, Handle

MIB = 1 << 20
ROW_FLOATS = 1024
# Enough calls a repetition that a median of them means something, few enough that a repetition stays short.
CALLS_BY_MIB = {1: 20, 16: 8, 128: 3, 512: 1}
REPETITIONS_BY_MIB = {1: 11, 16: 11, 128: 5, 512: 3}
PEER_CALLS = 50
PEER_CALLS_BY_MIB = {1: 3, 16: 3, 128: 1, 512: 1}


@contextmanager
def local_groups(context: Context, workers: int) -> Iterator[tuple[Handle[Probe], dict[str, PeerClient]]]:
    """Local workers, and as many Ray actors where Ray is installed."""
    with (
        podium.connect("local", echo=False) as cluster,
        peer_clusters(context, ("ray",)) as peers,
        probes(cluster, workers) as group,
        peer_groups(peers, workers),
    ):
        yield group, peers


def noop(context: Context) -> Iterator[Row]:
    """A blocking broadcast of a call that does nothing."""
    calls = 200 if context.quick else 500
    for workers in (2, 8):
        with local_groups(context, workers) as (group, peers), PipeFloor.start(workers) as pipe:
            floors = {"pipe": lambda pipe=pipe: median_call_s(pipe.noop, calls)}
            floor = "pipe: a byte to each worker and one back, over pipes"
            yield noop_row(context, f"noop_{workers}_local", group, floors, peers, calls=calls, floor=floor)


def noop_row(
    context: Context,
    name: str,
    group: Handle[Probe],
    floors: Subjects,
    peers: Mapping[str, PeerClient],
    *,
    calls: int,
    floor: str,
) -> Row:
    """So many calls a turn; peers, which need milliseconds for one, make fewer."""
    subjects: Subjects = {
        "podium": lambda: median_call_s(group.noop, calls),
        **floors,
        **peer_calls(peers, "noop", calls=min(calls, PEER_CALLS)),
    }
    figures = alternate(subjects, repetitions=context.repetitions(21, 5))
    return compare(name, figures, unit="us", scale=1e6, floor=floor)


def echo(context: Context) -> Iterator[Row]:
    """A batch sharded over the workers, returned by them and joined; the floor's pages were all touched before.

    `shm_fresh` is the floor with the join into memory fresh from the allocator, as torch.cat gives; `ray_numpy` is Ray
    with numpy arrays, which it maps without a copy and hands out read-only.
    """
    for workers in (4, 8):
        with local_groups(context, workers) as (group, peers):
            for mib in echo_sizes(context)[: 2 if workers == 4 else None]:  # the larger take minutes
                rows = rows_of(mib)
                with SharedFloor.start(workers, mib * MIB // workers) as shared:
                    floors = echo_floors(shared, rows)
                    name, floor = f"echo_{mib}MiB_{workers}_local", "shm: three copies, all into memory touched before"
                    yield echo_row(context, name, group, rows, floors, peers, floor=floor)


def echo_sizes(context: Context) -> tuple[int, ...]:
    return (1, 16) if context.quick else (1, 16, 128, 512)


def rows_of(mib: int) -> Tensor:
    return torch.rand(mib * MIB // (4 * ROW_FLOATS), ROW_FLOATS)


def echo_floors(shared: SharedFloor, rows: Tensor) -> Subjects:
    calls = CALLS_BY_MIB[rows.nbytes // MIB]
    joined = torch.zeros_like(rows)
    return {
        "shm": lambda: median_call_s(lambda: shared.echo(rows, joined), calls),
        "shm_fresh": lambda: median_call_s(lambda: shared.echo(rows), calls),
    }


def echo_row(
    context: Context,
    name: str,
    group: Handle[Probe],
    rows: Tensor,
    floors: Subjects,
    peers: Mapping[str, PeerClient],
    *,
    floor: str,
) -> Row:
    """Peers twice: with what they take by default for tensors, and with numpy arrays on the wire."""
    mib = rows.nbytes // MIB
    calls = CALLS_BY_MIB[mib]
    batch = Batch({"rows": rows})
    if not torch.equal(group.echo(batch).dense("rows"), rows):
        raise AssertionError(f"{name} came back changed")
    peer_load = {"nbytes": rows.nbytes, "calls": PEER_CALLS_BY_MIB[mib]}
    subjects: Subjects = {
        "podium": lambda: median_call_s(lambda: group.echo(batch), calls),
        **floors,
        **peer_calls(peers, "echo", **peer_load, numpy=False),
        **{f"{peer}_numpy": call for peer, call in peer_calls(peers, "echo", **peer_load, numpy=True).items()},
    }
    figures = alternate(subjects, repetitions=context.repetitions(REPETITIONS_BY_MIB[mib]))
    return compare(name, figures, unit="ms", scale=1e3, floor=floor)


def broadcast(context: Context) -> Iterator[Row]:
    """One tensor to all workers, each of which looks at one element: the floor is one copy and a message each."""
    mib, workers = 128, 8
    calls = CALLS_BY_MIB[mib]
    tensor = rows_of(mib)
    with (
        local_groups(context, workers) as (group, peers),
        SharedFloor.start(workers, mib * MIB, one_inbox=True) as shared,
    ):
        subjects: Subjects = {
            "podium": lambda: median_call_s(lambda: group.touch(tensor), calls),
            "shm": lambda: median_call_s(lambda: shared.broadcast(tensor), calls),
            **peer_calls(peers, "broadcast", nbytes=mib * MIB, calls=PEER_CALLS_BY_MIB[mib]),
        }
        figures = alternate(subjects, repetitions=context.repetitions(11))
    floor = "shm: one copy into memory that all workers see, and a message each"
    yield compare(f"broadcast_{mib}MiB_{workers}_local", figures, unit="ms", scale=1e3, floor=floor)


def startup(context: Context) -> Iterator[Row]:
    """From nothing (cold) or a connected cluster (warm) to eight workers' first answers, torch imported in each; and a
    whole run of two steps, and ``import podium``."""
    yield from import_alone(context)
    yield from two_steps(context)
    workers = 8
    repetitions = context.repetitions(3, 2)
    with peer_processes(context, ("ray",)) as peers:
        cold: Subjects = {
            "podium": lambda: podium_cold_s(workers),
            **{name: partial(peer_cold_s, peer, workers) for name, peer in peers.items()},
        }
        floor = "not measured: importing torch once, and a fork for each worker"
        yield compare(f"startup_{workers}_local_cold", alternate(cold, repetitions=repetitions), unit="s", floor=floor)
        for peer in peers.values():
            peer.call("init")
        with podium.connect("local", echo=False) as cluster:
            name, floor = f"startup_{workers}_local_warm", "not measured: a fork for each worker"
            yield startup_row(name, cluster, workers, peers, repetitions=repetitions, floor=floor)


def startup_row(
    name: str,
    cluster: podium.Cluster,
    workers: int,
    peers: Mapping[str, PeerClient],
    *,
    repetitions: int,
    floor: str,
    warmups: int = 1,
) -> Row:
    """Clusters run: from asking for the workers to the first answer of the last, torch imported in each."""
    subjects: Subjects = {
        "podium": lambda: podium_warm_s(cluster, workers),
        **{peer_name: partial(peer_warm_s, peer, workers) for peer_name, peer in peers.items()},
    }
    return compare(name, alternate(subjects, repetitions=repetitions, warmups=warmups), unit="s", floor=floor)


def podium_cold_s(workers: int) -> float:
    started = time.perf_counter()
    with podium.connect("local", echo=False) as cluster:
        cluster.start(Probe.bind(), cluster.pool([workers])).noop()
        return time.perf_counter() - started


def podium_warm_s(cluster: podium.Cluster, workers: int) -> float:
    started = time.perf_counter()
    with probes(cluster, workers):
        return time.perf_counter() - started


def peer_cold_s(peer: PeerClient, workers: int) -> float:
    seconds = peer.call("init") + peer.call("start", workers=workers)
    peer.call("shutdown")
    return seconds


def peer_warm_s(peer: PeerClient, workers: int) -> float:
    seconds = peer.call("start", workers=workers)
    peer.call("stop")
    return seconds
