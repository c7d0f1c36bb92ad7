"""Calls, bytes and start-up of local workers, beside raw pipes, raw shared memory and raw Ray actors.

In each case all subjects are alive at once and take turns; those that wait are blocked on a read. Ray's daemons poll a
little, and slow the other subjects by the same few per cent while they are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import podium
from bench.context import Context
from bench.floors import PipeFloor, SharedFloor
from bench.measure import Row, alternate, compare, median_call_s
from bench.peer import PeerClient, peer_command, start_peer
from bench.probe import Probe
from podium import Batch

MIB = 1 << 20
ROW_FLOATS = 1024
# Enough calls a repetition that a median of them means something, few enough that a repetition stays short.
CALLS_BY_MIB = {1: 20, 16: 8, 128: 3, 512: 1}


@contextmanager
def ray_actors(context: Context, workers: int | None) -> Iterator[PeerClient | None]:
    """A peer with Ray running and `workers` actors started; None where Ray's environment is missing."""
    python = context.peer_python("ray")
    if python is None:
        yield None
        return
    with start_peer(peer_command(python, "ray_actors"), context.log_of("ray")) as peer:
        if workers is not None:
            peer.call("init")
            peer.call("start", workers=workers)
        yield peer
        if workers is not None:
            peer.call("shutdown")


@contextmanager
def probes(workers: int) -> Iterator[Probe]:
    with podium.connect("local") as cluster:
        group = cluster.start(Probe.bind(), cluster.pool([workers]))
        group.noop()
        yield group


def noop(context: Context) -> Iterator[Row]:
    """A blocking broadcast of a call that does nothing."""
    calls = 200 if context.quick else 500
    for workers in (2, 4, 8):
        with probes(workers) as group, PipeFloor.start(workers) as pipe, ray_actors(context, workers) as ray:
            subjects: dict[str, Callable[[], float]] = {
                "podium": lambda group=group: median_call_s(group.noop, calls),
                "pipe": lambda pipe=pipe: median_call_s(pipe.noop, calls),
            }
            if ray:
                subjects["ray"] = lambda ray=ray: ray.call("noop", calls=calls // 10)
            figures = alternate(subjects, repetitions=context.repetitions(21, 5))
        yield compare(f"noop_{workers}_local", figures, unit="us", scale=1e6)


def echo(context: Context) -> Iterator[Row]:
    """A batch sharded over the workers, returned by them and joined; the floor's pages were all touched before.

    `shm_fresh` is the floor with the join into memory fresh from the allocator, as torch.cat gives; `ray_numpy` is Ray
    with numpy arrays, which it maps without a copy and hands out read-only.
    """
    for workers in (4, 8):
        with probes(workers) as group, ray_actors(context, workers) as ray:
            for mib in (1, 16) if context.quick else (1, 16, 128, 512):
                yield echo_row(context, group, ray, workers, mib)


def echo_row(context: Context, group: Probe, ray: PeerClient | None, workers: int, mib: int) -> Row:
    calls = CALLS_BY_MIB[mib]
    rows = torch.rand(mib * MIB // (4 * ROW_FLOATS), ROW_FLOATS)
    joined = torch.zeros_like(rows)
    batch = Batch({"rows": rows})
    if not torch.equal(group.echo(batch).dense("rows"), rows):
        raise AssertionError(f"echo of {mib} MiB over {workers} workers came back changed")
    with SharedFloor.start(workers, mib * MIB // workers) as shared:
        subjects: dict[str, Callable[[], float]] = {
            "podium": lambda: median_call_s(lambda: group.echo(batch), calls),
            "shm": lambda: median_call_s(lambda: shared.echo(rows, joined), calls),
            "shm_fresh": lambda: median_call_s(lambda: shared.echo(rows), calls),
        }
        if ray:
            subjects["ray"] = lambda: ray.call("echo", nbytes=mib * MIB, calls=min(calls, 3), numpy=False)
            subjects["ray_numpy"] = lambda: ray.call("echo", nbytes=mib * MIB, calls=min(calls, 3), numpy=True)
        figures = alternate(subjects, repetitions=context.repetitions(7 if mib > 16 else 11))
    return compare(f"echo_{mib}MiB_{workers}_local", figures, unit="ms", scale=1e3)


def broadcast(context: Context) -> Iterator[Row]:
    """One tensor to all workers, each of which looks at one element: the floor is one copy and a message each."""
    mib, workers, calls = 128, 8, 3
    tensor = torch.rand(mib * MIB // (4 * ROW_FLOATS), ROW_FLOATS)
    with (
        probes(workers) as group,
        SharedFloor.start(workers, mib * MIB, one_inbox=True) as shared,
        ray_actors(context, workers) as ray,
    ):
        subjects: dict[str, Callable[[], float]] = {
            "podium": lambda: median_call_s(lambda: group.touch(tensor), calls),
            "shm": lambda: median_call_s(lambda: shared.broadcast(tensor), calls),
        }
        if ray:
            subjects["ray"] = lambda: ray.call("broadcast", nbytes=mib * MIB, calls=calls)
        figures = alternate(subjects, repetitions=context.repetitions(11))
    yield compare(f"broadcast_{mib}MiB_{workers}_local", figures, unit="ms", scale=1e3)


def startup(context: Context) -> Iterator[Row]:
    """From nothing (cold) or a connected cluster (warm) to eight workers' first answers, torch imported in each."""
    workers = 8
    repetitions = context.repetitions(5, 2)
    with ray_actors(context, None) as ray:
        cold: dict[str, Callable[[], float]] = {"podium": lambda: podium_cold_s(workers)}
        if ray:
            cold["ray"] = lambda: ray_cold_s(ray, workers)
        yield compare(f"startup_{workers}_local_cold", alternate(cold, repetitions=repetitions), unit="s")
        with podium.connect("local") as cluster:
            warm: dict[str, Callable[[], float]] = {"podium": lambda: podium_warm_s(cluster, workers)}
            if ray:
                ray.call("init")
                warm["ray"] = lambda: ray_warm_s(ray, workers)
            yield compare(f"startup_{workers}_local_warm", alternate(warm, repetitions=repetitions), unit="s")
        if ray:
            ray.call("shutdown")


def podium_cold_s(workers: int) -> float:
    started = time.perf_counter()
    with podium.connect("local") as cluster:
        cluster.start(Probe.bind(), cluster.pool([workers])).noop()
        return time.perf_counter() - started


def podium_warm_s(cluster: podium.Cluster, workers: int) -> float:
    started = time.perf_counter()
    pool = cluster.pool([workers])
    group = cluster.start(Probe.bind(), pool)
    group.noop()
    seconds = time.perf_counter() - started
    group.group.close()
    cluster.release(pool)
    return seconds


def ray_cold_s(ray: PeerClient, workers: int) -> float:
    seconds = ray.call("init") + ray.call("start", workers=workers)
    ray.call("shutdown")
    return seconds


def ray_warm_s(ray: PeerClient, workers: int) -> float:
    seconds = ray.call("start", workers=workers)
    ray.call("stop")
    return seconds
