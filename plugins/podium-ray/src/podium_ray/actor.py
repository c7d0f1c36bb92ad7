"""What runs inside a Ray actor: a WorkerProcess behind four kinds of calls.

The actor is a threaded one with concurrency groups, because a call through an async actor takes longer. Ray keeps a
caller's calls in the order sent, and the default group has one thread.

    call, bare, call_stored   one request at a time, in order    (default group: one thread)
    control                   Podium's own: status, cancel, …    (a few threads)
    aside                     endpoints marked concurrent        (GROUPS[...] threads)
    watch                     never returns: its failure is the process's end
"""

import os
import pickle
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from podium.backends.process import THREAD_VARIABLES, Surroundings, accelerators, interface_of, log_to, visibility
from podium.runtime.worker_process import WorkerProcess
from podium_ray.connect import ray
from podium_ray.wire import Parcel, RayStore, outcome_to_wire, read_bare_name

__all__ = ["GROUPS", "ProcessActor"]

GROUPS = {"control": 4, "aside": 32, "watch": 1}


_here: dict[str, Any] = {}
"""The WorkerProcess here, for the method that has no ``self``."""


class ProcessActor:
    """One worker process. A method raises only where Podium itself is at fault; what workers raise is an outcome."""

    def __init__(self) -> None:
        self._process = WorkerProcess(
            make_store=lambda: RayStore(self._store_bytes), address=ray.util.get_node_ip_address()
        )
        self._store_bytes: int | None = None
        _here.update({"process": self._process, "name of task": ray.get_runtime_context().get_task_name})

    def settle_in(
        self,
        env: Mapping[str, str],
        visible: Sequence[str],
        log_path: str,
        surroundings: Surroundings,
        store_bytes: int | None,
    ) -> int:
        """Take over the controller's surroundings. ``visible`` are the ids of this process's accelerators. Returns this
        process's id."""
        self._store_bytes = store_bytes
        threads = dict.fromkeys(THREAD_VARIABLES, env.get("OMP_NUM_THREADS", str(surroundings.threads)))
        os.environ.update({**threads, **visibility(range(len(visible)), visible or accelerators()), **env})
        log_to(Path(log_path))
        surroundings.settle_in(interface_of(ray.util.get_node_ip_address()))
        return os.getpid()

    def call(self, message: bytes) -> bytes | list[Any]:
        """Run one request to its end. Its signature has no ``*``, because Ray takes longer where one has."""
        return self._run(message)

    @staticmethod
    def bare() -> bytes | list[Any]:
        """A call without arguments: what to run is in the task's name. The method is static, because Ray gives every
        other one a hidden parameter for its tracing, which costs time at every call."""
        number, target, method, wants = read_bare_name(_here["name of task"]() or "")
        return outcome_to_wire(_here["process"].execute(number, target, method, {}), wants)

    def call_stored(self, message: bytes, *beside: Any) -> bytes | list[Any]:
        """As ``call``, with references to blocks, and large values from the object store."""
        return self._run(message, *beside)

    @ray.method(concurrency_group="control")
    def control(self, message: bytes, *beside: Any) -> bytes | list[Any]:
        """A request to the process itself, beside whatever it runs."""
        return self._run(message, *beside)

    @ray.method(concurrency_group="aside")
    def aside(self, message: bytes, *beside: Any) -> bytes | list[Any]:
        """An endpoint that runs beside others."""
        return self._run(message, *beside)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """This process's id, for a controller that attaches."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def free_address(self) -> str:
        """``host:port`` where this process can listen."""
        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def _run(self, message: bytes, blocks: Sequence[Any] = (), *stored: Any) -> bytes | list[Any]:
        number, target, method, wants, parcels = pickle.loads(message)
        values = partial(_values, parcels, blocks, stored, f"an argument of {target}.{method}")
        return outcome_to_wire(self._process.execute(number, target, method, values), wants)


def _values(
    parcels: Sequence[tuple[bytes, Any, bool, int]], blocks: Sequence[Any], stored: Sequence[Any], what: str
) -> dict[str, Any]:
    lists, references = iter(stored), iter(blocks)
    values: dict[str, Any] = {}
    for data, inside, alone, count in parcels:
        buffers = next(lists) if inside is None else inside
        values |= Parcel(data, buffers, None, alone, list(islice(references, count))).read(what)
    return values
