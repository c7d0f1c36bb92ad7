"""Bytes that go from worker to worker and never through the controller, beside raw shared memory and the peers.

- hop: one tensor from a worker to another. `put` is the producer's part, from the call to the reference; `hop` is the
  consumer's call with the reference, which reads one element; `inside` is the part of that within the worker, from the
  reference to the element; `touch` is a call that reads a byte of every page. Podium's consumer may write into what it
  gets; `readonly` is one that promised not to. `shm` puts into pages that were touched before, `shm_fresh` into new.
- verl_transfer: verl's own test of its data plane, two int64 columns to which all workers add one. The batch is made
  by a worker and the result stays a batch of references (`verl_transfer`), or it is given by the controller (`given`)
  and also fetched by it (`fetched`), which is what verl does in each case. `memcpy` is one copy of the batch.
- publish: weights of a trainer into the tensors of generators; `memcpy` is one copy a generator.

In each case all subjects take turns, and nothing is kept between the turns. Peers that would take minutes with the
larger tensors, or more memory than there is, are left out of those rows: see LARGEST_MIB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import podium
from bench.context import Context
from bench.floors import HopFloor, copy_s
from bench.groups import peer_processes
from bench.holder import Adder, Holder, Weights, make_columns
from bench.measure import Row, alternate, compare
from bench.peer import PeerClient
from podium import Batch

MIB = 1 << 20
INT64 = 8
PEERS = ("ray", "verl", "areal", "monarch")
SCRIPTS = {peer: f"{peer}_tensors" for peer in PEERS}
CLUSTERED = ("ray", "verl")  # need one before workers start
OBJECT_STORE_BYTES = 6 << 30  # the largest batch, there and back

Hop = dict[str, float]  # seconds by the names in FIGURES
FIGURES = ("put", "hop", "inside", "touch")
# What travels how: for each subject the peer, its word for the way, and the largest tensor that is tried.
WAYS = {
    "ray": ("ray", "torch"),
    "ray_numpy": ("ray", "numpy"),
    "verl": ("verl", "torch"),
    "verl_numpy": ("verl", "numpy"),
    "areal": ("areal", "http"),
    "monarch": ("monarch", "message"),
    "monarch_rdma": ("monarch", "rdma"),
}
LARGEST_MIB = {
    "ray": 512,
    "ray_numpy": 2048,
    "verl": 128,
    "verl_numpy": 512,
    "areal": 512,
    "monarch": 512,
    "monarch_rdma": 128,
}
ONCE_FROM_MIB = {"areal": 128}  # from this size a turn takes so long that it has only one
REPETITIONS_BY_MIB = {1: 11, 16: 9, 128: 5, 512: 3, 2048: 2}


def hop(context: Context) -> Iterator[Row]:
    """Rows `hop_SIZE_BACKEND` and, for the other figures, `hop_FIGURE_SIZE_BACKEND`."""
    sizes = (1, 16) if context.quick else (1, 16, 128, 512, 2048)
    with (
        pair("local") as local,
        pair("ray") as ray,
        HopFloor.start() as floor,
        tensor_peers(context, PEERS) as peers,
    ):
        start_pairs(peers)
        for mib in sizes:
            nbytes = mib * MIB
            podiums = {
                "local": partial(podium_hop, *local, nbytes),
                "ray": partial(podium_hop, *ray, nbytes),
                "ray_readonly": partial(podium_hop, *ray, nbytes, readonly=True),
            }
            floors = {
                "shm": partial(floor.hop, nbytes, fresh=False),
                "shm_fresh": partial(floor.hop, nbytes, fresh=True),
            }
            yield from hop_rows(context, mib, podiums, {**floors, **hops_of(peers, mib)})


def hop_rows(
    context: Context, mib: int, podiums: Mapping[str, Callable[[], Hop]], others: Mapping[str, Callable[[], Hop]]
) -> Iterator[Row]:
    """All take turns, and every row of Podium's is compared with the same samples of the others."""
    slow = {name for name in others if mib >= ONCE_FROM_MIB.get(name, mib + 1)}
    ours = {f"podium_{kind}": call for kind, call in podiums.items()}
    subjects = {**ours, **{name: call for name, call in others.items() if name not in slow}}
    hops = alternate(subjects, repetitions=context.repetitions(REPETITIONS_BY_MIB[mib]))
    hops |= {name: [others[name]()] for name in slow}
    for kind in podiums:
        for figure in FIGURES:
            taken = {name: [sample[figure] for sample in hops[name]] for name in others}
            figures = {name: samples for name, samples in taken.items() if any(samples)}  # a message has no put
            figures["podium"] = [sample[figure] for sample in hops[f"podium_{kind}"]]
            what = "hop" if figure == "hop" else f"hop_{figure}"
            yield compare(f"{what}_{size_of(mib * MIB)}_{kind}", figures, unit="ms", scale=1e3)


def podium_hop(producer: Holder, consumer: Holder, nbytes: int, *, readonly: bool = False) -> Hop:
    """One tensor from a worker to another; it is made before and dropped afterwards."""
    look = consumer.look_only if readonly else consumer.look
    producer.prepare(nbytes)
    started = time.perf_counter()
    ref = producer.give()
    put_s = time.perf_counter() - started
    started = time.perf_counter()
    look(ref, False)
    hop_s = time.perf_counter() - started
    inside_s = consumer.fetch(ref, readonly)
    started = time.perf_counter()
    look(ref, True)
    touch_s = time.perf_counter() - started
    producer.prepare(0)
    return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}


def transfer(context: Context) -> Iterator[Row]:
    """Rows `verl_transfer[_KIND]_SIZE_WORKERS_local`."""
    rows, columns = (512, 8192) if context.quick else (4096, 32768)
    nbytes = 2 * rows * columns * INT64
    given = make_columns(rows, columns)
    for workers in (2, 8):
        with (
            podium.connect("local", echo=False) as cluster,
            tensor_peers(context, ("verl",), object_store_bytes=OBJECT_STORE_BYTES) as peers,
        ):
            adders = cluster.start(Adder.bind(), cluster.pool([workers]))
            start_workers(peers, workers)
            podiums = {
                "": lambda adders=adders: by_reference_s(adders, rows, columns),
                "_given": lambda adders=adders: given_s(adders, given),
                "_fetched": lambda adders=adders: given_s(adders, given, fetch=True),
            }
            others = {
                "memcpy": lambda: copy_s(nbytes, fresh=False),
                "memcpy_fresh": lambda: copy_s(nbytes, fresh=True),
                **{
                    name: partial(peer.call, "transfer", rows=rows, columns=columns, variant="numpy")
                    for name, peer in peers.items()
                },
            }
            samples = alternate({**podiums, **others}, repetitions=context.repetitions(3, 2))
            for kind in podiums:
                figures = {"podium": samples[kind], **{name: samples[name] for name in others}}
                yield compare(f"verl_transfer{kind}_{size_of(nbytes)}_{workers}_local", figures, unit="s")


def by_reference_s(adders: Adder, rows: int, columns: int) -> float:
    batch = adders.make(rows, columns)
    started = time.perf_counter()
    result = adders.add_one(batch)
    seconds = time.perf_counter() - started
    check_twos(result, rows, columns)
    return seconds


def given_s(adders: Adder, batch: Batch, *, fetch: bool = False) -> float:
    started = time.perf_counter()
    result = adders.add_one(batch)
    if fetch:
        result = result.fetch()
    seconds = time.perf_counter() - started
    check_twos(result, *batch.dense("b").shape)
    return seconds


def check_twos(result: Batch, rows: int, columns: int) -> None:
    """The last row arrived, and one was added to it."""
    last = result.slice(rows - 1, rows).fetch().dense("b")
    if len(result) != rows or last.shape != (1, columns) or not bool((last == 2).all()):
        raise AssertionError(f"{len(result)} rows came back, {last}")


def publish(context: Context) -> Iterator[Row]:
    """Rows `publish_SIZE_GENERATORS_local`."""
    count, megabytes = 16, 64 if context.quick else 512
    sizes = [megabytes * 10**6 // 4 // count] * count
    for generators in (1, 4):
        with (
            podium.connect("local", echo=False) as cluster,
            tensor_peers(context, ("ray", "monarch")) as peers,
        ):
            pools = cluster.pool([1 + generators]).split([1, generators])
            trainer, others = (cluster.start(Weights.bind(sizes), pool) for pool in pools)
            start_workers(peers, 1 + generators)
            for peer in peers.values():
                peer.call("prepare_weights", sizes=sizes)
            subjects = {
                "podium": lambda trainer=trainer, others=others: publish_s(trainer, others),
                "memcpy": lambda n=generators: sum(copy_s(megabytes * 10**6, fresh=False) for _ in range(n)),
                **{
                    name: partial(peers[peer].call, "publish", variant=variant)
                    for name, (peer, variant) in WAYS.items()
                    if peer in peers and variant != "rdma"
                },
            }
            figures = alternate(subjects, repetitions=context.repetitions(5))
            yield compare(f"publish_{megabytes}MB_{generators}_local", figures, unit="ms", scale=1e3)


def publish_s(trainer: Weights, generators: Weights) -> float:
    started = time.perf_counter()
    generators.load(trainer.give())
    return time.perf_counter() - started


# -- subjects ------------------------------------------------------------------------------------------------------


@contextmanager
def pair(backend: str) -> Iterator[tuple[Holder, Holder]]:
    """A producer and a consumer on `backend`."""
    with podium.connect(backend, echo=False) as cluster:
        producer, consumer = (cluster.start(Holder.bind(), pool) for pool in cluster.pool([2]).split([1, 1]))
        yield producer, consumer


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


def start_workers(peers: Mapping[str, PeerClient], workers: int) -> None:
    for peer in peers.values():
        peer.call("start", workers=workers)


def start_pairs(peers: dict[str, PeerClient]) -> None:
    for name, peer in peers.items():
        if name == "verl":
            peer.call("start_pair")
        else:
            peer.call("start", workers=2)


def hops_of(peers: Mapping[str, PeerClient], mib: int) -> dict[str, Callable[[], Hop]]:
    """A subject for each way in which a peer that runs moves a tensor of this size."""
    return {
        name: partial(peers[peer].call, "hop", nbytes=mib * MIB, variant=variant)
        for name, (peer, variant) in WAYS.items()
        if peer in peers and mib <= LARGEST_MIB[name]
    }


def size_of(nbytes: int) -> str:
    """As rows are named: "512MiB", "2GiB"."""
    mib = nbytes // MIB
    return f"{mib // 1024}GiB" if mib >= 1024 else f"{mib}MiB"
