"""The reward of a sum: 1 for the right equation and nothing else, a half if the reply goes on after it, 0 otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(completion: str, row: Mapping[str, Any]) -> float:
    """The answer of the row is the equation, as in ``7 + 5 = 12``."""
    reply = completion.strip()
    if not reply.startswith(row["answer"]):
        return 0.0
    rest = reply[len(row["answer"]) :]
    if rest[:1].isdigit():  # of another number, as in 7 + 5 = 120
        return 0.0
    return 1.0 if rest in ("", ".") else 0.5
