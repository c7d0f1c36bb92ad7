"""Draws tokens at generators in other processes, by ids over HTTP.

    session ─▶ its generator, as long as that lives ─▶ ids
                  └─ lost ─▶ the one with the fewest tokens in flight, with the same ids and the same seed

A request that a lost generator had begun is drawn again elsewhere. Equal requests with equal seeds get equal ids, as
long as the weights are the same. A generator whose machine is gone without a word closes no connection: it is lost once
that machine has answered nothing, not even the kernel's own questions, for ``SILENT_S``.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx2

from podium.errors import ConfigError, GenerationError
from podium_agents.service.admission import Admission
from podium_agents.service.session_recording import Sampled
from podium_agents.service.token_source import Scored
from podium_serve.bodies import read_masks

if TYPE_CHECKING:
    from podium.rollout.engines.requests import SessionRoom, Tokens
    from podium.rollout.sampling import SamplingParams
    from podium_agents.service.concurrency import Caller
    from podium_agents.service.constraints import Constraint

__all__ = ["SILENT_S", "RemoteTokens"]

SILENT_S: Final = 30  # of a machine, after which its generator is lost

_REMEMBERED: Final = 1 << 16  # sessions whose generator is known
_LEAVE_S: Final = 5.0  # that a generator is left alone after it was lost
_PAUSE_S: Final = 0.2  # between two attempts while all are lost


@dataclass(eq=False)
class _Generator:
    url: str
    in_flight: int = 0
    lost_s: float = -1e9
    ended_sessions: list[str] = field(default_factory=list[str])


class RemoteTokens:
    """A :class:`~.token_source.TokenSource` over generators that answer ``/inference/v1/generate``.

    Args:
        urls: Their addresses.
        token: The bearer token that they accept.
        patience_s: How long a request waits while every generator is lost or full. A restarted generator loads its
            model first. The time in which a generator draws for the request does not count.

    Attributes:
        positions: As :attr:`.TokenSource.positions`; the least of all generators.
        room: How much of the sessions of this client each generator remembers; None for no limit.
    """

    def __init__(self, urls: Sequence[str], token: str, *, patience_s: float = 300.0) -> None:
        self._token, self._patience_s = token, patience_s
        self._generators = [_Generator(url) for url in urls]
        self._of: OrderedDict[str, _Generator] = OrderedDict()
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}
        self._users: Counter[asyncio.AbstractEventLoop] = Counter()
        self.version, self.prompt_tokens = 0, None  # each generator's own /metrics has the count
        self.positions: int | None = None
        self.room: SessionRoom | None = None
        self.admission = Admission()
        self.moved = 0
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """The tokens that the requests in flight may still hold, prompts included."""
        return sum(generator.in_flight for generator in self._generators)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a generator."""
        return self._waiting

    def connect(self, urls: Sequence[str], positions: int | None, room: SessionRoom | None = None) -> None:
        """Use the generators at ``urls`` from now on. Generators that were used before keep their sessions."""
        self.positions, self.room = positions, room
        by_url = {generator.url: generator for generator in self._generators}
        self._generators = [by_url.get(url) or _Generator(url) for url in urls]

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Caller | None = None,
        constraint: Constraint | None = None,
        exact: bool = True,
    ) -> AsyncGenerator[Tokens | Sampled]:
        """As :meth:`.TokenSource.stream`. All of a completion comes at once."""
        del tokens, caller, exact
        body: dict[str, Any] = {
            "session": session,
            "token_ids": list(prompt),
            "sampling_params": {
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "seed": seed,
                "stop_token_ids": list(params.stop_token_ids),
                "logprobs": 1,
                **({"min_p": params.min_p} if params.min_p else {}),
                **({} if constraint is None else constraint.wire),
            },
        }
        size = len(prompt) + params.max_new_tokens
        sample = self._sample(await self._post("generate", body, session, size, len(prompt)), params)
        self.admission.note(session, len(prompt) + len(sample.ids))
        yield sample

    async def _post(self, action: str, body: Mapping[str, Any], session: str, size: int, begins: int | None) -> Any:
        """Return what a generator answers, that of the session as long as it lives.

        Args:
            action: The last part of the path.
            body: The request.
            session: The session; "" for none.
            size: The most tokens that the request may hold.
            begins: The length of the prompt of a call of the session, which may wait for memory; None for no call.
        """
        client = self._client
        until_s, reason = time.monotonic() + self._patience_s, ""
        while time.monotonic() < until_s:
            if client.is_closed:
                raise GenerationError("the connections were closed while a session still waited for an answer")
            generator = self._choose(session)
            if generator is None:
                self._waiting += 1
                try:
                    await asyncio.sleep(_PAUSE_S)
                finally:
                    self._waiting -= 1
                continue
            generator.in_flight += size
            asked_s = time.monotonic()
            try:
                answer = await self._send(client, generator, action, body, session, begins)
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                if not client.is_closed:
                    self._lose(generator)
                if not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    until_s += time.monotonic() - asked_s  # it was drawing until then
                continue
            finally:
                generator.in_flight -= size
            until_s += time.monotonic() - asked_s
            if answer.status_code == httpx2.codes.OK:
                return answer.json()
            reason = _reason(answer)
            if answer.status_code == httpx2.codes.TOO_MANY_REQUESTS:
                await asyncio.sleep(float(answer.headers.get("Retry-After", _PAUSE_S)))
            elif answer.is_client_error:
                raise ConfigError(reason)
            else:
                self._lose(generator)
        raise GenerationError(f"no generator answered within {self._patience_s:g} s; the last reason: {reason}")

    async def _send(
        self,
        client: httpx2.AsyncClient,
        generator: _Generator,
        action: str,
        body: Mapping[str, Any],
        session: str,
        begins: int | None,
    ) -> httpx2.Response:
        url = f"{generator.url}/inference/v1/{action}"
        if begins is None:
            return await client.post(url, json=body)
        async with self.admission.turn(session, begins, self.room, generator):
            ended, generator.ended_sessions = generator.ended_sessions, []
            return await client.post(url, json={**body, "ended_sessions": ended} if ended else body)

    def end_session(self, name: str) -> None:
        """As :meth:`.TokenSource.end_session`. A generator hears of it with the next request to it."""
        self.admission.end(name)
        if (generator := self._of.pop(name, None)) is not None:
            generator.ended_sessions.append(name)

    async def score(
        self, ids: Sequence[int], *, first: int = 1, top: int = 0, temperature: float = 1.0, session: str = ""
    ) -> Scored:
        """As :meth:`.TokenSource.score`."""
        body = {"token_ids": list(ids), "first": first, "top": top, "temperature": temperature}
        scored = await self._post("score", body, session, len(ids), None)
        scored["top"] = [[*map(tuple, others)] for others in scored["top"]]
        return Scored(**scored)

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[None]:
        """Keep connections during the block. Of blocks that overlap in one event loop, the last to end closes them."""
        loop = asyncio.get_running_loop()
        self._users[loop] += 1
        try:
            yield
        finally:
            self._users[loop] -= 1
            if not self._users[loop]:
                del self._users[loop]
                if client := self._clients.pop(loop, None):
                    await client.aclose()

    @property
    def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
            transport = httpx2.AsyncHTTPTransport(
                trust_env=False, limits=limits, socket_options=_watch_options(SILENT_S)
            )
            headers = {"Authorization": f"Bearer {self._token}"}
            self._clients[loop] = httpx2.AsyncClient(
                headers=headers, transport=transport, timeout=httpx2.Timeout(None, connect=5.0), trust_env=False
            )
        return self._clients[loop]

    def _choose(self, session: str) -> _Generator | None:
        now_s = time.monotonic()
        alive = [candidate for candidate in self._generators if now_s - candidate.lost_s > _LEAVE_S]
        generator = self._of.get(session)
        if generator is not None and generator in alive:
            self._of.move_to_end(session)
            return generator
        chosen = min(alive, key=lambda one: one.in_flight, default=None)
        if chosen is not None and session:
            self.moved += generator is not None
            self._of[session] = chosen
            while len(self._of) > _REMEMBERED:
                self._of.popitem(last=False)
        return chosen

    def _lose(self, generator: _Generator) -> None:
        generator.lost_s = time.monotonic()

    def _sample(self, answer: Mapping[str, Any], params: SamplingParams) -> Sampled:
        choice = answer["choices"][0]
        versions = choice["versions"]
        self.version = max([self.version, *versions])
        if params.filtered and "kept" not in choice:
            raise GenerationError("the generator does not say which tokens top-k and top-p left to draw from")
        reused = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        masks = read_masks(sent) if (sent := choice.get("masks")) is not None else None
        kept, reason = choice.get("kept"), choice["finish_reason"]
        return Sampled(choice["token_ids"], logprobs, versions, reason, kept, masks, reused)


def _watch_options(silent_s: int) -> list[tuple[int, int, int]]:
    """Socket options by which the kernel ends a connection to a machine that has been silent for so long, whether it
    owes the acknowledgment of a request (TCP_USER_TIMEOUT) or an answer. Those that this system lacks are left out."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    probes = 3
    for name, value in (
        ("TCP_KEEPIDLE", max(1, silent_s // 2)),
        ("TCP_KEEPINTVL", max(1, silent_s // (2 * probes))),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", 1000 * silent_s),
    ):
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    return options


def _reason(answer: httpx2.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"
