"""Several Ray nodes on this machine, and what is left of Ray when it should have ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util.placement_group import placement_group_table

from tests.integration.processes import wait_for

__all__ = ["Head", "add_node", "groups_held", "ray_head", "ray_nodes", "session_processes"]

STORE = 100 << 20
NOTICED = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 5,
}
"""A node that is gone is known to be gone after seconds, not half a minute; one that is only slow has its time."""


@contextmanager
def ray_nodes(**head: Any) -> Iterator[RayCluster]:
    """A Ray cluster whose head node is called "head"; ``add_node`` adds others. It ends with the block."""
    nodes = RayCluster()
    try:
        add_node(nodes, "head", _system_config=NOTICED, **head)
        yield nodes
    finally:
        nodes.shutdown()


def add_node(nodes: RayCluster, name: str, **has: Any) -> Any:
    """Another node; returns when the cluster knows it."""
    return nodes.add_node(node_name=name, include_dashboard=False, object_store_memory=STORE, **has)


class Head(NamedTuple):
    """A cluster that runs on its own: where scripts find it, and where Ray's clients do."""

    address: str
    client: str
    directory: Path

    def client_logs(self, lines: int = 20) -> str:
        """The last lines of what Ray's servers for its clients wrote."""
        found = sorted(self.directory.glob("session_latest/logs/ray_client_server*"))
        return "\n".join(f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-lines:]) for log in found)

    def why_no_client(self) -> str:
        """Why Ray's own client, without Podium, does not get in; empty if it does."""
        script = f"import ray; ray.init({self.client!r}); ray.nodes()"
        try:
            plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100.0)
        except subprocess.TimeoutExpired:
            return f"Ray's own client does not get in within 100 s\n{self.client_logs()}"
        return f"Ray's own client: {plain.stderr[-500:]}\n{self.client_logs()}" if plain.returncode else ""


@contextmanager
def ray_head(directory: Path) -> Iterator[Head]:
    """``ray start --head`` with four CPUs, in a process of its own, until the block ends."""
    port, client_port = _free_ports(2)
    head = Head(f"{ray.util.get_node_ip_address()}:{port}", f"ray://127.0.0.1:{client_port}", directory)
    options = (
        f"--port={port} --ray-client-server-port={client_port} --num-cpus=4 --object-store-memory={STORE} "
        f"--include-dashboard=false --disable-usage-stats --block --temp-dir={directory}"
    )
    with (directory / "head.log").open("w") as log:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", *options.split()]
        quiet = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}  # or its servers for clients fail (grpc issue 43055)
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=quiet)
    try:
        started = wait_for(lambda: "block forever until terminated" in (directory / "head.log").read_text(), 60.0)
        assert started, (directory / "head.log").read_text()
        yield head
    finally:
        running.terminate()
        try:
            running.wait(60.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def groups_held() -> list[str]:
    """Names of the placement groups that hold something, as the connected Ray knows them."""
    table: Any = placement_group_table()
    return sorted(group["name"] for group in table.values() if group["state"] != "REMOVED")


def session_processes(word: str) -> list[int]:
    """Processes, this one aside, whose command line or environment has ``word``, such as a Ray session's directory."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if word.encode() in text:
                found.append(int(entry.name))
    return found
