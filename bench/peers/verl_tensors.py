"""verl's DataProto between the workers of its RayWorkerGroups, in bench.suites.dataplane. Runs in .venvs/verl.

A hop is a DataProtoFuture, which the controller hands on without fetching it. The transfer is that of verl's own test:
the controller splits a batch, puts the parts, calls, gets and joins. (Futures would be no help there: each worker
fetches the whole batch and cuts its part out.) As "numpy" tensors are pickled as numpy arrays, else by torch.save,
which is the default.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Peer
from ray_cluster import RayPeer, ray, torch
from touching import look, timed_look
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.ray_utils import parallel_put

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
ROW_FLOATS = 1024


class Holder(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._batch: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialize_by(self, method: str) -> None:
        os.environ[SERIALIZATION] = method

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare(self, nbytes: int) -> None:
        self._batch = DataProto.from_dict(tensors={"rows": torch.rand(nbytes // 4 // ROW_FLOATS or 1, ROW_FLOATS)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def put(self) -> DataProto:
        return self._batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def look(self, batch: DataProto, pages: bool) -> None:
        look(batch.batch["rows"], pages)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, materialize_futures=False)
    def fetch(self, future: Any) -> float:
        return timed_look(lambda: future.get().batch["rows"], pages=False)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={name: tensor + 1 for name, tensor in batch.batch.items()})


class TensorsPeer(RayPeer):
    cpus = 10  # a pool without GPUs holds a core for each worker, in Ray's books

    def __init__(self) -> None:
        self._pools: list[Any] = []
        self._groups: list[Any] = []

    def start_pair(self) -> None:
        """Two groups of one worker."""
        for _ in range(2):
            self._add_group(1)
        self.call_all()

    def make(self, workers: int) -> None:
        self._add_group(workers)

    def _add_group(self, workers: int) -> None:
        pool = RayResourcePool(process_on_nodes=[workers], use_gpu=False, max_colocate_count=1)
        actors = RayClassWithInitArgs(ray.remote(Holder))
        self._pools.append(pool)
        self._groups.append(RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actors, device_name="cpu"))

    def call_all(self) -> None:
        for group in self._groups:
            group.noop()

    def stop(self) -> None:
        for group in self._groups:
            for worker in group.workers:
                ray.kill(worker)
        for pool in self._pools:
            for placement_group in pool.pgs:
                ray.util.remove_placement_group(placement_group)
        self._groups, self._pools = [], []

    def _serialize_by(self, variant: str) -> None:
        os.environ[SERIALIZATION] = variant
        for group in self._groups:
            group.serialize_by(os.environ[SERIALIZATION])

    def hop(self, nbytes: int, variant: str) -> dict[str, float]:
        """The figures of one tensor from the first group's worker to the second's, in seconds."""
        self._serialize_by(variant)
        producer, consumer = self._groups
        producer.prepare(nbytes)
        started = time.perf_counter()
        future = producer.put()
        ray.wait(future.futures)
        put_s = time.perf_counter() - started
        hop_s = timed(consumer.look, [future], [False])
        (inside_s,) = consumer.fetch([future])
        touch_s = timed(consumer.look, [future], [True])
        del future
        producer.prepare(0)
        return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}

    def transfer(self, rows: int, columns: int, variant: str) -> float:
        """Seconds: two int64 columns of `rows` x `columns`, one added by all workers to its rows, back as a batch."""
        self._serialize_by(variant)
        (group,) = self._groups
        batch = DataProto.from_dict(tensors={name: torch.ones(rows, columns, dtype=torch.int64) for name in "ab"})
        started = time.perf_counter()
        references = parallel_put(batch.chunk(group.world_size))
        parts = ray.get(group.execute_all_async("add_one", references))
        joined = DataProto.concat(parts)
        seconds = time.perf_counter() - started
        assert joined.batch["b"].shape == (rows, columns) and int(joined.batch["b"][-1, -1]) == 2
        return seconds


def timed(call: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    peer = TensorsPeer()
    names = ("init", "start", "start_pair", "stop", "shutdown", "hop", "transfer")
    Peer().serve({name: getattr(peer, name) for name in names})
