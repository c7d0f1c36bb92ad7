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
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from podium.errors import PodiumError
from podium.exceptions import describe_error, read_text
from podium.processes import START_LIMIT_S, ForkServer, FrameError, command, describe_exit, make_frame, read_frame
from podium_agents.environments.client import Reply
from podium_agents.environments.contract import Outcome
from podium_agents.environments.runner import Ending
from podium_agents.environments.session_process import ENDING, KINDS, Facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from podium.rollout.environments import EnvironmentConfig
    from podium_agents.environments.client import Client
    from podium_agents.environments.contract import Task

__all__ = ["SessionProcesses"]


class SessionProcesses:
    """Lives each session of an environment in a process of its own.

    Args:
        config: The environment.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._starting = threading.Lock()
        self._numbers = itertools.count(1)
        self._server: ForkServer | None = None

    def start(self) -> None:
        """Load the environment in a process, of which sessions are forks, unless there is one. It may take long.

        Raises:
            PodiumError: The environment cannot be loaded there.
        """
        with self._starting:
            if self._server is not None and self._server.alive():
                return
            self.close()
            server = self._server = ForkServer(command("podium_agents.environments.session_process"))
            connection = server.channel.connection
            try:
                server.channel.send(0, pickle.dumps(self._config))
                connection.settimeout(START_LIMIT_S)
                reply = server.channel.receive()
                reason = "its process ended" if reply is None else reply[1].decode(errors="replace")
            except TimeoutError:
                reason = f"it was not loaded within {START_LIMIT_S:.0f} s"
            except ConnectionError:
                reason = "its process ended"
            except FrameError:
                reason = "it sent something other than an answer"
            if reason:
                self.close()
                server.channel.close()
                raise PodiumError(f"environment.name = {self._config.name!r} in a process of its own: {reason}")
            connection.settimeout(None)
            threading.Thread(target=_read_ends, args=(server,), name="podium-sessions", daemon=True).start()

    async def play(self, task: Task, client: Client) -> Ending:
        """Live a session, and return how it ended."""
        await asyncio.to_thread(self.start)
        server = self._server
        assert server is not None
        number, calls = next(self._numbers), dict[int, asyncio.Task[None]]()
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        try:
            end = Future[int | None]()
            with far:
                server.fork(number, (), far.fileno(), on_end=partial(_settle, end))
            _send(writer, 0, _facts(task, client))
            while (frame := await read_frame(reader)) is not None:
                request, message = frame[0], _read(frame[1])
                if request == ENDING and message:
                    return _as_ending(message, client)
                if "do" in message:
                    call = calls[request] = asyncio.create_task(_answer(writer, request, message, client))
                    call.add_done_callback(lambda _, request=request: calls.pop(request, None))
                elif not frame[1] and request in calls:
                    calls[request].cancel()
            status = await asyncio.wrap_future(end)
            if status is None:
                return Ending(failure="the process of the environment ended")
            return Ending(failure=f"its process ended ({describe_exit(os.waitstatus_to_exitcode(status))})")
        finally:
            for call in [*calls.values()]:
                call.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                server.kill(number)

    def close(self) -> None:
        """End the process of the environment, and with it all sessions."""
        if self._server is not None:
            self._server.end()
            self._server = None


def _settle(end: Future[int | None], status: int | None) -> None:
    if end.set_running_or_notify_cancel():
        end.set_result(status)


def _read_ends(server: ForkServer) -> None:
    while server.read_ends():
        pass
    server.channel.close()


def _facts(task: Task, client: Client) -> Facts:
    try:
        base_url, no_address = client.base_url, ""
    except PodiumError as error:
        base_url, no_address = "", str(error)
    return Facts(dict(task), client.seed, client.model, client.session_id, client.api_key, base_url, no_address)


def _send(writer: asyncio.StreamWriter, number: int, message: Any) -> None:
    writer.write(make_frame(number, pickle.dumps(message)))


def _read(data: bytes) -> Mapping[str, Any]:
    """A message of a session; nothing for what is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}  # pyright: ignore[reportUnknownVariableType]


async def _answer(writer: asyncio.StreamWriter, number: int, asked: Mapping[str, Any], client: Client) -> None:
    """Do what a session asks of its client, and send what came of it."""
    answer: dict[str, Any] = {}
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
        kind = next((name for name, error_class in KINDS.items() if isinstance(error, error_class)), "")
        answer["error"] = (kind or "GenerationError", read_text(error) if kind else describe_error(error))
    _send(writer, number, answer)


def _as_ending(found: Mapping[str, Any], client: Client) -> Ending:
    client.counts.update(found["counts"])
    return Ending(
        Outcome(score=found["score"], parts=found["parts"], agents=found["agents"]),
        found["failure"],
        found["details"],
        found["truncated"],
    )
