"""Rewards that compare texts: character by character, or by their final numbers."""

import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any, Final

__all__ = ["MARK", "answer_of", "exact", "final_number", "fraction", "gsm8k"]

MARK: Final = "####"
TOLERANCE: Final = Decimal("1e-6")  # relative for answers over 1, absolute below

# A minus belongs to the number that it touches, unless it stands behind an operand (10-5). The minus may be before or
# after a currency sign. Commas count only where they group thousands, so that "1,2" is two numbers.
_NUMBER: Final = re.compile(
    r"(?:(?<![\w.)])(?P<sign>[-+\u2212]))?(?:[$€£¥]\s?)?(?P<inner>(?<=[$€£¥])[-\u2212])?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)


def answer_of(row: Mapping[str, Any]) -> str:
    """Return the row's answer as text: text itself, a number as Python writes it, the text of the last of messages.

    Raises:
        ValueError: The row has no answer, or one of another kind. The message names the remedy.
    """
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no answer; set data.answer_column to the column that holds it")
    match answer:
        case [*_, {"role": str(), "content": str(text)}]:
            return text
        case [*_, {"role": str(), "content": [*parts]}] if all(isinstance(part, Mapping) for part in parts):
            return "".join(str(part.get("text", "")) for part in parts)
        case Mapping() | Sequence() | Set() if not isinstance(answer, str):
            raise ValueError(
                f"the answer {str(answer)[:60]!r} ({type(answer).__name__}) is neither text nor messages; set "
                "data.answer_column to a column that is, or write a reward that reads it"
            )
        case _:
            return str(answer)


def exact(completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 if completion and answer are the same except for white space around them, else 0."""
    return float(completion.strip() == answer_of(row).strip())


def fraction(completion: str, row: Mapping[str, Any]) -> float:
    """Return the share of positions at which completion and answer have the same character.

    The share is that of the longer text. The reward rises with every right character, where ``exact`` stays at 0 until
    all are right.

    >>> fraction("126", {"answer": "123"}), fraction("1234", {"answer": "123"})
    (0.6666666666666666, 0.75)
    """
    text, wanted = completion.strip(), answer_of(row).strip()
    longest = max(len(text), len(wanted))
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / longest if longest else 1.0


def final_number(text: str) -> Decimal | None:
    """Return the number after the last ``####``, or the last number of a text without that mark; None if it has none.

    Commas between thousands, currency signs, units and a full stop behind the number do not matter.

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
    """Return 1 if the completion's final number equals the answer's (5 and 5.0 are equal), else 0.

    Answers of GSM8K end in a line ``#### 72`` (Cobbe et al. 2021, arXiv:2110.14168).
    """
    wanted = final_number(answer_of(row))
    if wanted is None:
        raise ValueError(f"the answer {answer_of(row)[:80]!r} holds no number; use another reward, or repair the row")
    number = final_number(completion)
    return float(number is not None and abs(number - wanted) <= TOLERANCE * max(Decimal(1), abs(wanted)))
