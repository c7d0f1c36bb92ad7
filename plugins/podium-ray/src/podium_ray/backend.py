"""The backend ``ray``: worker processes are actors of a Ray cluster, embedded or running.

    connect("ray")                       a cluster of this machine alone, which ends with the script
    connect("ray", address="auto")       the cluster that runs on this machine, or that RAY_ADDRESS names
    connect("ray://head:10001")          a cluster elsewhere, through Ray's client

Calls are actor calls. The thread that waits for one takes in the replies; where none waits, Ray's futures bring them.
A call is delivered at most once, so actors are never restarted behind anyone's back.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayError

from podium.backends.files import Files, Log
from podium.backends.process import Surroundings
from podium.errors import ConfigError, WorkerStartError
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.messages import Capabilities, Node, OnDeath, Place, ProcessSpec
from podium_ray.actor import GROUPS, ProcessActor
from podium_ray.connect import connect, disconnect, ray, remove_at_end
from podium_ray.placement import Inventory
from podium_ray.process import RayProcess, Replies
from podium_ray.wire import Parcel, RayStore, pack

__all__ = ["RayBackend"]

ADDRESS_S = 30.0  # for a process that runs to name an address where it can listen
START_SAYS_S = 15.0
LOOK_S = 1.0  # between two looks at whether the nodes on which processes start are still there
NAMESPACE = "podium"
REFUSED = ("max_restarts", "max_task_retries")

_log = logging.getLogger("podium")


class RayBackend(Backend):
    """Args:
    address: "auto", "host:port" or "ray://host:port" of a running cluster. Default: the cluster to which this process
        is already connected, or else a new cluster that ends with the script.
    actor_options: Ray's options for the actor of every worker process; ``start(options=...)`` adds to them.
        ``max_restarts`` and ``max_task_retries`` are refused: a call is delivered at most once.
    preload: Modules that every worker process imports before its workers are made.
    log_dir: Directory for the output of each worker process, ``LABEL.log``, on its node. Default: a private directory.
    echo: Whether to print the output of this machine's processes here too, each line with its worker's label. Default:
        True unless ``log_dir`` is given.
    store_bytes: Number of bytes that each worker may keep by reference in memory. Default: half of the machine's
        memory. Ray's own store spills to disk earlier; ``init={"object_store_memory": ...}`` sets its size.
    init: Further arguments of ``ray.init``, such as ``num_cpus``, ``object_store_memory`` or ``runtime_env``.
    """

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True, exit_status=False, detached=True)

    def __init__(
        self,
        *,
        address: str | None = None,
        actor_options: Mapping[str, Any] | None = None,
        preload: Sequence[str] = ("torch",),
        log_dir: str | Path | None = None,
        echo: bool | None = None,
        store_bytes: int | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        self._actor_options = dict(actor_options or {})
        _check(self._actor_options, "connect('ray', actor_options=...)")
        self._preload = tuple(preload)
        self._store_bytes = store_bytes
        connect(address, init or {})
        self._inventory = Inventory()
        self._replies = Replies()
        self._files = Files(log_dir, echo)
        remove_at_end(self._files.private)
        self._processes: set[RayProcess] = set()
        self._closed = False
        self._closing = threading.RLock()

    # -- contract ------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        return self._inventory.nodes()

    def reserve(self, places: Sequence[Place], detached: bool) -> tuple[Any, Sequence[Place]]:
        return self._inventory.reserve(places, detached=detached)

    def release(self, token: Any) -> None:
        self._inventory.release(token)

    def check_options(self, options: Mapping[str, Any]) -> None:
        _check(options, "start(options=...)")

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        self._look_for(specs)
        processes: list[RayProcess] = []
        try:
            for spec in specs:
                processes.append(self._make(spec, on_death))
            self._settle(processes, specs)
        except BaseException:
            for process in processes:
                with contextlib.suppress(RayError):
                    ray.kill(process.actor, no_restart=True)
            raise
        self._processes = {process for process in self._processes if not process.ended.is_set()}.union(processes)
        return processes

    def attach(self, name: str, on_death: OnDeath) -> Sequence[ProcessHandle]:
        processes: list[RayProcess] = []
        named = ray.util.list_named_actors(all_namespaces=True)
        mine = [actor["name"].rpartition(":") for actor in named if actor["namespace"] == NAMESPACE]
        for rank in sorted(int(rank) for group, _, rank in mine if group == name):
            with contextlib.suppress(ValueError, RayActorError):  # it ended just now
                actor = ray.get_actor(f"{name}:{rank}", namespace=NAMESPACE)
                log = Log(self._files.log_dir / f"{name}-{rank}.log")
                process = RayProcess(rank, actor, log, self._replies, on_death, label=f"{name}-{rank}")
                process.settled(ray.get(actor.pid.remote()))
                processes.append(process)
        return processes

    def let_go(self, processes: Sequence[ProcessHandle]) -> None:
        for process in processes:
            if isinstance(process, RayProcess):
                process.forget()
                self._processes.discard(process)

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        ray_processes = [process for process in processes if isinstance(process, RayProcess)]
        if (
            len({process.node for process in ray_processes}) == 1 and ray_processes[0].log.path.exists()
        ):  # they run here
            return self._files.rendezvous()
        return f"tcp://{ray.get(ray_processes[0].actor.free_address.remote(), timeout=ADDRESS_S)}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument", readers)

    def unpack(self, payload: Parcel) -> Any:
        return payload.read("the result")

    def store(self) -> RayStore:
        return RayStore(self._store_bytes)

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        return self._replies.drive(ended, timeout_s)

    def close(self) -> None:
        with self._closing:  # a second thread returns when the first one is done
            if self._closed:
                return
            self._closed = True
            if ray.is_initialized():
                for process in list(self._processes):
                    process.kill()
                self._inventory.close()
            self._replies.close()
            self._files.close()
            disconnect()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _look_for(self, specs: Sequence[ProcessSpec]) -> None:
        node_names = {node.name for node in self.nodes()}
        for spec in specs:
            if spec.place.node not in node_names:
                what = f"node {spec.place.node} has left the cluster"
                raise WorkerStartError(f"{spec.label}: {what}", rank=spec.rank, lost=f"{spec.label} ({what})")

    def _make(self, spec: ProcessSpec, on_death: OnDeath) -> RayProcess:
        actor_options = {**self._actor_options, **spec.options}
        runtime_env = dict(actor_options.pop("runtime_env", {}))
        if spec.env:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **spec.env}
        if spec.detached:
            actor_options |= {"name": f"{spec.detached}:{spec.rank}", "namespace": NAMESPACE, "lifetime": "detached"}
        options = {
            "num_cpus": 0,
            "enable_task_events": False,  # Podium has a trace of its own, and Ray's slows down every call
            "scheduling_strategy": self._inventory.strategy(spec.place.node, spec.token, spec.slot),
            **({"runtime_env": runtime_env} if runtime_env else {}),
            **actor_options,
        }
        try:
            made = _Actor.options(**options).remote()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{spec.label}: Ray refuses these actor options: {error}") from error

        log, node = self._files.begin_log(spec.label), spec.place.node
        return RayProcess(spec.rank, made, log, self._replies, on_death, label=spec.label, node=node)

    def _settle(self, processes: Sequence[RayProcess], specs: Sequence[ProcessSpec]) -> None:
        """Wait until all have taken over this script's surroundings."""
        process_by_ref: dict[Any, RayProcess] = {}
        for process, spec in zip(processes, specs, strict=True):
            surroundings, visible = Surroundings.here(spec.threads, self._preload), spec.token.devices[spec.slot]
            how = (spec.env, visible, str(process.log.path), surroundings, self._store_bytes)
            process_by_ref[process.actor.settle_in.remote(*how)] = process
        timeout_s = specs[0].timeout_s
        began = time.monotonic()
        say = START_SAYS_S
        while process_by_ref:
            ready, _ = ray.wait(
                list(process_by_ref), timeout=max(0.0, min(LOOK_S, began + timeout_s - time.monotonic()))
            )
            if ready:
                self._wait_for_settlement(ready[0], process_by_ref.pop(ready[0]), specs)
                continue
            late, waited = ", ".join(process.label for process in process_by_ref.values()), time.monotonic() - began
            if waited >= timeout_s:
                raise WorkerStartError(
                    f"Ray did not start {late} within {timeout_s:g} s. Ray's workers have a niceness of 15: if other "
                    "processes keep the machine busy, start Ray with RAY_worker_niceness=0",
                    rank=processes[0].rank,
                )
            if waited >= say:
                _log.warning("Ray has not started %s for %.0f s", late, waited)
                say += START_SAYS_S
            self._look_for(specs)

    def _wait_for_settlement(self, answer: Any, process: RayProcess, specs: Sequence[ProcessSpec]) -> None:
        try:
            process.settled(ray.get(answer))
        except RayError as error:
            self._look_for(specs)
            words = "\n".join(process.log.last_lines())
            raise WorkerStartError(
                f"{process.label}: its Ray actor did not start: {error}\n{words}",
                rank=process.rank,
                lost=f"{process.label} (its Ray actor has ended)" if isinstance(error, RayActorError) else "",
            ) from error


def _check(options: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for options of actors that Ray does not know or that cannot be set."""
    for name in REFUSED:
        if name in options:
            raise ConfigError(
                f"{where}: {name} cannot be set: a call is delivered at most once, and group.restart() replaces a "
                "worker that died"
            )
    try:
        _Actor.options(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: Ray refuses these actor options: {error}") from error


_Actor = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(ProcessActor)
