"""The model, as an environment talks to it. What is said is recorded as it was sampled, and trained."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ContextFull, GenerationError
from podium_agents.proxies import spare_proxy
from podium_agents.seeds import hash_seed
from podium_agents.service.budgets import LIMIT_REACHED
from podium_agents.service.request_bodies import ChatRequest, Refusal, parse
from podium_agents.service.service import Answer, Service

if TYPE_CHECKING:
    from podium_agents.environments.contract import Messages
    from podium_agents.service.session_recording import Session

__all__ = ["MOST_AGENTS", "Client", "Reply", "agent_name", "to_messages"]

MOST_AGENTS: Final = 1023  # of one session, beside the client itself
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Reply:
    """An answer of the model.

    Attributes:
        message: The assistant's message, as the OpenAI API has it. Append it to the conversation.
        finish_reason: "stop", "length" where it was cut off, or "tool_calls".
        session: The name of the session, ``client.session_id``.
        call: The number of the call in the session, from 0.
        messages: The conversation that was answered, followed by the answer.
    """

    message: dict[str, Any]
    finish_reason: str
    session: str = ""
    call: int = -1
    messages: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]], repr=False)

    @property
    def text(self) -> str:
        """The text, without reasoning and tool calls."""
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools that the model asks for."""
        return self.message.get("tool_calls") or []


class Client:
    """One session with the model. Calls of one session may run at the same time. Other threads may call the model by
    ``asyncio.run(client.chat(...))``.

    >>> async def play(task, client):                                    # doctest: +SKIP
    ...     messages = [{"role": "user", "content": task["prompt"]}]
    ...     reply = await client.chat(messages)
    ...     return float(task["answer"] in reply.text)

    An agent that talks to the OpenAI API is given ``client.base_url``, ``client.api_key`` and ``client.model``.

    Attributes:
        api_key: The API key that such an agent sends.
        seed: A seed for this session, the same when a run is repeated or resumed. Use it for everything random.
        counts: The numbers of "tool_calls" and "tool_errors" so far, which metrics report.
        live_outside: Offers the session to services elsewhere, and returns how it ended; None if none may run it.
    """

    def __init__(
        self,
        service: Service,
        session: Session,
        address: Callable[[], str],
        api_key: str,
        seed: int,
        *,
        loop: asyncio.AbstractEventLoop,
        live_outside: Callable[[Client], Awaitable[Any]] | None = None,
    ) -> None:
        self._service, self._session, self._address, self._loop = service, session, address, loop
        self.api_key, self.seed, self.live_outside = api_key, seed, live_outside
        self.counts: Counter[str] = Counter()
        self._rewards: dict[int, float] = {}
        self._agents: dict[str, Client] = {}

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._service.model

    @property
    def session_id(self) -> str:
        """The name of the session."""
        return self._session.id

    @property
    def base_url(self) -> str:
        """The address of the OpenAI API in which this session is recorded."""
        return spare_proxy(f"{self._address()}/sessions/{self._session.id}/v1")

    @property
    def turns(self) -> int:
        """How many answers the model has given in this session."""
        return len(self._session.calls)

    @property
    def waited_s(self) -> float:
        """How many seconds the turns of this session have waited for memory so far."""
        return self._service.source.admission.waited_s(self._session.id)

    @property
    def full(self) -> bool:
        """Whether the last request of this client, or of one of its agents, was refused for a full context, or any
        request because the session has used up a limit of ``environment.options``."""
        return bool(self._session.budget.reached) or any(client._session.full for client in self.family)

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
        """Let the model answer.

        Args:
            messages: The conversation so far, or the text of a user's only message.
            tools: Tools that the model may call, as the OpenAI API has them.
            max_tokens: The most tokens of the answer, at most ``sampling.max_new_tokens``.
            stop: Texts that end the answer.
            response_format: The form of the answer, as the OpenAI API has it. It needs the extra ``grammar``.
            tool_choice: "required", or an object that names a function, to force a call of a tool. It needs the extra
                ``grammar``.

        Raises:
            ContextFull: The conversation leaves no room for an answer, or the session has used up one of its limits.
            GenerationError: The request was refused, or the generator failed.
        """
        conversation = to_messages(messages)
        if odd := [tool for tool in tools if not isinstance(tool, Mapping)]:
            raise TypeError(
                f"tools has {str(odd[0])[:80]}: chat takes tools as the OpenAI API has them, such as "
                "Toolbox([function]).schemas; converse(client, messages, tools=[function]) also runs them"
            )
        request = {
            "messages": conversation,
            "tools": [dict(tool) for tool in tools] or None,
            "max_tokens": max_tokens,
            "stop": stop if isinstance(stop, str) else [*stop],
            "response_format": response_format,
            "tool_choice": tool_choice,
        }
        answering = answer_request(self._service, request, self._session.id)
        if asyncio.get_running_loop() is not self._loop:  # one thread records all that is said in a session
            answering = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answering, self._loop))
        answer = await answering
        call = -1 if answer.call is None else answer.call.number
        message = dict(answer.message)
        return Reply(message, answer.finish_reason, self._session.id, call, [*conversation, message])

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Reward an answer of the model with ``value``, in addition to the reward of the whole session.

        Args:
            value: The reward. Several rewards of one answer add up.
            reply: The answer, as :meth:`chat` returned it; the latest one by default.

        Raises:
            ValueError: The model has not answered yet, ``value`` is not finite, or ``reply`` is an answer to another
                agent or of another session.
        """
        if not self._session.calls:
            raise ValueError(f"reward({value!r}) was called before the model answered: call chat() first")
        if reply is not None and reply.session != self._session.id:
            raise ValueError(
                "the reply does not come from this client's chat(): an agent can only reward its own replies"
            )
        call = self._session.calls[-1].number if reply is None else reply.call
        self._rewards[call] = self._rewards.get(call, 0.0) + _finite(value)

    def agent(self, name: str) -> Client:
        """Return the client of another agent of this session, whose conversation is trained with its own reward.

        Raises:
            ValueError: ``name`` is not a valid name, or the session has too many agents.
        """
        if agent_name(name) not in self._agents:
            if len(self._agents) >= MOST_AGENTS:
                raise ValueError(f"{MOST_AGENTS} agents are the limit of one client")
            seed = hash_seed(self.seed, name)
            session = self._service.open_session(f"{self._session.id}.{name}", seed, self._session.budget)
            self._agents[name] = Client(self._service, session, self._address, self.api_key, seed, loop=self._loop)
        return self._agents[name]

    @property
    def family(self) -> list[Client]:
        """This client, and those of the other agents."""
        return [self, *(relative for agent in self._agents.values() for relative in agent.family)]

    def end_calls(self) -> None:
        """Take no more requests to the model, in this conversation and in those of its agents."""
        for relative in self.family:
            self._service.close_session(relative.session_id)

    def close(self) -> list[tuple[str, Session, Mapping[int, float]]]:
        """End the session. Returns what was recorded of each agent, the client's own first, under ""."""
        self._service.close_session(self._session.id)
        sessions: list[tuple[str, Session, Mapping[int, float]]] = [("", self._session, self._rewards)]
        for name, agent in self._agents.items():
            sessions += [
                (f"{name}.{agent_name}" if agent_name else name, session, earned)
                for agent_name, session, earned in agent.close()
            ]
        return sessions


def agent_name(name: str) -> str:
    """Return the name of an agent. Raises ValueError for what cannot be a part of an address, or of longer names."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"an agent cannot be named {name[:80]!r}: use up to 64 of the characters A-Z a-z 0-9 _ -")
    return name


def to_messages(said: Any) -> list[dict[str, Any]]:
    """Return what is said to the model as messages. Raises TypeError for what is neither a text nor messages."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    entries: list[Any] = [*said] if isinstance(said, Iterable) and not isinstance(said, Mapping) else [said]
    if isinstance(said, Mapping) or not all(isinstance(entry, Mapping) for entry in entries):
        raise TypeError(
            f"{str(said)[:80]!r} ({type(said).__name__}) cannot be said to the model: expected a text or a list of "
            "messages"
        )
    return [dict(message) for message in entries]


async def answer_request(service: Service, request: Mapping[str, Any], session: str) -> Answer:
    """Answer a request in this process. Raises ContextFull or GenerationError where HTTP has a status."""
    try:
        return await service.answer(service.chat(parse(ChatRequest, request), session))
    except Refusal as refusal:
        if refusal.code in ("context_length_exceeded", LIMIT_REACHED):
            raise ContextFull(refusal.message) from None
        raise GenerationError(refusal.message) from None


def _finite(value: float) -> float:
    number = float(value)
    if number - number != 0.0:
        raise ValueError(f"a reward is {value!r}: expected a finite number")
    return number
