"""AReaL's RTensor, over HTTP between its own local workers, in bench.suites.dataplane. Runs in .venvs/areal.

Its scheduler starts the RPC servers that hold the engines, as its trainers do. They would listen on every interface,
and run commands for whoever asks; here they listen at the one address where the scheduler looks for them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from areal.api.cli_args import SchedulingSpec
from areal.api.scheduler_api import Job
from areal.infra.rpc.rtensor import RTensor
from areal.infra.scheduler import LocalScheduler
from areal.utils.network import gethostip
from protocol import Peer

ROLE = "holder"
START_TIMEOUT_S = 120.0


class ArealPeer:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="areal-bench-")
        self._scheduler: Any = None

    def start(self, workers: int) -> None:
        """So many RPC servers, each with an engine."""
        folder = Path(self._folder.name)
        (folder / "names").mkdir()
        self._scheduler = LocalScheduler(
            gpu_devices=[],
            log_dir=str(folder / "logs"),
            startup_timeout=START_TIMEOUT_S,
            experiment_name="bench",
            trial_name="bench",
            fileroot=str(folder),
            nfs_record_root=str(folder / "names"),
        )
        spec = SchedulingSpec(
            cpu=1,
            mem=1,
            cmd=f"python -m areal.infra.rpc.rpc_server --host {gethostip()}",
            env_vars={"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        )
        self._scheduler.create_workers(Job(role=ROLE, replicas=workers, tasks=[spec]))
        self._scheduler.get_workers(ROLE)
        for rank in range(workers):
            asyncio.run(self._scheduler.create_engine(f"{ROLE}/{rank}", "areal_engine.Holder"))

    def stop(self) -> None:
        self._scheduler.delete_workers()
        self._folder.cleanup()

    def hop(self, nbytes: int, variant: str) -> dict[str, float]:
        """The figures of one tensor from worker 0 to worker 1, in seconds."""
        del variant  # one way only: base64 within JSON
        self._call(0, "prepare", nbytes)
        reference, put_s = self._timed(0, "give")
        _, hop_s = self._timed(1, "look", reference, False)
        self._clear(reference)
        reference = self._call(0, "give")
        inside_s = self._call(1, "fetch", reference.shard.shard_id, reference.shard.node_addr)
        _, touch_s = self._timed(1, "look", reference, True)
        self._clear(reference)
        self._call(0, "prepare", 0)
        return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}

    def _clear(self, reference: RTensor) -> None:
        """Nothing is freed unless it is told, in the process that holds it and in each that fetched it."""
        asyncio.run(RTensor.clear_node(reference.shard.node_addr, [reference.shard.shard_id]))
        self._call(1, "forget")

    def _call(self, rank: int, method: str, *arguments: Any) -> Any:
        worker = f"{ROLE}/{rank}"
        return self._scheduler.call_engine(worker, method, worker, *arguments)

    def _timed(self, rank: int, method: str, *arguments: Any) -> tuple[Any, float]:
        started = time.perf_counter()
        answer = self._call(rank, method, *arguments)
        return answer, time.perf_counter() - started


if __name__ == "__main__":
    peer = ArealPeer()
    try:
        Peer().serve({name: getattr(peer, name) for name in ("start", "stop", "hop")})
    finally:
        if peer._scheduler is not None:
            peer.stop()
