"""Ray's API, and this process's connection to Ray: made by the first open backend, and ended by the last."""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import ray as typed
from ray.exceptions import RayError

from podium.errors import ConfigError

__all__ = ["connect", "disconnect", "ray"]

ray: Any = typed  # a strict type checker knows few of Ray's own types

KNOCK_S = 10.0
QUIET = {"configure_logging": False, "log_to_driver": False}
EMBEDDED = {**QUIET, "include_dashboard": False, "logging_level": logging.ERROR}
ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_process_group_cleanup_enabled": "1",  # what a worker started ends with it
}
AUTHENTICATION = (
    "; if it wants a token (Ray logs InvalidAuthToken), set RAY_AUTH_MODE=token, which Ray does not by itself"
)
CLIENT_STARTS = 3
CLIENT_FAILED = ("Starting Ray client server failed", "Proxy failed to Connect")
CLIENT_LOG = (
    "; the log that Ray names is in its session's directory on the head node, /tmp/ray/session_latest/logs unless it "
    "has --temp-dir. If it speaks of epoll_wait, start the head with GRPC_ENABLE_FORK_SUPPORT=0"
)

_users = [0, 0]  # open backends, and whether Ray was connected by somebody else


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
            _knock(address or "")
            _init(address or "local", {**(QUIET if address else EMBEDDED), **init})
        except (OSError, RuntimeError, RayError, ValueError, TypeError) as error:
            where = "an embedded cluster" if address is None else f"address {address!r}"
            unsure = address is not None and "RAY_AUTH_MODE" not in os.environ
            hint = CLIENT_LOG if _no_client_server(error) else AUTHENTICATION if unsure else ""
            raise ConfigError(f"connect('ray'): {where} cannot be had: {error}{hint}") from error
        if debugger is None:  # Ray sets its own for the whole process; the script's breakpoint() shall be Python's
            os.environ.pop("PYTHONBREAKPOINT", None)
    _users[0] += 1


def disconnect() -> None:
    """The last backend ends the connection, and an embedded cluster with it."""
    _users[0] -= 1
    if not _users[0] and not _users[1]:
        ray.shutdown()


def _init(address: str, given: Mapping[str, Any]) -> None:
    """``ray.init``. Behind ``ray://`` Ray makes a server process for each client; with grpcio 1.80 and later the fork
    for it fails now and then (grpc issue 43055), so it is asked again."""
    for left in reversed(range(CLIENT_STARTS)):
        try:
            ray.init(address=address, **given)
            return
        except ConnectionAbortedError as error:
            if not left or not _no_client_server(error):
                raise


def _no_client_server(error: BaseException) -> bool:
    return isinstance(error, ConnectionAbortedError) and any(said in str(error) for said in CLIENT_FAILED)


def _knock(address: str) -> None:
    """OSError at once where nobody listens; Ray tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
