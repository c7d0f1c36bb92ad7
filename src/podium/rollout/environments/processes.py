"""Sessions in processes of their own, which can be killed. The worker's side.

    rollout worker ──fork, kill──▶ a process that has loaded the environment ──fork──▶ a session
                   ◀──────────── what the session asks of its client, and how it ended ──┘

A session computes as long as it likes without holding others up. When its time is over, its process is killed with
whatever that has started. The client stays in the worker, where calls are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from podium.errors import PodiumError
from podium.processes import describe_exit
from podium.rollout.environments.child import FRAME, KINDS, LOADED, ORDER, Facts
from podium.rollout.environments.client import Reply
from podium.rollout.environments.contract import Outcome
from podium.rollout.environments.runner import Ending

if TYPE_CHECKING:
    from collections.abc import Mapping

    from podium.rollout.environments.client import Client
    from podium.rollout.environments.config import EnvironmentConfig
    from podium.rollout.environments.contract import Task

__all__ = ["SessionProcesses"]

_START_LIMIT_S: Final = 300.0  # to load the environment
_LONGEST_LINE: Final = 1 << 26  # bytes, of a conversation
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from podium.rollout.environments.child import main; main(int(sys.argv[1]))"
)


class SessionProcesses:
    """Lives each session of an environment in a process of its own.

    Args:
        config: The environment.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._starting = threading.Lock()
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket

    def start(self) -> None:
        """Load the environment in a process, of which sessions are forks, unless there is one. It may take long.

        Raises:
            PodiumError: The environment cannot be loaded there.
        """
        with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            self.close()
            self._orders, far = socket.socketpair()
            path = [entry or os.getcwd() for entry in sys.path]
            with far:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(far.fileno()), json.dumps(path)],
                    pass_fds=[far.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            settings = pickle.dumps(self._config)
            self._orders.sendall(FRAME.pack(len(settings)) + settings)
            self._orders.settimeout(_START_LIMIT_S)
            try:
                with self._orders.makefile("rb") as stream:
                    said = stream.readline()
            except TimeoutError:
                said = b"it was not loaded within %d s" % _START_LIMIT_S
            self._orders.settimeout(None)
            if said.strip() != LOADED:
                self.close()
                reason = said.decode(errors="replace").strip() or "its process ended"
                raise PodiumError(f"environment.name = {self._config.name!r} in a process of its own: {reason}")

    async def play(self, task: Task, client: Client) -> Ending:
        """Live a session, and return how it ended."""
        await asyncio.to_thread(self.start)
        number, calls = next(self._numbers), dict[int, asyncio.Task[None]]()
        near, far = socket.socketpair()
        with far:
            socket.send_fds(self._orders, [ORDER.pack(number, True)], [far.fileno()])
        reader, writer = await asyncio.open_connection(sock=near, limit=_LONGEST_LINE)
        try:
            _send(writer, _facts(task, client))
            while line := await reader.readline():
                message = _read(line)
                if "ending" in message:
                    return _as_ending(message["ending"], client)
                if "status" in message:
                    how = describe_exit(os.waitstatus_to_exitcode(message["status"]))
                    return Ending(failure=f"its process ended ({how})")
                if "do" in message:
                    call = calls[message["id"]] = asyncio.create_task(_answer(writer, message, client))
                    call.add_done_callback(lambda _, id=message["id"]: calls.pop(id, None))
                elif "cancel" in message and message["id"] in calls:
                    calls[message["id"]].cancel()
            return Ending(failure="the process of the environment ended")
        finally:
            for call in [*calls.values()]:
                call.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                self._orders.send(ORDER.pack(number, False))

    def close(self) -> None:
        """End the process of the environment, and with it all sessions."""
        if self._process is not None:
            self._orders.close()  # which it takes as its end
            try:
                self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _facts(task: Task, client: Client) -> Facts:
    try:
        base_url, no_address = client.base_url, ""
    except PodiumError as error:
        base_url, no_address = "", str(error)
    return Facts(dict(task), client.seed, client.model, client.session_id, client.api_key, base_url, no_address)


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(FRAME.pack(len(data)) + data)


def _read(line: bytes) -> Mapping[str, Any]:
    """A line of a session; nothing for what is none, such as the half of one that was killed."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


async def _answer(writer: asyncio.StreamWriter, asked: Mapping[str, Any], client: Client) -> None:
    """Do what a session asks of its client, and send what came of it."""
    answer: dict[str, Any] = {"id": asked["id"]}
    try:
        for name in asked["agent"]:
            client = client.agent(name)
        match asked["do"]:
            case "chat":
                reply = await client.chat(**asked["with"])
                answer["value"] = (reply.message, reply.finish_reason, reply.session, reply.call)
            case "reward":
                which = asked["with"]["which"]
                client.reward(asked["with"]["value"], None if which is None else Reply({}, "", *which))
            case "turns":
                answer["value"] = client.turns
            case "full":
                answer["value"] = client.full
            case _:  # "agent"
                answer["value"] = client.base_url if asked["with"]["address"] else ""
    except Exception as error:  # noqa: BLE001 - it is the session's to hear
        kind = next((name for name, each in KINDS.items() if isinstance(error, each)), "")
        answer["error"] = (kind or "GenerationError", str(error) if kind else f"{type(error).__name__}: {error}")
    _send(writer, answer)


def _as_ending(found: Mapping[str, Any], client: Client) -> Ending:
    client.counts.update(found["counts"])
    return Ending(
        Outcome(score=found["score"], parts=found["parts"], agents=found["agents"]),
        found["failure"],
        found["details"],
        found["truncated"],
    )
