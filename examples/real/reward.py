"""The reward of the sums: 1 for the bare number, a half for the right number at the end of a longer reply, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def score(completion: str, row: Mapping[str, Any]) -> float:
    numbers = re.findall(r"\d+", completion)
    right = bool(numbers) and numbers[-1] == row["answer"]
    return (1.0 if completion.strip() == numbers[-1] else 0.5) if right else 0.0
