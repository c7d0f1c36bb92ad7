"""Rewards for the tests of training. Grading processes import this module, so it imports nothing that takes long."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def longer_is_better(completion: str, row: Mapping[str, Any]) -> Mapping[str, float]:
    return {"score": float(len(completion)), "length": float(len(completion))}


def length_and_worth(completion: str, row: Mapping[str, Any]) -> float:
    return len(completion) + row.get("worth", 0.0)


def sevens(completion: str, row: Mapping[str, Any]) -> float:
    return completion.count("7") / 3


def two_parts(completion: str, row: Any) -> dict[str, float]:
    digits, length = sum(character.isdigit() for character in completion), len(completion)
    return {"score": digits + 0.1 * length + len(row["source"]), "digits": float(digits), "length": float(length)}


def minus_half(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    return {"score": -0.5 * row["model_score"], "length": float(len(completion))}


def unlucky(completion: str, row: Mapping[str, Any]) -> float:
    raise ValueError("no such luck")


def as_planned(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The score that a held-out prompt's plan has for this evaluation; of others, one that training learns from."""
    if "plan" not in row:
        return {"score": len(completion) / 100, "size": float(len(completion))}
    marks = Path(row["marks"])
    with marks.open("a") as file:
        file.write("x")
    return {"score": row["plan"][marks.stat().st_size - 1], "size": float(len(completion))}
