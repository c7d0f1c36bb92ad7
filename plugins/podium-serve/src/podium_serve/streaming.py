"""Answers as they are drawn: pieces that no later token changes, and at last the whole answers.

What may be the beginning of a tool call, of a stop text or of a character is held back until it is known.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from podium.rollout.engines.stops import before_stop
from podium_agents.service.service import Answer
from podium_agents.service.session_recording import Sampled
from podium_agents.service.tool_calls import REASONING_ENDS
from podium_serve.concurrency import merge_streams
from podium_serve.pieces import Delta, Progress

if TYPE_CHECKING:
    from podium_agents.service.service import Asked, Service

__all__ = ["count_reasoning", "read_answer", "stream_answers", "stream_texts"]

_PAUSE_S: Final = 0.02  # between two looks at the text of a stream
_SLOW_S: Final = 0.05  # of work on a piece of a stream; the next one then comes later
_OPENERS: Final = "<[{"  # with one of these a tool call may begin
_BEGUN: Final = "\ufffd"
"""A piece of a character."""

_UNCERTAIN: Final = _BEGUN + "".join(filter(str.isspace, map(chr, range(0x3001))))
"""A piece of a character, and white space, which is dropped before a call and at the end of some texts."""

Certain: TypeAlias = "Callable[[Service, Asked, Sequence[int]], Delta]"
"""Gives the beginning of what a completion says that no later token changes, by the ids so far."""


async def stream_answers(
    service: Service, asked: Asked, *, tokens: bool = False, late: bool = False
) -> AsyncGenerator[tuple[int, Delta | Answer]]:
    """Draw all completions of a conversation. Yields pieces of the texts as they come, with the number of their
    completion, and at last the whole answers, which are recorded as :meth:`Service.read` does.

    What may be the beginning of a tool call, of a stop text or of a character is held back until it is known.

    Args:
        asked: The conversation.
        tokens: Whether pieces have their tokens.
        late: Whether all pieces come at the end.
    """
    count = len(asked.seeds)
    sent = [Progress(partial(read_answer, service, asked) if tokens else None) for _ in range(count)]
    samples = dict[int, Sampled]()
    texts = [_texts(service, asked, number, _certain) for number in range(count)]
    async with aclosing(merge_streams(texts)) as pieces:
        async for number, (text, sampled) in pieces:
            if text is None:
                samples[number] = sampled
            elif not late:
                for piece in sent[number].advance(text, sampled):
                    yield number, piece
    completions = [await service.with_top(asked, samples[number]) for number in range(count)]
    for number, answer in enumerate(service.read(asked, completions)):
        for piece in sent[number].end(answer):
            yield number, piece


async def stream_texts(
    service: Service, asked: Sequence[Asked], *, tokens: bool = False
) -> AsyncGenerator[tuple[int, Delta | Answer]]:
    """Draw all completions of texts. Yields pieces of them as they come, with the number of their completion, and
    all of a completion after its last piece. What may be the beginning of a stop text or of a character is held
    back until it is known. With ``tokens``, pieces have their tokens.
    """
    draws = [(question, number) for question in asked for number in range(len(question.seeds))]
    sent = [Progress(partial(_read_text, service, which) if tokens else None) for which, _ in draws]
    async with aclosing(merge_streams([_texts(service, *which, _certain_text) for which in draws])) as pieces:
        async for number, (text, sampled) in pieces:
            if text is not None:
                following: Iterable[Delta | Answer] = sent[number].advance(text, sampled)
            else:
                question = draws[number][0]
                content = before_stop(service.decode(sampled.ids, special=question.special), question.stops)
                following = sent[number].end(Answer({"content": content}, sampled.finish_reason, sampled))
            for piece in following:
                yield number, piece


async def _texts(
    service: Service, asked: Asked, number: int, certain: Certain
) -> AsyncGenerator[tuple[Delta | None, Sampled]]:
    """Yield the text so far as it is certain, now and then, and what was sampled so far; at last no text and all of
    the completion. Whoever takes long over a piece gets the next one later, so that it is a larger one."""
    looked_s, pause_s = 0.0, _PAUSE_S
    async with aclosing(service.draw_pieces(asked, number)) as pieces:
        async for piece in pieces:
            begun_s = time.monotonic()
            if piece.finish_reason:
                yield None, piece
            elif begun_s - looked_s >= pause_s:
                yield certain(service, asked, piece.ids), piece
                looked_s = time.monotonic()
                pause_s = max(_PAUSE_S, work_s if (work_s := looked_s - begun_s) > _SLOW_S else 0.0)


def _certain(service: Service, asked: Asked, ids: Sequence[int]) -> Delta:
    """The beginning of content and reasoning that no later token changes."""
    reply = service.parse(asked, ids, partial=True)
    if asked.one_call and reply.tool_calls:  # a second call would cut off what follows the first
        return Delta()
    content, reasoning = reply.content, reply.reasoning or ""
    if asked.tools:
        content = content[: min((at for mark in _OPENERS if (at := content.find(mark)) >= 0), default=None)]
    elif (at := content.rfind("<")) >= 0:
        content = content[:at]
    return Delta(_hold_back(content, asked.stops), _hold_back(_without_begun_end(reasoning), asked.stops))


def read_answer(service: Service, asked: Asked, ids: Sequence[int]) -> Delta:
    """What ids say so far, without an end that may be the beginning of a character, of a header or of a call."""
    reply = service.parse(asked, ids, partial=True)
    return Delta(reply.content.rstrip(_BEGUN), (reply.reasoning or "").rstrip(_BEGUN))


def count_reasoning(service: Service, asked: Asked, answer: Answer) -> int:
    """Return the number of tokens of an answer up to the last one of its reasoning; 0 for an answer without."""
    size, ids = len(answer.message.get("reasoning_content") or ""), answer.sampled.ids

    def is_complete(count: int) -> bool:
        return len(read_answer(service, asked, ids[:count]).reasoning) >= size

    return bisect_left(range(len(ids)), True, key=is_complete) if size else 0


def _read_text(service: Service, asked: Asked, ids: Sequence[int]) -> Delta:
    return Delta(service.decode(ids, special=asked.special).rstrip(_BEGUN))


def _certain_text(service: Service, asked: Asked, ids: Sequence[int]) -> Delta:
    """The beginning of a plain text that no later token changes."""
    return Delta(_hold_back(service.decode(ids, special=asked.special), asked.stops))


def _hold_back(text: str, stops: Sequence[str]) -> str:
    """``text`` without an end that may be the beginning of one of ``stops``, or a piece of a character."""
    text = before_stop(text, stops)
    reach = max(map(len, stops), default=1) - 1
    return text[: max(0, len(text) - reach)].rstrip(_UNCERTAIN)


def _without_begun_end(reasoning: str) -> str:
    """Reasoning that goes on, without what may be the beginning of the tag that ends it."""
    before, opener, rest = reasoning.rpartition("<")
    return before if any(tag.startswith(opener + rest) for tag in REASONING_ENDS if opener) else reasoning
