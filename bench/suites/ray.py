"""Podium on Ray beside what else runs on Ray: raw actors, and verl's RayWorkerGroup.

Each has a cluster of its own, all on this machine; all are alive at once and take turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import podium
from bench.context import Context
from bench.groups import peer_clusters, peer_groups, probes
from bench.measure import Row
from bench.suites.faults import fault_rows
from bench.suites.runtime import echo_row, echo_sizes, noop_row, rows_of, startup_row

PEERS = ("ray", "verl")
WORKERS = 8
CALLS = 50  # a turn


def ray(context: Context) -> Iterator[Row]:
    """Calls, bytes, start-up and faults of workers on Ray."""
    return on_backend(context, "ray")


def on_backend(context: Context, backend: str) -> Iterator[Row]:
    """The same on any backend; rows end in its name."""
    with podium.connect(backend, echo=False) as cluster, peer_clusters(context, PEERS) as peers:
        with probes(cluster, WORKERS) as group, peer_groups(peers, WORKERS):
            noop = f"noop_{WORKERS}_{backend}"
            yield noop_row(context, noop, group, {}, peers, calls=CALLS, floor="ray: the same call of bare actors")
            for mib in echo_sizes(context):
                name = f"shard_concat_{mib}MiB_{WORKERS}_{backend}"
                floor = "ray_numpy: bare actors, which map arrays without a copy, to be read only"
                yield echo_row(context, name, group, rows_of(mib), {}, peers, floor=floor)
        repetitions = context.repetitions(3, 1)  # none to warm up: each has started a group before
        started, floor = f"startup_{WORKERS}_{backend}", "ray: as many bare actors"
        yield startup_row(started, cluster, WORKERS, peers, repetitions=repetitions, warmups=0, floor=floor)
        yield from fault_rows(context, cluster, peers)
