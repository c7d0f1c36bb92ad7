"""Ray's API, and this process's connection to Ray: made by the first open backend, and ended by the last.

An embedded cluster is this user's alone. It listens on the loopback interface, its directory lies in one that others
cannot enter, and the token that Ray asks its callers for is in a file that others cannot read.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import ray as typed
from ray._private import ray_constants

from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.processes import children_of
from podium_ray.cleanup import Tidier

__all__ = ["connect", "disconnect", "ray", "remove_at_end"]

ray: Any = typed  # a strict type checker knows few of Ray's own types

KNOCK_S = 10.0
QUIET = {"configure_logging": False, "log_to_driver": False}
EMBEDDED = {**QUIET, "include_dashboard": False, "logging_level": logging.ERROR}
ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_process_group_cleanup_enabled": "1",  # what a worker started ends with it
    # An embedded cluster starts no workers before they are asked for. An actor with an environment, as ours are, gets
    # none of those, and they delay the start by two seconds where there are two cores.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
AUTHENTICATION = (
    "; if the cluster requires a token (Ray logs InvalidAuthToken), set RAY_AUTH_MODE=token, because Ray does not "
    "set it"
)
AGENT = re.compile(rb"ray::\w+Agent|/agent\.py|/agent/main\.py")  # in a command line, before and after it is renamed
CLIENT_STARTS = 3
CLIENT_FAILED = ("Starting Ray client server failed", "Proxy failed to Connect")
CLIENT_LOG = (
    "; the log that Ray names is on the head node, in /tmp/ray/session_latest/logs or below the head's --temp-dir. "
    "If the log mentions epoll_wait, start the head with GRPC_ENABLE_FORK_SUPPORT=0"
)

_users = [0, 0]  # open backends, and whether Ray was connected by somebody else
_directories: list[str] = []  # of an embedded cluster
_tidier = Tidier()


def connect(address: str | None, init: Mapping[str, Any]) -> None:
    """Connect this process to Ray, unless it is connected."""
    if not _users[0]:
        _users[1] = ray.is_initialized()  # by the user's own ray.init(): not ours to end
    if not ray.is_initialized():
        debugger = os.environ.get("PYTHONBREAKPOINT")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # an embedded cluster has a token
        try:
            if address is None:
                _embed(init)
            else:
                _knock(address)
                _init(address, {**QUIET, **init})
        except (Exception, SystemExit) as error:
            where = "an embedded cluster" if address is None else f"address {address!r}"
            unsure = address is not None and "RAY_AUTH_MODE" not in os.environ
            hint = CLIENT_LOG if _no_client_server(error) else AUTHENTICATION if unsure else ""
            first_line = read_text(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(f"connect('ray'): {where} cannot be had: {first_line}{hint}") from error
        if debugger is None:  # Ray sets its own for the whole process; the script's breakpoint() shall be Python's
            os.environ.pop("PYTHONBREAKPOINT", None)
    _users[0] += 1


def disconnect() -> None:
    """The last backend ends the connection, and an embedded cluster with it."""
    _users[0] -= 1
    if _users[0]:
        return
    if not _users[1]:
        ray.shutdown()
        while _directories:
            shutil.rmtree(_directories.pop(), ignore_errors=True)
    _tidier.close()


def remove_at_end(directory: str | Path) -> None:
    """Have ``directory`` removed when the last backend ends the connection, or when this script is killed."""
    _tidier.remove(directory)


def _embed(init: Mapping[str, Any]) -> None:
    """Start a cluster of this machine. Its directory stays where Ray does not start, for its logs."""
    init_options = dict(init)
    if "_temp_dir" not in init_options:
        root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        os.makedirs(root, exist_ok=True)
        private = tempfile.mkdtemp(prefix="podium-", dir=root)
        remove_at_end(private)
        init_options["_temp_dir"] = f"{private}/ray"  # Ray opens its own directories to everybody
    _keep_token_private()
    with contextlib.nullcontext() if "_node_ip_address" in init_options else _loopback():
        try:
            _init("local", {**EMBEDDED, **init_options})
        except Exception as error:
            _tidier.close(remove=False)
            raise RuntimeError(
                f"{read_text(error).strip().partition(chr(10))[0]} (Ray's logs: {init_options['_temp_dir']})"
            ) from error
    for agent in _agents():
        _tidier.kill(agent)
    if "_temp_dir" not in init:
        _directories.append(os.path.dirname(init_options["_temp_dir"]))


def _agents() -> list[int]:
    """Process ids of the embedded cluster's own agents. Workers end by themselves, with what they have started."""
    pids: list[int] = []
    for raylet in ray._private.worker._global_node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]:
        for pid in children_of(raylet.process.pid):
            with contextlib.suppress(OSError):
                if AGENT.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                    pids.append(pid)
    return pids


@contextlib.contextmanager
def _loopback() -> Generator[None]:
    """Ray listens on every interface, also if it is given a loopback address, unless it takes the machine for one that
    cannot have a cluster of several."""
    constants: Any = ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _keep_token_private() -> None:
    """Ray makes a token for an embedded cluster, which everybody may read, unless there is one in the environment."""
    if any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.chmod(0o600)
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def _init(address: str, given: Mapping[str, Any]) -> None:
    """``ray.init``. Behind ``ray://`` Ray makes a server process for each client; with grpcio 1.80 and later the fork
    for it fails now and then (grpc issue 43055), so it is asked again."""
    for left in reversed(range(CLIENT_STARTS)):
        try:
            with _sigterm_kept():
                ray.init(address=address, **given)
            return
        except ConnectionAbortedError as error:
            if not left or not _no_client_server(error):
                raise


@contextlib.contextmanager
def _sigterm_kept() -> Generator[None]:
    """Put a handler of SIGTERM that the script has set back after the block, in which Ray replaces it by its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _no_client_server(error: BaseException) -> bool:
    return isinstance(error, ConnectionAbortedError) and any(phrase in read_text(error) for phrase in CLIENT_FAILED)


def _knock(address: str) -> None:
    """OSError at once where nobody listens; Ray tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
