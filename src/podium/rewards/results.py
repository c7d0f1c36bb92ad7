"""What a grading process tells of one item: a line of JSON, so that reading it can run nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["Result", "decode", "encode"]

_NO_PARTS: Final[Mapping[str, float]] = MappingProxyType({})


class Result(NamedTuple):
    """What is known of one item.

    Attributes:
        score: The reward's score; None if there is a problem.
        parts: The named parts with "score", if the reward returned a mapping.
        problem: What was wrong, as the end of a sentence that begins with "the reward".
        traceback: Where the reward raised.
        limit: The limit that the item ran over: "time", "memory" or "".
    """

    score: float | None = None
    parts: Mapping[str, float] = _NO_PARTS
    problem: str = ""
    traceback: str = ""
    limit: str = ""


def encode(number: int, result: Result) -> bytes:
    """Return one line: the item's number, and a score, its parts or a problem."""
    plain = result[2:] if result.score is None else dict(result.parts) or result.score
    return b"%d %b\n" % (number, json.dumps(plain).encode())


def decode(data: bytes) -> Result:
    """Return the result in ``data``, a line without its number. Whatever is wrong with it becomes the result's problem.

    A reward may have written the line by itself. Each value's type is checked, and nothing else is believed.
    """
    with suppress(ValueError, RecursionError):
        match json.loads(data.decode()):
            case float(score) if math.isfinite(score):
                return Result(score)
            case {"score": float(score), **others} as parts if all(map(_is_finite, (score, *others.values()))):
                return Result(score, parts)
            case [str(problem), str(trace), str(limit)]:
                return Result(None, _NO_PARTS, problem, trace, limit)
            case _:
                pass
    return Result(problem=f"sent {data[:60]!r}, which is not a result")


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
