"""Texts that end an answer, and the tokens that complete them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from podium.rollout.service.sessions import Sampled

__all__ = ["BEGUN", "UNCERTAIN", "before_stop", "ends_now", "hold_back", "up_to_stop"]

BEGUN: Final = "\ufffd"
"""A piece of a character."""

UNCERTAIN: Final = f"{BEGUN} \n\t"
"""A piece of a character, and white space that may be the end of the text."""

_MARGIN: Final = 8  # characters at the front of a part that may be others in the whole: pieces of one, or a lost space

Decode = Callable[[Sequence[int]], str]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """What stands before the first of ``stops``."""
    return text[: min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)]


def hold_back(text: str, stops: Sequence[str]) -> str:
    """``text`` without an end that may be the beginning of one of ``stops``, or a piece of a character."""
    text = before_stop(text, stops)
    reach = max(map(len, stops), default=1) - 1
    return text[: max(0, len(text) - reach)].rstrip(UNCERTAIN)


def ends_now(ids: Sequence[int], new: int, stops: Sequence[str], decode: Decode) -> bool:
    """Whether one of ``stops`` has come with the last ``new`` tokens. Of those before, only as many are decoded as the
    longest of ``stops`` may reach back."""
    reach, count = max(map(len, stops)) + _MARGIN, 0
    former_ids = ids[: len(ids) - new]
    while count < len(former_ids):
        count = min(len(former_ids), 2 * count or reach)
        if len(decode(former_ids[len(former_ids) - count :])) >= reach:
            break
    part = ids[len(former_ids) - count :]
    return _has(part, stops, decode) and (len(part) == len(ids) or _has(ids, stops, decode))


def up_to_stop(drawn: Sampled, stops: Sequence[str], decode: Decode) -> Sampled:
    """What was sampled up to the token that completes one of ``stops``; what came after it nobody has read."""
    if not stops or not _has(drawn.ids, stops, decode):
        return drawn
    counts = range(1, len(drawn.ids) + 1)
    count = counts[bisect_left(counts, True, key=lambda count: _has(drawn.ids[:count], stops, decode))]
    return replace(drawn.first(count), finish_reason="stop")


def _has(ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    text = decode(ids)
    return any(stop in text for stop in stops)
