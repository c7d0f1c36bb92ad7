"""Sessions in processes of their own. The side of those processes.

The process of the environment loads it, and then only forks. Each fork lives one session: it asks its worker for what
the model says, in lines of JSON, and the worker answers with pickles. When the worker closes the connection, or ends,
the session is over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple

from podium.errors import ConfigError, GenerationError
from podium.processes import Supervisor
from podium.rollout.environments.client import ContextFull, Reply, agent_name, hash_seed
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.environments.contract import Messages
from podium.rollout.environments.resolve import Play, resolve_environment
from podium.rollout.environments.runner import ending_of

__all__ = ["FRAME", "KINDS", "LOADED", "ORDER", "DistantClient", "Facts", "main"]

FRAME: Final = struct.Struct("!Q")  # the length of a pickle that follows
ORDER: Final = struct.Struct("!Q?")  # the number of a session, and whether it begins, with its socket, or is killed
LOADED: Final = b"loaded"
KINDS: Final = {
    "ContextFull": ContextFull,
    "GenerationError": GenerationError,
    "ConfigError": ConfigError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}
"""What a client raises, by the names by which a process is told of it."""


class Facts(NamedTuple):
    """The first message to a session. ``no_address`` says why there is no ``base_url``."""

    task: Mapping[str, Any]
    seed: int
    model: str
    session_id: str
    api_key: str
    base_url: str
    no_address: str


def main(fd: int) -> None:
    """Load an environment and fork its sessions, until the worker closes its end of the socket ``fd``."""
    orders = socket.socket(fileno=fd)
    orders.set_inheritable(False)
    supervisor = Supervisor(orders)
    sys.stdout = sys.stderr  # what sessions print goes where the worker's words go, in their order
    try:
        with orders.makefile("rb") as stream:
            config: EnvironmentConfig = pickle.loads(stream.read(FRAME.unpack(stream.read(FRAME.size))[0]))
        try:
            play = resolve_environment(config).play
        except BaseException as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
            orders.sendall(f"{type(error).__name__}: {error}".partition("\n")[0].encode() + b"\n")
            return
        orders.sendall(LOADED + b"\n")
        supervisor.settle()
        _fork_sessions(supervisor, orders, play)
    except OSError:
        pass  # the worker is gone
    finally:
        supervisor.end()
        os._exit(0)


def _fork_sessions(supervisor: Supervisor, orders: socket.socket, play: Play) -> None:
    sockets, processes = dict[int, socket.socket](), dict[int, int]()  # by process id, and its number
    while (ready := supervisor.wait()) is not None:
        for pid, status in supervisor.ended():
            processes = {number: own for number, own in processes.items() if own != pid}
            with sockets.pop(pid) as connection, suppress(OSError):
                connection.send(b'\n{"status": %d}\n' % status, socket.MSG_DONTWAIT)
        if orders.fileno() not in ready:
            continue
        data, descriptors, *_ = socket.recv_fds(orders, ORDER.size, 1)
        if not data:
            return
        number, begins = ORDER.unpack(data)
        if not begins:
            supervisor.kill(processes.get(number, -1))
            continue
        connection, others = socket.socket(fileno=descriptors[0]), [*sockets.values()]
        pid = supervisor.fork(lambda: _live(connection, others, play))  # noqa: B023 - it is called at once
        sockets[pid], processes[number] = connection, pid


def _live(connection: socket.socket, others: Sequence[socket.socket], play: Play) -> int:
    """Live the session at the other end of ``connection``."""
    for other in others:
        other.close()
    line = _Line(connection)
    facts = line.facts
    _seed(facts.seed)  # forks would draw the same numbers
    client: Any = DistantClient(line)
    asyncio.run(_live_and_end(line, play, facts.task, client))
    return 0


def _seed(seed: int) -> None:
    loaded: Mapping[str, Any] = sys.modules
    random.seed(seed)
    if "numpy" in loaded:
        loaded["numpy"].random.seed(seed % (1 << 32))
    if "torch" in loaded:
        loaded["torch"].manual_seed(seed)


async def _live_and_end(line: _Line, play: Play, task: Mapping[str, Any], client: Any) -> None:
    ending = await ending_of(play, task, client)
    line.send(
        {
            "ending": {
                "score": ending.outcome.score,
                "parts": dict(ending.outcome.parts),
                "agents": dict(ending.outcome.agents),
                "failure": ending.failure,
                "details": ending.details,
                "truncated": ending.truncated,
                "counts": sum((each.counts for each in client.family), Counter[str]()),
            }
        }
    )
    sys.stderr.flush()
    os._exit(0)  # threads that the session left behind are not waited for


class _Line:
    """The connection of a session to its worker. All threads may ask.

    Attributes:
        facts: What the worker said first.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._stream = connection.makefile("rb")
        self._numbers, self._waiting = itertools.count(), dict[int, Future[Any]]()
        self.facts: Facts = self._received()
        threading.Thread(target=self._read, name="podium-session", daemon=True).start()

    def ask(self, do: str, agent: Sequence[str], **arguments: Any) -> Future[Any]:
        """Ask something of the client of an agent of this session."""
        id, answer = next(self._numbers), Future[Any]()
        self._waiting[id] = answer
        self.send({"id": id, "do": do, "agent": agent, "with": arguments})
        return answer

    def cancel(self, asked: Future[Any]) -> None:
        """Tell the worker that nobody waits for an answer any more."""
        for id in [id for id, answer in self._waiting.copy().items() if answer is asked]:
            self.send({"id": id, "cancel": True})

    def send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._connection.sendall(data)

    def _received(self) -> Any:
        head = self._stream.read(FRAME.size)
        if len(head) < FRAME.size:
            os.killpg(0, signal.SIGKILL)  # the session is over, and so is all that it has started
        return pickle.loads(self._stream.read(FRAME.unpack(head)[0]))

    def _read(self) -> None:
        while True:
            message = self._received()
            answer = self._waiting.pop(message["id"])
            if not answer.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            if "error" in message:
                kind, text = message["error"]
                answer.set_exception(KINDS[kind](text))
            else:
                answer.set_result(message.get("value"))


class DistantClient:
    """A :class:`~podium.rollout.environments.Client` in another process, which asks the one in the worker."""

    def __init__(
        self, line: _Line, path: Sequence[str] = (), base_url: str | None = None, seed: int | None = None
    ) -> None:
        facts = line.facts
        self._line, self._path, self._agents = line, [*path], dict[str, DistantClient]()
        self._base_url = facts.base_url if base_url is None else base_url
        self.model, self.api_key, self.seed = facts.model, facts.api_key, facts.seed if seed is None else seed
        self.session_id = ".".join([facts.session_id, *path])
        self.counts: Counter[str] = Counter()

    @property
    def base_url(self) -> str:
        """As :attr:`.Client.base_url`."""
        if not self._base_url:
            raise ConfigError(self._line.facts.no_address)
        return self._base_url

    @property
    def turns(self) -> int:
        """As :attr:`.Client.turns`."""
        return self._line.ask("turns", self._path).result()

    @property
    def full(self) -> bool:
        """As :attr:`.Client.full`."""
        return self._line.ask("full", self._path).result()

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """As :meth:`.Client.chat`."""
        said = messages if isinstance(messages, str) else [dict(one) for one in messages]
        asked = self._line.ask(
            "chat", self._path, messages=said, tools=[*map(dict, tools)], max_tokens=max_tokens, stop=stop
        )
        try:
            message, finish_reason, session, call = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            self._line.cancel(asked)
            raise
        before = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return Reply(message, finish_reason, session, call, [*before, message])

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """As :meth:`.Client.reward`."""
        which = None if reply is None else (reply.session, reply.call)
        self._line.ask("reward", self._path, value=float(value), which=which).result()

    def agent(self, name: str) -> DistantClient:
        """As :meth:`.Client.agent`."""
        if agent_name(name) not in self._agents:
            path = [*self._path, name]
            address = self._line.ask("agent", path, address=bool(self._base_url)).result()
            self._agents[name] = DistantClient(self._line, path, address, hash_seed(self.seed, name))
        return self._agents[name]

    @property
    def family(self) -> list[DistantClient]:
        """As :attr:`.Client.family`."""
        return [self, *(each for agent in self._agents.values() for each in agent.family)]
