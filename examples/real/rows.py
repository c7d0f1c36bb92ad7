"""The rows that train.py trains on: sums, what is better and worse of an answer to a sum, and products."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as JSON lines, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums() -> list[dict[str, Any]]:
    """All sums of two numbers from 2 to 20, each as a message of a chat. The answer is the equation."""
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": f"{a} + {b} = {a + b}"}
        for a in range(2, 21)
        for b in range(2, 21)
    ]


def pairs() -> list[dict[str, Any]]:
    """Each sum with its equation as the better answer, and with one of the model's three faults as the worse one."""
    faults = cycle(("a wrong equation", "more after the equation", "talk"))
    rows = list[dict[str, Any]]()
    for number, (row, fault) in enumerate(zip(sums(), faults, strict=False)):
        left, total = row["answer"].split(" = ")
        worse = {
            "a wrong equation": f"{left} = {int(total) + 1 + number % 4}.",
            "more after the equation": f"{row['answer']}\n\nThis is a sum.",
            "talk": f"To add {left}, you add them together.",
        }
        rows.append({**row, "chosen": row["answer"], "rejected": worse[fault]})
    return rows


def products() -> list[dict[str, Any]]:
    """Products of numbers of two digits, which the model does not know."""
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": str(a * b)}
        for a in range(14, 100, 6)
        for b in range(13, 100, 6)
    ]
