"""Bytes that go from worker to worker and never through the controller, beside raw shared memory and the peers.

- hop: one tensor from a worker to another. `put` is the producer's part, from the call to the reference; `hop` is the
  consumer's call with the reference, which reads one element; `inside` is the part of that within the worker, from the
  reference to the element; `touch` is a call that reads a byte of every page. Podium's consumer may write into what it
  gets; `readonly` is one that promised not to. `shm` puts into pages that were touched before, `shm_fresh` into new.
- verl_transfer: verl's own test of its data plane, two int64 columns to which all workers add one. The batch is made
  by a worker and the result stays a batch of references (`verl_transfer`), or it is given by the controller (`given`)
  and also fetched by it (`fetched`), which is what verl does in each case. `memcpy` is one copy of the batch.
- publish: the weights of a policy into the tensors of generators, by a StreamedSync; peers move tensors of the
  same sizes; `memcpy` is one copy a generator.

In a hop all subjects take turns. In the other two they come one after the other, since together they would not fit into
the memory of a small machine. Peers that would take minutes with the larger tensors,
or more memory than there is, are left out: see bench.ways.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import podium
from bench.context import Context
from bench.floors import HopFloor, copy_s
from bench.holder import Adder, Holder, make_columns
from bench.measure import Row, alternate, compare
from bench.ways import (
    FIGURES,
    MIB,
    PEERS,
    WAYS,
    Hop,
    hops_of,
    room_for,
    size_of,
    start_pairs,
    tensor_peers,
    weight_ways_of,
)
from bench.workload import SHAPES
from podium import Batch, Handle
from podium.models import ModelConfig
from podium.rollout.engines import EngineConfig
from podium.workers import Generator, Policy, StreamedSync

INT64, FLOAT32 = 8, 4  # bytes
OBJECT_STORE_BYTES = 6 << 30  # the largest batch, there and back
REPETITIONS_BY_MIB = {1: 11, 16: 9, 128: 5, 512: 3}
# What subjects that run together take at worst, in GiB.
HOP_GIB = 10
HOP_FLOOR = "shm: two processes that pass on the descriptor of shared memory touched before"
TRANSFER_GIB = 14
PUBLISH_GIB = 10


def hop(context: Context) -> Iterator[Row]:
    """Rows `hop_SIZE_BACKEND` and, for the other figures, `hop_FIGURE_SIZE_BACKEND`."""
    sizes = (1, 16) if context.quick else (1, 16, 128, 512)
    with (
        pair("local") as local,
        pair("ray") as ray,
        HopFloor.start() as floor,
        tensor_peers(context, PEERS) as peers,
    ):
        start_pairs(peers)
        for mib in sizes:
            if mib == 512 and not room_for(context, "a hop of 512MiB", HOP_GIB):
                continue
            peer_hops = hops_of(peers, mib)
            slow = {name for name in peer_hops if mib >= WAYS[name].once_from_mib}
            subjects = {
                **podium_hops("local", local, mib),
                **podium_hops("ray", ray, mib),
                **floor_hops(floor, mib),
                **{name: peer_hops[name] for name in peer_hops if name not in slow},
            }
            hops = alternate(subjects, repetitions=context.repetitions(REPETITIONS_BY_MIB[mib]))
            yield from hop_rows(mib, hops | {name: [peer_hops[name]()] for name in slow})


def podium_hops(backend: str, holders: tuple[Handle[Holder], Handle[Holder]], mib: int) -> dict[str, Callable[[], Hop]]:
    """Subjects by `podium_KIND`, where the kind names Podium's rows."""
    writable = partial(podium_hop, *holders, mib * MIB)
    if backend == "local":
        return {"podium_local": writable}
    return {f"podium_{backend}": writable, f"podium_{backend}_readonly": partial(writable, readonly=True)}


def floor_hops(floor: HopFloor, mib: int) -> dict[str, Callable[[], Hop]]:
    return {
        "shm": partial(floor.hop, mib * MIB, fresh=False),
        "shm_fresh": partial(floor.hop, mib * MIB, fresh=True),
    }


def hop_rows(mib: int, hops: Mapping[str, Sequence[Hop]]) -> Iterator[Row]:
    """Every row of Podium's is compared with the same samples of the others."""
    others = [name for name in hops if not name.startswith("podium_")]
    for kind in (name.removeprefix("podium_") for name in hops if name not in others):
        for figure in FIGURES:
            taken = {name: [sample[figure] for sample in hops[name]] for name in others}
            figures = {name: samples for name, samples in taken.items() if any(samples)}  # a message has no put
            figures["podium"] = [sample[figure] for sample in hops[f"podium_{kind}"]]
            what = "hop" if figure == "hop" else f"hop_{figure}"
            yield compare(f"{what}_{size_of(mib * MIB)}_{kind}", figures, unit="ms", scale=1e3, floor=HOP_FLOOR)


@contextmanager
def pair(backend: str) -> Iterator[tuple[Handle[Holder], Handle[Holder]]]:
    """A producer and a consumer on `backend`."""
    with podium.connect(backend, echo=False) as cluster:
        producer, consumer = (cluster.start(Holder.bind(), pool) for pool in cluster.pool([2]).split([1, 1]))
        yield producer, consumer


def podium_hop(producer: Handle[Holder], consumer: Handle[Holder], nbytes: int, *, readonly: bool = False) -> Hop:
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
    if not context.quick and not room_for(context, f"a transfer of {size_of(nbytes)}", TRANSFER_GIB):
        return
    repetitions = context.repetitions(3, 2)
    copies = {"memcpy": partial(copy_s, nbytes, fresh=False), "memcpy_fresh": partial(copy_s, nbytes, fresh=True)}
    floors = alternate(copies, repetitions=repetitions)
    for workers in (2, 8):
        samples = podium_transfers(workers, rows, columns, repetitions)
        peers = verl_transfers(context, workers, rows, columns, repetitions)
        for kind, figures in samples.items():
            name = f"verl_transfer{kind}_{size_of(nbytes)}_{workers}_local"
            floor = "memcpy: one copy of the batch into memory that was touched before"
            yield compare(name, {"podium": figures, **floors, **peers}, unit="s", floor=floor)


def podium_transfers(workers: int, rows: int, columns: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds, by kind, of transfers through so many local workers."""
    with podium.connect("local", echo=False) as cluster:
        adders = cluster.start(Adder.bind(), cluster.pool([workers]))
        subjects = {
            "": lambda: by_reference_s(adders, rows, columns),
            "_given": lambda: given_s(adders, make_columns(rows, columns)),
            "_fetched": lambda: given_s(adders, make_columns(rows, columns), fetch=True),
        }
        return alternate(subjects, repetitions=repetitions)


def verl_transfers(context: Context, workers: int, rows: int, columns: int, repetitions: int) -> dict[str, list[float]]:
    """The same by verl, as numpy arrays, and to eight workers by torch.save, its default, in one turn of 20 s."""
    with tensor_peers(context, ("verl",), object_store_bytes=OBJECT_STORE_BYTES) as peers:
        for verl in peers.values():
            verl.call("start", workers=workers)
            transfer = partial(verl.call, "transfer", rows=rows, columns=columns)
            faster = alternate({"verl_numpy": partial(transfer, variant="numpy")}, repetitions=repetitions)
            return faster | ({"verl": [transfer(variant="torch")]} if workers == 8 else {})
    return {}


def by_reference_s(adders: Handle[Adder], rows: int, columns: int) -> float:
    batch = adders.make(rows, columns)
    started = time.perf_counter()
    result = adders.add_one(batch)
    seconds = time.perf_counter() - started
    check_twos(result, rows, columns)
    return seconds


def given_s(adders: Handle[Adder], batch: Batch, *, fetch: bool = False) -> float:
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
    """Rows `publish_SHAPE_GENERATORS_local`: whole float32 models, none of the weights left out."""
    shape = "10m" if context.quick else "135m"
    if not context.quick and not room_for(context, "a weight sync of 540 MB", PUBLISH_GIB):
        return
    model = ModelConfig(config={"model_type": "qwen3", **SHAPES[shape].config()}, tokenizer="chars:0123456789")
    repetitions = context.repetitions(3)
    for generators in (1, 4):
        sizes, own = podium_syncs(model, generators, repetitions)
        nbytes = FLOAT32 * sum(sizes)
        copies = {"memcpy": lambda n=generators, size=nbytes: sum(copy_s(size, fresh=False) for _ in range(n))}
        figures = {"podium": own, **alternate(copies, repetitions=repetitions)}
        for name in ("ray", "monarch"):
            with tensor_peers(context, (name,)) as peers:
                for peer in peers.values():
                    peer.call("start", workers=1 + generators)
                    peer.call("prepare_weights", sizes=sizes)
                    figures |= alternate(weight_ways_of(peers), repetitions=repetitions)
        yield compare(
            f"publish_{shape}_{generators}_local",
            figures,
            unit="ms",
            scale=1e3,
            floor="memcpy: one copy for each generator",
        )


def podium_syncs(model: ModelConfig, generators: int, repetitions: int) -> tuple[list[int], list[float]]:
    """Elements of each tensor, and seconds of each sync to so many generators, which begin with others."""
    with podium.connect("local", echo=False) as cluster:
        pools = cluster.pool([1 + generators]).split([1, generators])
        policy = cluster.start(Policy.bind(model), pools[0])
        engine = EngineConfig(cache_gib=0.1)
        sync = StreamedSync(policy, [cluster.start(Generator.bind(replace(model, seed=1), engine), pools[1])])
        sync.init()
        sizes = [math.prod(weight.shape) for weight in policy.weight_manifest().weights]
        versions = itertools.count()
        samples = alternate({"podium": lambda: sync_s(sync, next(versions))}, repetitions=repetitions)
        return sizes, samples["podium"]


def sync_s(sync: StreamedSync, version: int) -> float:
    started = time.perf_counter()
    sync.sync(version)
    seconds = time.perf_counter() - started
    if sync.is_stale(version):
        raise AssertionError(f"version {version} was synced, and a generator has another")
    return seconds
