"""Rewards that compare the completion's text with the answer's, character by character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["answer_of", "exact", "fraction"]


def answer_of(row: Mapping[str, Any]) -> str:
    """The row's answer as text. Raises ValueError if there is none, with the remedy."""
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no answer; set data.answer_column to the column that holds it")
    return str(answer)


def exact(completion: str, row: Mapping[str, Any]) -> float:
    """1 if completion and answer are the same but for white space around them, else 0."""
    return float(completion.strip() == answer_of(row).strip())


def fraction(completion: str, row: Mapping[str, Any]) -> float:
    """Share of positions at which completion and answer have the same character, over the longer of the two.

    A reward that rises with every position won, where ``exact`` is silent until all are.

    >>> fraction("126", {"answer": "123"}), fraction("1234", {"answer": "123"})
    (0.6666666666666666, 0.75)
    """
    given, wanted = completion.strip(), answer_of(row).strip()
    longest = max(len(given), len(wanted))
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / longest if longest else 1.0
