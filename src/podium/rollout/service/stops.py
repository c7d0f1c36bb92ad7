"""Texts that end an answer: what of a stream is certain, and what was sampled up to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from podium.rollout.engines.stops import Decode, before_stop, count_to_stop
from podium.rollout.service.sessions import Sampled

__all__ = ["BEGUN", "UNCERTAIN", "hold_back", "up_to_stop"]

BEGUN: Final = "\ufffd"
"""A piece of a character."""

UNCERTAIN: Final = f"{BEGUN} \n\t"
"""A piece of a character, and white space that may be the end of the text."""


def hold_back(text: str, stops: Sequence[str]) -> str:
    """``text`` without an end that may be the beginning of one of ``stops``, or a piece of a character."""
    text = before_stop(text, stops)
    reach = max(map(len, stops), default=1) - 1
    return text[: max(0, len(text) - reach)].rstrip(UNCERTAIN)


def up_to_stop(drawn: Sampled, stops: Sequence[str], decode: Decode) -> Sampled:
    """What was sampled up to the token that completes one of ``stops``; what came after it nobody has read."""
    count = count_to_stop(drawn.ids, stops, decode)
    return drawn if count is None else replace(drawn.first(count), finish_reason="stop")
