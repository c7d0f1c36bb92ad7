"""The output layer of a language model, forward and backward: its time beside whole logits, and its memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.context import Context
from bench.measure import Row, alternate, compare

WORDS = 151_936  # of Qwen's vocabulary


def measured(vocabulary: int, hidden: int, tokens: int, how: str, passes: int) -> dict[str, Any]:
    arguments = [str(value) for value in (vocabulary, hidden, tokens, how, passes)]
    command = [sys.executable, "-m", "bench.scored", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def scoring(context: Context) -> Iterator[Row]:
    """Time at 4,000 words; and how much more memory four times the tokens take at 152 thousand words."""

    def seconds(how: str) -> float:
        return statistics.median(measured(4000, 256, 4096, how, 5)["seconds"][1:])

    subjects = {"podium": lambda: seconds("chunks"), "whole_logits": lambda: seconds("whole")}
    figures = alternate(subjects, repetitions=context.repetitions(5))
    floor = "whole_logits: all logits kept for the backward pass"
    yield compare("scoring_4k_words", figures, unit="ms", scale=1e3, floor=floor)
    fewer, more = (1024, 4096) if context.quick else (4096, 16384)
    few, many = (measured(WORDS, 64, tokens, "chunks", 1)["peak_mb"] for tokens in (fewer, more))
    figures = {"podium": [many / few]}
    yield compare("scoring_memory_growth", figures, unit="times for 4x tokens", floor="1: no more memory")
