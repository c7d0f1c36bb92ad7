"""The final number of a worked solution, as in GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"), whose answers end in a line ``#### 72``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from podium.rewards.text import answer_of

__all__ = ["final_number", "gsm8k"]

MARK: Final = "####"
TOLERANCE: Final = Decimal("1e-6")  # relative for answers over 1, absolute below

# A minus belongs to the number that it touches, unless it stands behind an operand (10-5); it may be before or after a
# currency sign.
# Commas count only where they group thousands, so that "1,2" is two numbers.
_NUMBER: Final = re.compile(
    r"(?:(?<![\w.)])(?P<sign>[-+\u2212]))?(?:[$€£¥]\s?)?(?P<inner>(?<=[$€£¥])[-\u2212])?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####``; without that mark the last number of all; None if there is none.

    Thousands' commas, currency signs, units and a full stop behind the number do not matter.

    >>> final_number("She pays $1,250.50."), final_number("6 * 7 = 42\\n#### 42 apples, 3 of them red")
    (Decimal('1250.50'), Decimal('42'))
    """
    _, mark, tail = text.rpartition(MARK)
    matches = list(_NUMBER.finditer(tail))
    if not matches:
        return None
    match = matches[0] if mark else matches[-1]
    number = Decimal(match["digits"].replace(",", ""))
    negative = any(match[name] in ("-", "\u2212") for name in ("sign", "inner"))
    return -number if negative else number


def gsm8k(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion's final number is the answer's (5 and 5.0 are the same), else 0."""
    wanted = final_number(answer_of(row))
    if wanted is None:
        raise ValueError(f"the answer {answer_of(row)[:80]!r} holds no number; use another reward, or repair the row")
    given = final_number(completion)
    return float(given is not None and abs(given - wanted) <= TOLERANCE * max(Decimal(1), abs(wanted)))
