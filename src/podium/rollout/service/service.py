"""Answers requests by an engine, and records conversations by the session that they name.

    messages ─▶ ids (bridged to what the session has recorded) ─▶ engine ─▶ ids ─▶ text and tool calls
                                                                     └─▶ recorded as sampled

Nothing here knows HTTP: :mod:`.app` does.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError
from podium.rollout.sampling import SamplingParams
from podium.rollout.service.sessions import RecordedCall, Sampled, Session
from podium.rollout.service.wire import ChatRequest, Refusal

if TYPE_CHECKING:
    from podium.rollout.sampling import Completion
    from podium.rollout.service.chat_format import ChatFormat
    from podium.rollout.service.engine_client import EngineClient

__all__ = ["Asked", "Service", "sampled_of"]

_SEEDS: Final = 2**62
_SESSIONS: Final = 4096  # that are remembered at the same time, where nobody closes them


@dataclass(frozen=True)
class Asked:
    """A prompt that is ready to be drawn from.

    Attributes:
        prompt: Its ids.
        params: How to draw, for one completion.
        seeds: One for each completion.
        session: Where the calls are recorded; None for a request that names none.
        messages: The conversation; () for a request of ids or text.
        tools: Its tools.
        continues: The call that the conversation goes on with.
        stops: Texts that end an answer.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seeds: Sequence[int]
    session: Session | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    continues: RecordedCall | None = None
    stops: Sequence[str] = ()


class Service:
    """One model that answers requests.

    Args:
        client: Draws completions.
        form: Writes and reads conversations.
        tokenizer: Writes and reads plain text.
        model: The name that the model has here.
        context: The most tokens of a prompt and its completion.
        stop_token_ids: The tokens that end an answer.
        most_tokens: Requests that would hold more tokens at the same time are told to come later.
    """

    def __init__(
        self,
        client: EngineClient,
        form: ChatFormat,
        tokenizer: Any,
        *,
        model: str,
        context: int,
        stop_token_ids: Sequence[int],
        most_tokens: int,
    ) -> None:
        self.client, self.form, self.model, self.context = client, form, model, context
        self._tokenizer = tokenizer
        self.stop_token_ids = tuple(form.stop_token_ids or stop_token_ids)
        self.most_tokens = most_tokens
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.created_s = int(time.time())
        self._seeds = itertools.count(time.time_ns() % _SEEDS)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text, with the tokenizer's first ones."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        eos = self._tokenizer.eos_token_id
        return ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, special tokens among them only where ``special`` is True."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def session(self, name: str) -> Session:
        """The session of this name, which is new if nobody has named it."""
        found = self.sessions.pop(name, None) or Session(name)
        self.sessions[name] = found
        while len(self.sessions) > _SESSIONS:
            self.sessions.popitem(last=False)
        return found

    def close_session(self, name: str) -> Session | None:
        """Return what is recorded, and forget it."""
        return self.sessions.pop(name, None)

    def chat(self, request: ChatRequest, session: str = "") -> Asked:
        """Prepare a conversation.

        Raises:
            Refusal: The template cannot write it, or it leaves no room for an answer.
        """
        tools = request.tools or []
        if request.model_extra and request.model_extra.get("tool_choice") == "none":
            tools = []
        recorded = self.session(session) if session else None
        continues = recorded.find(request.messages) if recorded is not None else None
        prompt: list[int] | None = None
        try:
            if recorded is not None and continues is not None:
                said = continues.messages
                whole = recorded.ids_of(continues)
                start = next(turn.start for turn in recorded.rows[continues.row].turns if turn.call == continues.number)
                prompt = self.form.bridge(whole[:start], whole[start:], said, request.messages[len(said) :], tools)
            prompt = self.form.prompt(request.messages, tools) if prompt is None else prompt
        except ConfigError as error:
            raise Refusal(400, str(error), "messages") from None
        limit = request.max_completion_tokens or request.max_tokens
        asked = self.ask(prompt, request, limit, stop=request.stop_token_ids)
        return replace(
            asked,
            session=recorded,
            messages=request.messages,
            tools=tools,
            continues=continues,
            stops=request.stops,
        )

    def ask(self, prompt: Sequence[int], sampling: Any, limit: int | None, *, stop: Sequence[int] | None) -> Asked:
        """Prepare ids. ``sampling`` has temperature, top_p, top_k, n and seed.

        Raises:
            Refusal: The prompt leaves no room for an answer, or too much is in flight.
        """
        room = self.context - len(prompt)
        if room < 1 or (limit is not None and limit > room):
            wanted = f" and max_tokens is {limit}" if limit is not None else ""
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} tokens{wanted}; the model's context has {self.context}: shorten the "
                "messages or lower max_tokens",
                "messages",
                "context_length_exceeded",
            )
        params = SamplingParams(
            max_new_tokens=limit or room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            stop_token_ids=(*self.stop_token_ids, *(stop or ())),
        )
        if (
            self.client.in_flight
            and self.client.in_flight + sampling.n * (len(prompt) + (limit or 0)) > self.most_tokens
        ):
            raise Refusal(429, "too many tokens are in flight: try again later", code="overloaded")
        first = sampling.seed if sampling.seed is not None else next(self._seeds) * 1_000_003 % _SEEDS
        return Asked(prompt, params, [first + number for number in range(sampling.n)])

    async def draw(self, asked: Asked, number: int = 0) -> Sampled:
        """Draw completion ``number`` of what was asked."""
        drawn = await self.client.generate(asked.prompt, asked.params, asked.seeds[number])
        return sampled_of(drawn)

    def record(self, asked: Asked, drawn: Sampled, said: Mapping[str, Any] | None) -> RecordedCall | None:
        """Record an answer in its session. ``said`` is the message that the client gets."""
        if asked.session is None:
            return None
        return asked.session.record(
            asked.prompt, drawn, (*asked.messages, said) if said else (), continues=asked.continues
        )


def sampled_of(drawn: Completion) -> Sampled:
    """The engine's completion as plain numbers."""
    kept = None
    if drawn.kept is not None:
        kept = [drawn.kept.at(place).tolist() for place in range(len(drawn))]
    return Sampled(
        drawn.token_ids.tolist(), drawn.logprobs.tolist(), drawn.versions.tolist(), drawn.finish_reason, kept
    )
