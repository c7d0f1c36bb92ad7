"""The pieces in which a stream sends an answer: each has a text and the tokens whose text begins in it.

tokens    <think>  hm  </think>  It  ␣is  <|im_end|>
pieces    [     reasoning     ]  [  content  ][ end ]     every token is in one piece, in its order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from podium_agents.service.request_bodies import Refusal

if TYPE_CHECKING:
    from podium_agents.service.service import Answer
    from podium_agents.service.session_recording import Sampled

__all__ = ["Delta", "Progress"]


@dataclass(frozen=True)
class Delta:
    """A piece of an answer that is being drawn.

    Attributes:
        content: Its text.
        reasoning: Its reasoning.
        sampled: What was sampled up to the last token of the piece; None where nobody asked for tokens.
        start: The number of tokens that earlier pieces have.
    """

    content: str = ""
    reasoning: str = ""
    sampled: Sampled | None = None
    start: int = 0

    def __add__(self, other: Delta) -> Delta:
        """Both texts, one after the other."""
        return Delta(self.content + other.content, self.reasoning + other.reasoning)

    def __len__(self) -> int:
        """The number of characters."""
        return len(self.content) + len(self.reasoning)

    def up_to(self, whole: Delta) -> Delta:
        """What follows this piece in ``whole``; nothing where it is not the beginning."""
        return Delta(_more(self.content, whole.content), _more(self.reasoning, whole.reasoning))


Read: TypeAlias = Callable[[Sequence[int]], Delta]
"""Gives all that a completion says, by its ids so far."""


class Progress:
    """What a stream has sent of one completion.

    Args:
        read: Reads the tokens, to find those of each piece. None where nobody asked for tokens.
    """

    def __init__(self, read: Read | None = None) -> None:
        self._read = read
        self._sent = Delta()
        self._tokens = 0

    def advance(self, whole: Delta, sampled: Sampled) -> Iterator[Delta]:
        """Yield the pieces that follow in ``whole``, the text so far: reasoning, and then content."""
        more = self._sent.up_to(whole)
        for piece in (Delta(reasoning=more.reasoning), Delta(more.content)):
            if not piece:
                continue
            self._sent += piece
            if self._read is None:
                yield piece
                continue
            start, ids, size = self._tokens, sampled.ids, len(self._sent)
            while self._tokens < len(ids) and len(self._read(ids[: self._tokens])) < size:
                self._tokens += 1
            yield replace(piece, sampled=sampled.first(self._tokens), start=start)

    def end(self, answer: Answer) -> Iterator[Delta | Answer]:
        """Yield the last pieces of an answer, and the answer.

        Raises:
            Refusal: The answer does not begin with what was sent, so that the rest of it cannot follow.
        """
        message = answer.message
        whole = Delta(message.get("content") or "", message.get("reasoning_content") or "")
        for name, sent, text in (
            ("content", self._sent.content, whole.content),
            ("reasoning", self._sent.reasoning, whole.reasoning),
        ):
            if not text.startswith(sent):
                raise Refusal(
                    500,
                    f"the stream of this answer has sent {sent[-80:]!r} at the end of its {name}, with which the whole "
                    f"{name}, {text[:80]!r}, does not begin: send the request again without stream, and report this "
                    "as a defect of Podium",
                )
        yield from self.advance(whole, answer.sampled)
        yield replace(answer, start=self._tokens)


def _more(sent: str, whole: str) -> str:
    """What follows ``sent`` in ``whole``; "" where it is not the beginning."""
    return whole[len(sent) :] if whole.startswith(sent) else ""
