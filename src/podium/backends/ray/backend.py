# pyright: basic
"""The backend ``ray``: hosts are actors of a Ray cluster, embedded or running.

    connect("ray")                       a cluster of this machine alone, which ends with the script
    connect("ray", address="auto")       the cluster that runs on this machine, or that RAY_ADDRESS names
    connect("ray://head:10001")          a cluster elsewhere, through Ray's client

Calls are actor calls. The thread that waits for one takes in the replies; where none waits, Ray's futures bring them.
A call is delivered at most once, so actors are never restarted behind anyone's back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError

from podium.backends.logs import LogEcho, last_lines
from podium.backends.ray.actor import GROUPS, HostActor, Setting
from podium.backends.ray.connect import connect, disconnect
from podium.backends.ray.host import RayHost
from podium.backends.ray.placement import Inventory, Reservation
from podium.backends.ray.replies import Replies
from podium.backends.ray.wire import Parcel, pack
from podium.errors import ConfigError, WorkerStartError
from podium.runtime.backend import Backend, Capabilities, Death, HostHandle, HostSpec, Node, Place

__all__ = ["RayBackend"]

START_TIMEOUT_S = 120.0
START_SAYS_S = 15.0
LOOK_S = 1.0  # between two looks at whether the nodes on which hosts start are still there
NAMESPACE = "podium"
REFUSED = ("max_restarts", "max_task_retries")

_log = logging.getLogger("podium")


class RayBackend(Backend):
    """Args:
    address: "auto", "host:port" or "ray://host:port" of a running cluster; None starts one for this script, or uses
        the one to which this process is connected already.
    actor_options: of Ray, for every host; ``start(options=...)`` adds to them. ``max_restarts`` and
        ``max_task_retries`` are refused: a call is delivered at most once.
    preload: modules that every host imports before its workers are made.
    log_dir: where each host's output goes, ``LABEL.log``, on the node it runs on; a temporary directory unless given.
    echo: also print the output of hosts on this machine here, every line with its host's label; done unless there
        is a ``log_dir``.
    store_bytes: how much each worker may keep by reference in memory; half of the machine's unless given. Ray's own
        store spills to disk long before (``init={"object_store_memory": ...}``).
    init: further arguments of ``ray.init``, such as ``num_cpus``, ``object_store_memory`` or ``runtime_env``.
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
        _refuse(self._actor_options, "connect('ray', actor_options=...)")
        self._preload = tuple(preload)
        self._store_bytes = store_bytes
        connect(address, init or {})
        self._inventory = Inventory()
        self._replies = Replies()
        self._private = Path(tempfile.mkdtemp(prefix="podium-ray-"))
        self._log_dir = Path(log_dir or self._private / "logs").absolute()
        self._echo = LogEcho() if (log_dir is None if echo is None else echo) else None
        self._hosts: set[RayHost] = set()
        self._rendezvous = itertools.count(1)
        self._reservations: list[Reservation] = []
        self._closed = False

    # -- contract ------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        return self._inventory.nodes()

    def reserve(self, places: Sequence[Place], detached: bool) -> tuple[Any, Sequence[Place]]:
        reservation, given = self._inventory.reserve(places, detached=detached)
        if not detached:
            self._reservations.append(reservation)
        return reservation, given

    def release(self, token: Reservation) -> None:
        self._inventory.release(token)
        if token in self._reservations:
            self._reservations.remove(token)

    def start_hosts(self, specs: Sequence[HostSpec], on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        self._look_for(specs)
        hosts: list[RayHost] = []
        try:
            for spec in specs:
                hosts.append(self._make(spec, on_death))
            self._settle(hosts, specs)
        except BaseException:
            for host in hosts:
                with contextlib.suppress(RayError):
                    ray.kill(host.actor, no_restart=True)
            raise
        self._hosts.update(hosts)
        return hosts

    def attach(self, name: str, on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        hosts: list[RayHost] = []
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        mine = [each["name"].rpartition(":") for each in named if each["namespace"] == NAMESPACE]
        for rank in sorted(int(rank) for group, _, rank in mine if group == name):
            with contextlib.suppress(ValueError, RayActorError):  # it ended just now
                actor = ray.get_actor(f"{name}:{rank}", namespace=NAMESPACE)
                host = RayHost(rank, f"{name}-{rank}", actor, self._replies, on_death)
                settled: Any = ray.get(actor.hello.remote())
                host.settled(settled, self._log_dir / f"{host.label}.log")
                hosts.append(host)
        return hosts

    def let_go(self, hosts: Sequence[HostHandle]) -> None:
        for host in hosts:
            if isinstance(host, RayHost):
                host.forget()
                self._hosts.discard(host)

    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        known = [host for host in hosts if isinstance(host, RayHost)]
        if len({host.node for host in known}) == 1 and _is_here(known[0]):
            return f"file://{self._private}/rendezvous-{next(self._rendezvous)}"
        return f"tcp://{ray.get(known[0].actor.free_address.remote())}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument", readers)

    def unpack(self, payload: Parcel) -> Any:
        return payload.read("the result")

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        return self._replies.drive(ended, timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if ray.is_initialized():
            for host in list(self._hosts):
                host.kill()
            for reservation in list(self._reservations):
                with contextlib.suppress(RayError):
                    self.release(reservation)
        self._replies.close()
        if self._echo is not None:
            self._echo.stop()
        disconnect()
        shutil.rmtree(self._private, ignore_errors=True)

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _look_for(self, specs: Sequence[HostSpec]) -> None:
        there = {node.name for node in self.nodes()}
        for spec in specs:
            if spec.place.node not in there:
                raise WorkerStartError(f"{spec.label}: node {spec.place.node} has left the cluster", rank=spec.rank)

    def _make(self, spec: HostSpec, on_death: Callable[[int, Death], None]) -> RayHost:
        _refuse(spec.options, "start(options=...)")
        own = {**self._actor_options, **spec.options}
        runtime_env = dict(own.pop("runtime_env", {}))
        if spec.env:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **spec.env}
        if spec.detached:
            own |= {"name": f"{spec.detached}:{spec.rank}", "namespace": NAMESPACE, "lifetime": "detached"}
        options = {
            "num_cpus": 0,
            "enable_task_events": False,  # Podium has its own trace; Ray's makes a call 6 % longer
            "scheduling_strategy": self._inventory.strategy(spec.place.node, spec.token, spec.slot),
            **({"runtime_env": runtime_env} if runtime_env else {}),
            **own,
        }
        try:
            made = _Actor.options(**options).remote()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{spec.label}: Ray refuses these actor options: {error}") from error

        def ended(rank: int, death: Death) -> None:
            self._hosts.discard(host)
            on_death(rank, death)

        host = RayHost(spec.rank, spec.label, made, self._replies, ended, spec.place.node)
        return host

    def _settle(self, hosts: Sequence[RayHost], specs: Sequence[HostSpec]) -> None:
        """Wait until all have taken over this script's surroundings."""
        here = [path or os.getcwd() for path in sys.path]
        asked: dict[Any, tuple[RayHost, Path]] = {}
        for host, spec in zip(hosts, specs, strict=True):
            path = self._log_dir / f"{spec.label}.log"
            visible = spec.token.devices[spec.slot]
            setting = Setting(
                spec.threads, visible, spec.env, str(path), os.getcwd(), here, self._preload, self._store_bytes
            )
            asked[host.actor.settle_in.remote(setting)] = host, path
            if self._echo is not None:
                self._echo.follow(spec.label, path)
        began = time.monotonic()
        say = START_SAYS_S
        while asked:
            ready, _ = ray.wait(list(asked), timeout=LOOK_S)
            if ready:
                self._settled(ready[0], *asked.pop(ready[0]), specs)
                continue
            late, waited = ", ".join(host.label for host, _ in asked.values()), time.monotonic() - began
            if waited >= START_TIMEOUT_S:
                raise WorkerStartError(
                    f"Ray did not start {late} within {START_TIMEOUT_S:g} s. Its workers have a niceness of 15: where "
                    "others keep the machine busy, start Ray with RAY_worker_niceness=0",
                    rank=hosts[0].rank,
                )
            if waited >= say:
                _log.warning("Ray has not started %s for %.0f s", late, waited)
                say += START_SAYS_S
            self._look_for(specs)

    def _settled(self, answer: Any, host: RayHost, log: Path, specs: Sequence[HostSpec]) -> None:
        try:
            host.settled(cast(Any, ray.get(answer)), log)
        except RayError as error:
            self._look_for(specs)
            words = "\n".join(last_lines(log))
            raise WorkerStartError(
                f"{host.label}: its Ray actor did not start: {error}\n{words}", rank=host.rank
            ) from error


def _refuse(options: Mapping[str, Any], where: str) -> None:
    for name in REFUSED:
        if name in options:
            raise ConfigError(
                f"{where}: {name} cannot be set: a call is delivered at most once, and a worker that died is made "
                "again by group.restart()"
            )


_Actor: Any = cast(Any, ray.remote)(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(HostActor)


def _is_here(host: RayHost) -> bool:
    return host.log is not None and host.log[0].exists()
