"""Sessions in processes of their own. The side of those processes.

The process of the environment loads it, and then only forks. Each fork runs one session: it asks its worker for what
the model says, in JSON, and the worker answers with pickles. When the worker closes the connection, or ends, the
session is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from podium.errors import ConfigError, ContextFull, GenerationError
from podium.exceptions import describe_error
from podium.processes import Channel, Requests, Supervisor, serve_forks, supervise
from podium.rollout.environments import EnvironmentConfig
from podium_agents.environments.client import Reply, agent_name
from podium_agents.environments.contract import Messages
from podium_agents.environments.resolve import Play, resolve_environment
from podium_agents.environments.runner import ending_of
from podium_agents.proxies import spare_proxy
from podium_agents.seeds import hash_seed

__all__ = ["ENDING", "KINDS", "DistantClient", "Facts", "main"]

ENDING: Final = 0  # the number of the frame that says how a session ended; requests count from 1
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


def main() -> None:
    """Load an environment and fork its sessions, until the worker closes the channel."""
    supervise(_serve_sessions)


def _serve_sessions(supervisor: Supervisor, channel: Channel) -> None:
    sys.stdout = sys.stderr  # what sessions print goes where the worker's words go, in their order
    first = channel.receive()
    if first is None:
        return
    config: EnvironmentConfig = pickle.loads(first[1])
    try:
        play = resolve_environment(config).play
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        channel.send(0, describe_error(error).partition("\n")[0].encode())
        return
    channel.send(0)
    supervisor.settle()
    serve_forks(supervisor, channel, partial(_live, play))


def _live(play: Play, descriptors: Sequence[int]) -> int:
    """Live the session at the other end of a connection."""
    line = _Line(Channel(socket.socket(fileno=descriptors[0]), trusted=True))
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
    report = {
        "score": ending.outcome.score,
        "parts": dict(ending.outcome.parts),
        "agents": dict(ending.outcome.agents),
        "failure": ending.failure,
        "details": ending.details,
        "truncated": ending.truncated,
        "counts": sum((relative.counts for relative in client.family), Counter[str]()),
    }
    line.channel.send(ENDING, json.dumps(report).encode())
    sys.stderr.flush()
    os._exit(0)  # threads that the session left behind are not waited for


class _Line(Requests):
    """The requests of a session to its worker. All threads may ask.

    Attributes:
        facts: What the worker sent first.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, _settle)
        self.channel = channel
        first = channel.receive()
        if first is None:
            _end_session()
        self.facts: Facts = pickle.loads(first[1])
        threading.Thread(target=self._read, name="podium-session", daemon=True).start()

    def ask(self, do: str, agent: Sequence[str], **arguments: Any) -> Future[Any]:
        """Ask something of the client of an agent of this session."""
        return self.send({"do": do, "agent": agent, "with": arguments})

    def _read(self) -> None:
        self.settle_until_end()
        _end_session()


def _end_session() -> NoReturn:
    """The session is over, and so is all that it has started."""
    os.killpg(0, signal.SIGKILL)
    raise SystemExit


def _settle(answer: Future[Any], body: bytes) -> None:
    message = pickle.loads(body)
    if "error" in message:
        kind, text = message["error"]
        answer.set_exception(KINDS[kind](text))
    else:
        answer.set_result(message.get("value"))


class DistantClient:
    """A :class:`~podium_agents.Client` in another process, which asks the one in the worker."""

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
        return spare_proxy(self._base_url)

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
        response_format: Mapping[str, Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> Reply:
        """As :meth:`.Client.chat`."""
        conversation = messages if isinstance(messages, str) else [dict(message) for message in messages]
        wishes = {
            "max_tokens": max_tokens,
            "stop": stop,
            "response_format": response_format,
            "tool_choice": tool_choice,
        }
        reply_future = self._line.ask("chat", self._path, messages=conversation, tools=[*map(dict, tools)], **wishes)
        try:
            message, finish_reason, session, call = await asyncio.wrap_future(reply_future)
        except asyncio.CancelledError:
            self._line.cancel(reply_future)
            raise
        before = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
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
        return [self, *(relative for agent in self._agents.values() for relative in agent.family)]
