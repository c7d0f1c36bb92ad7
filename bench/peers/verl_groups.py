"""verl's RayWorkerGroup doing what Podium's workers do in bench.suites. Runs in .venvs/verl, without Podium."""

from __future__ import annotations

import os
from typing import Any

from protocol import Peer
from ray_cluster import RayPeer, median_s, ray, rows_of
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


class Echo(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialize_by(self, method: str) -> None:
        os.environ[SERIALIZATION] = method

    def pid(self) -> int:
        return os.getpid()

    def fault(self, *arguments: Any) -> None:
        from faulty import fail_or_work

        fail_or_work(self.rank, *arguments)


class VerlPeer(RayPeer):
    cpus = 8  # a pool without GPUs holds a core for each worker, in Ray's books

    def __init__(self) -> None:
        self._pool: Any = None
        self._group: Any = None

    def make(self, workers: int) -> None:
        self._pool = RayResourcePool(process_on_nodes=[workers], use_gpu=False, max_colocate_count=1)
        self._make_group()

    def _make_group(self) -> None:
        workers = RayClassWithInitArgs(ray.remote(Echo))
        self._group = RayWorkerGroup(resource_pool=self._pool, ray_cls_with_init=workers, device_name="cpu")

    def stop(self) -> None:
        self._end_group()
        for placement_group in self._pool.pgs:
            ray.util.remove_placement_group(placement_group)

    def _end_group(self) -> None:
        for worker in self._group.workers:
            ray.kill(worker)

    def call_all(self) -> None:
        self._group.noop()

    def send(self, method: str, *arguments: Any) -> list[Any]:
        return self._group.execute_all_async(method, *arguments)

    def replace(self, rank: int) -> None:
        """verl restarts no worker: another group on the same pool."""
        self._end_group()
        self._make_group()
        self.call_all()

    def echo(self, nbytes: int, calls: int, numpy: bool) -> float:
        """A DataProto split over the workers and joined again, pickled by torch.save (verl's default) or as numpy."""
        method = "numpy" if numpy else ""
        os.environ[SERIALIZATION] = method
        self._group.serialize_by(method)
        batch = DataProto.from_dict(tensors={"rows": rows_of(nbytes)})

        def once() -> None:
            joined = self._group.echo(batch)
            assert joined.batch["rows"].shape == batch.batch["rows"].shape

        return median_s(once, calls)


if __name__ == "__main__":
    peer = VerlPeer()
    names = ("init", "start", "stop", "shutdown", "noop", "echo", "exception", "kill")
    Peer().serve({name: getattr(peer, name) for name in names})
