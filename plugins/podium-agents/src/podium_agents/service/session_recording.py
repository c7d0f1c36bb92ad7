"""What was said in a session, as the token ids that the model read and sampled.

    call 1 ─▶ call 2 ─▶ call 3       row 0   each prompt extends what was recorded, so the calls make one row
                 └────▶ call 4       row 1   begins where call 2 ended, whose tokens row 0 trains
    call 5                           row 2   another prompt: a sub-agent, or a history that the client has edited

Each sampled token is trained once, in the row of its call. Whatever else stands in a row carries no loss: the prompt,
what tools and users said, and what another row trains. This module imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, chain, repeat
from typing import Any, Final, NamedTuple

from podium.rollout.tasks.fields import is_speech, list_texts
from podium_agents.service.budgets import Budget
from podium_agents.service.histories import Departure, Key, MessageReader, Template, describe_departure, tools_key

__all__ = ["Recognized", "RecordedCall", "Row", "Sampled", "Session", "Turn"]

_COMPARED: Final = 16  # of the latest rows, in which an answer is looked for that came back as another one
_EMPTY_BYTES: Final = 1024  # of a session, and of each thing in it
_MESSAGE_BYTES: Final = 512
_TOKEN_BYTES: Final = 112


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that a call sampled.

    Attributes:
        ids: L token ids; a stop token that ended them is the last.
        logprobs: L natural logarithms of the probability with which each was drawn.
        versions: L versions of the weights that drew them.
        finish_reason: "stop" or "length".
        kept: Where top-k or top-p were used, the ids that each token was drawn from; else None.
        masks: Where a grammar or bans restricted the ids, each token's packed mask; else None.
        reused: The number of the prompt's tokens that the engine had not to compute again.
        top: The most probable tokens at each place, with their logarithms, where they were asked for; else None.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    kept: Sequence[Sequence[int]] | None = None
    masks: Sequence[bytes] | None = None
    reused: int = 0
    top: Sequence[Sequence[tuple[int, float]]] | None = None

    def first(self, count: int) -> Sampled:
        """The first ``count`` of them."""
        kept = None if self.kept is None else self.kept[:count]
        masks = None if self.masks is None else self.masks[:count]
        ids, logprobs, versions = self.ids[:count], self.logprobs[:count], self.versions[:count]
        top = None if self.top is None else self.top[:count]
        return Sampled(ids, logprobs, versions, self.finish_reason, kept, masks, self.reused, top)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a row's sampled tokens of one call stand: ``row.ids[start:stop]``."""

    call: int
    start: int
    stop: int
    finish_reason: str


@dataclass(slots=True)
class Row:
    """One conversation as it is trained.

    Attributes:
        ids: The token ids of prompts and completions, in the order in which the model saw them.
        sampled: By token, whether this row trains it.
        logprobs: By token, as in :class:`Sampled`; 0 where ``sampled`` is False.
        versions: By token, as in :class:`Sampled`; 0 where ``sampled`` is False.
        kept: By token, as in :class:`Sampled`; empty where ``sampled`` is False.
        masks: By token, as in :class:`Sampled`; empty where every id was allowed or ``sampled`` is False.
        turns: The calls of the row.
        parent: The row from which this one was split off; None for one that shares nothing with another row.
        fork: The number of first tokens that this row shares with ``parent``.
    """

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Sequence[int]] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    parent: int | None = None
    fork: int = 0

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled here."""
        count = len(ids)
        self.ids += ids
        self.sampled += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [0] * count
        self.kept += [()] * count
        self.masks += [b""] * count

    def sample(self, call: int, drawn: Sampled) -> None:
        """Append the tokens that a call sampled."""
        start, count = len(self.ids), len(drawn.ids)
        self.ids += drawn.ids
        self.sampled += [True] * count
        self.logprobs += drawn.logprobs
        self.versions += drawn.versions
        self.kept += [()] * count if drawn.kept is None else drawn.kept
        self.masks += [b""] * count if drawn.masks is None else drawn.masks
        self.turns.append(Turn(call, start, start + count, drawn.finish_reason))


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call that has its answer.

    Attributes:
        number: Its place in the session, from 0.
        row: The place of its row in ``Session.rows``.
        stop: The number of the row's tokens up to the end of its completion.
        conversation: A key for each message of the prompt, and one for the answer; () for a call that sent ids.
        messages: Those messages, as the model read and wrote them: a client may leave out the reasoning later.
        tools: The key of the tools and the template's variables that its prompt was written with.
        stop_text: The text that ended its answer, which does not have it; "" for none.
    """

    number: int
    row: int
    stop: int
    conversation: tuple[Key, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: Key = ""
    stop_text: str = ""


class Recognized(NamedTuple):
    """What a session knows of a client's history.

    Attributes:
        call: The call whose prompt and answer are its longest beginning; None for a new conversation.
        departure: Where the history leaves a conversation of the session although it has answers of the session from
            there on; None where it does not.
    """

    call: RecordedCall | None
    departure: Departure | None


class Session:
    """One conversation with a model, or the conversations of one task where there are sub-agents.

    It has no lock: calls of one session are recorded by one thread. Calls may overlap, since a call is recorded when
    it has its answer.

    Attributes:
        id: Its name, as the client gives it.
        rows: What is trained.
        calls: The calls, in the order in which they were answered.
        splits: How many calls began a row although they continued a conversation, because their prompt's ids did not
            begin with what was recorded: the chat template writes a history otherwise than the model sampled it.
        unrecognized: How many calls began a row because their history has another message where the session has an
            answer, or before one: the client has edited it.
        departure: The first such message, in words; "" for none.
        over: Whether it is closed. Nothing is recorded any more.
        budget: What it may use, together with the other agents of its session.
        full: Whether its last request was refused because the model's context was full.
        nbytes: About how much memory it takes.
    """

    def __init__(self, id: str, template: Template | None = None) -> None:
        self.id = id
        self._reader = MessageReader(template)
        self.budget = Budget()
        self.rows: list[Row] = []
        self.calls: list[RecordedCall] = []
        self._calls_of: dict[int, list[RecordedCall]] = {}  # by the hash of their conversation
        self.splits = 0
        self.unrecognized = 0
        self.departure = ""
        self.over = False
        self.full = False
        self.nbytes = _EMPTY_BYTES + len(id)

    def ids_of(self, call: RecordedCall) -> list[int]:
        """The prompt and the completion of a call."""
        return self.rows[call.row].ids[: call.stop]

    def find(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> RecordedCall | None:
        """Return the call whose prompt and answer are the longest beginning of ``messages``; the latest of equals.

        A call with other tools comes after one with ``tools``, and a call whose row has gone on since after one whose
        row ends with it.

        Raises:
            RecursionError: A message is nested too deeply to be compared.
        """
        return self.recognize(messages, tools).call

    def recognize(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Recognized:
        """Return what is known of a history, whose answers may have been changed on their way in what the template does
        not read; ``options`` are the variables that it gets. Raises as :meth:`find`."""
        self._reader.learn(tools)
        latest = self.calls[-1] if self.calls else None
        earlier = () if latest is None else zip(latest.messages, latest.conversation, strict=True)
        keys = self._reader.keys(messages, earlier)
        while True:
            call = self._longest_beginning(keys, tools_key(tools, options))
            departure = self._departure(messages, keys, 0 if call is None else len(call.conversation))
            if departure is None or not self._reader.is_alike(departure, tools):
                return Recognized(call, departure)
            keys[departure.at] = departure.key

    def _longest_beginning(self, conversation: Sequence[Key], tools: Key) -> RecordedCall | None:
        """The call that :meth:`find` returns, by the keys of messages and of tools."""

        def rank(call: RecordedCall) -> tuple[bool, bool, int]:
            return call.tools == tools, self._is_open(call), call.number

        hashes = [*accumulate(conversation, _hash_next, initial=0)]
        for length in range(len(conversation), 0, -1):
            if calls := self._calls_of.get(hashes[length]):
                beginning = tuple(conversation[:length])
                if same := [call for call in calls if call.conversation == beginning]:
                    return max(same, key=rank)
        return None

    def _departure(
        self, messages: Sequence[Mapping[str, Any]], keys: Sequence[Key], recognized: int
    ) -> Departure | None:
        """Where a history leaves the conversation of one of the latest rows. None if no answer follows the messages
        that are ``recognized``, or if none of those that follow is the session's: another agent's, or an example."""
        answers = [at for at in range(recognized, len(messages)) if messages[at].get("role") == "assistant"]
        if not answers:
            return None
        at, before, key = -1, None, ""
        for row in self.rows[-_COMPARED:]:
            call = self.calls[row.turns[-1].call]
            pairs = zip(keys, call.conversation, strict=False)
            common = next((number for number, (old, new) in enumerate(pairs) if old != new), len(call.conversation))
            if common < min(len(keys), len(call.conversation)) and common >= at:
                at, before, key = common, call.messages[common], call.conversation[common]
        if before is None:
            return None
        is_edited = before.get("role") == messages[at].get("role") == "assistant"
        if not is_edited:
            answer_keys = {call.conversation[-1] for call in self.calls if call.conversation}
            is_edited = any(keys[answer] in answer_keys for answer in answers)
        return Departure(at, before, key, messages[at]) if is_edited else None

    def without_said(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages without the reasoning that the model itself said in this session, in whatever fields. Clients
        send it back also after they have edited the text beside it, and many templates leave it out."""
        if not any(is_speech(name) for message in messages for name in message):
            return messages
        said = {(call.messages[-1].get("reasoning_content") or "").strip() for call in self.calls if call.messages}

        def is_said(name: str, value: Any) -> bool:
            if not is_speech(name) or name == "function_call":
                return False
            return value is None or any(text.strip() in said for text in list_texts(value))

        return [{name: value for name, value in message.items() if not is_said(name, value)} for message in messages]

    def record(
        self,
        prompt: Sequence[int],
        drawn: Sampled,
        messages: Iterable[Mapping[str, Any]] = (),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        continues: RecordedCall | None = None,
        departure: Departure | None = None,
        stop_text: str = "",
    ) -> RecordedCall:
        """Record a call that has its answer, and return it.

        Args:
            prompt: The ids that the model read.
            drawn: What it sampled.
            messages: As in :class:`RecordedCall`.
            tools: The tools that ``prompt`` was written with.
            options: The variables of the chat template that it was written with.
            continues: The call whose conversation this one goes on with, as :meth:`find` gave it. If ``prompt`` does
                not begin with the ids of that call, it is counted in ``splits``.
            departure: As in :class:`Recognized`. It is counted in ``unrecognized`` if the call begins a row.
            stop_text: As in :class:`RecordedCall`.

        Raises:
            RecursionError: A message is nested too deeply to be compared. Nothing is recorded then.
        """
        earlier_messages = chain(() if continues is None else continues.messages, repeat(None))
        conversation = tuple(map(_keep, messages, earlier_messages))
        compared = () if continues is None else continues.conversation  # which find() has compared
        read = (self._reader.key(conversation, at) for at in range(len(compared), len(conversation)))
        keys, tools_of = (*compared, *read), tools_key(tools, options)
        before = self._longest(prompt)
        number = len(self.calls)
        self.splits += continues is not None and (before is None or before.stop < continues.stop)
        if before is not None and self._is_open(before):
            row_number, shared = before.row, before.stop
        else:
            row_number, shared = len(self.rows), 0
            parent = None if before is None else before.row
            if departure is not None:
                self.unrecognized += 1
                self.departure = self.departure or describe_departure(departure)
            self.rows.append(Row(parent=parent, fork=0 if before is None else before.stop))
        row = self.rows[row_number]
        row.read(prompt[shared:])
        row.sample(number, drawn)
        self.budget.record(len(drawn.ids), len(conversation[-1].get("tool_calls") or ()) if conversation else 0)
        self.full = False
        self.calls.append(RecordedCall(number, row_number, len(row.ids), keys, conversation, tools_of, stop_text))
        if keys:
            self._calls_of.setdefault(reduce(_hash_next, keys, 0), []).append(self.calls[-1])
        texts = sum(_MESSAGE_BYTES + 3 * len(key) for key in keys) + len(tools_of)
        tokens = len(prompt) - shared + len(drawn.ids) + sum(map(len, drawn.kept or ()))
        texts += sum(map(len, {*(drawn.masks or ())}))
        self.nbytes += texts + _TOKEN_BYTES * tokens
        return self.calls[-1]

    def _longest(self, prompt: Sequence[int]) -> RecordedCall | None:
        """The call with the longest ids that ``prompt`` begins with."""
        ids, candidates = list(prompt), list[RecordedCall]()
        for row in self.rows:

            def is_beginning(turn: Turn, row_ids: list[int] = row.ids) -> bool:
                return turn.stop <= len(ids) and row_ids[: turn.stop] == ids[: turn.stop]

            turns = row.turns
            if is_beginning(turns[-1]):
                candidates.append(self.calls[turns[-1].call])
            elif count := bisect_left(turns, True, key=lambda turn: not is_beginning(turn)):
                candidates.append(self.calls[turns[count - 1].call])
        return max(candidates, key=lambda call: (call.stop, self._is_open(call)), default=None)

    def _is_open(self, call: RecordedCall) -> bool:
        """Whether the call's row ends with it."""
        return self.rows[call.row].turns[-1].call == call.number


def _keep(message: Mapping[str, Any], known: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A message as it was said, whatever a session in this process does to it later: the one that is known already, or
    a copy. Texts, of which most messages are made, need none."""
    if known is not None and message == known:
        return known
    if not any(isinstance(value, list | dict) for value in message.values()):
        return message
    try:
        return deepcopy(message)
    except RecursionError:  # a message that comes over HTTP, which nobody changes
        return message


def _hash_next(before: int, key: Key) -> int:
    """Return the hash of a conversation that goes on with a message."""
    return hash((before, key))
