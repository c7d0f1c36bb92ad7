r"""The final number of a text, as a person reads it.

The number must be whole: ``1/2`` is a half and not 1, ``10 000`` is ten thousand and not 10, ``4e2`` is 400, and
``3:45`` is no number. A text whose final number has two readings has none.
"""

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from podium.rewards.stop_texts import close_match

MARK: Final = "####"
TOLERANCE: Final = Decimal("1e-6")  # relative for answers over 1, absolute below

_MINUS: Final = "-\u2212"
_DIGITS: Final = r"""
      (?!0)\d{1,3}(?:,\d{3})+(?:\.\d+)?                     # 1,234.50
    | \d{1,3}(?:\.\d{3})+,\d+                               # 1.234,50
    | \d{1,3}(?:\.\d{3}){2,}                                # 1.234.567
    | \d{1,3}(?:['\u2019\x20\u00a0\u2009\u202f]\d{3})+(?:[.,]\d+)?  # 10 000
    | \d+(?:[.,]\d+)?                                       # 10000  0.5  0,5
    | \.\d+
"""
# A minus belongs to the number that it touches, unless it stands behind an operand (10-5). The minus may be before or
# after a currency sign. Nothing that continues the number may stand on either side, as in 3:45, 2024-12-25, 2^10, 6*7.
_NUMBER: Final = re.compile(
    rf"""
    (?<![\d√]) (?<!\d[.,:/_^'\u2019-])
    (?:(?<![\w.)])(?P<sign>[-+\u2212]))? (?:[$€£¥₹]\s?)? (?P<inner>(?<=[$€£¥₹])[-\u2212])?
    (?:(?P<integer>\d+)\s+(?=\d+/))?
    (?P<top>{_DIGITS})
    (?: [eE](?P<exponent>[-+]?\d{{1,3}})
      | \s*[x\u00d7*]\s*10\s*(?:\^|\*\*)\s*\(?(?P<power>[-+\u2212]?\d{{1,3}})\)?
      | \s?/\s?(?P<bottom>\d+(?:\.\d+)?)
    )?
    (?! \d | [.,:/_^'\u2019]\d | \s*[-+*\u00d7÷/^\u2212\u2013]\s*(?:[\d(]|[xyzn]\b) | \s*[+*\u00d7÷]\s*\w
      | [_^√π\u00b2\u00b3\u00b9\u2070-\u209f] )
    """,
    re.VERBOSE,
)
_JOINED_BEFORE: Final = re.compile(r"(?:[\d)]|\b[xyzn])\s*[-+*\u00d7÷/^\u2212\u2013]\s*$")
_NEAR: Final = 16  # characters before a number that may join it to another
_LONGEST: Final = 400  # characters of a number with its markup
_DIGIT: Final = re.compile(r"\d")
_LAST_DIGIT: Final = re.compile(r"\d\D*$")
_WORD: Final = re.compile(r"\s*([A-Za-z\u0370-\u03ff]+)")
_ALGEBRA: Final = re.compile(r"[xyznabi\u0370-\u03ff]\b")  # touching the number: 2x, 3i, 2π
_CLAUSE: Final = re.compile(r"[.,;:(!?\[]|$")
_BOXED: Final = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER: Final = re.compile(
    r"\banswer\b(?:\s+is)?\s*[:=]?\s*(?=[-+\u2212$€£¥₹*`\\]*\s?[-\u2212]?\.?\d)([^\n]*)", re.IGNORECASE
)
_FACTORS: Final = {
    **{"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12},
    **{"k": 3, "K": 3, "M": 6, "B": 9, "bn": 9, "mn": 6},
}

_LATEX: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac\b)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\{([.,])\}"), r"\1"),
    (re.compile(r"\^\s*\{?\s*\\circ\b\s*\}?"), "°"),
    (re.compile(r"\\approx\b"), "≈"),
    (re.compile(r"\\(?:times|cdot)\b"), "\u00d7"),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile(r"\\(?=[$%])"), ""),
    (re.compile(r"\\(?:text|math|boxed|left|right|quad|qquad|big|displaystyle|euro|pounds)[A-Za-z]*"), " "),
    (re.compile(r"\\[A-Za-z]+\s*"), "√"),  # a root, a logarithm, π: what it applies to is not the number
    (re.compile(r"[{}`]|(?<![\d)])\*\*|\*\*(?![\d(])"), ""),  # braces, and the bold type of Markdown
    (re.compile("[\u00bc-\u00be\u2150-\u215e]"), lambda sign: " " + unicodedata.normalize("NFKC", sign[0])),
    (re.compile("\u2044"), "/"),
)


def final_number(text: str) -> Decimal | None:
    r"""Return the number after the last ``####``; of a text without that mark the number in its last ``\boxed{}``, the
    one after its last "answer is" or "Answer:", or its last number. None if there is no such number, or no single one.

    Separators of thousands, currency signs, units, a full stop behind the number and markup do not matter.

    >>> final_number("She pays $1,250.50."), final_number("6 * 7 = 42\n#### 42 apples, 3 of them red")
    (Decimal('1250.50'), Decimal('42'))
    >>> final_number("#### 1/2"), final_number("#### 10 000"), final_number("#### 3:45")
    (Decimal('0.5'), Decimal('10000'), None)
    """
    _, mark, tail = text.rpartition(MARK)
    if mark:
        return _read_line(next((line for line in _simplify(tail).splitlines() if _DIGIT.search(line)), ""))
    if boxed := _BOXED.findall(text):
        return _read_line(_simplify(boxed[-1]))
    if (stated := _ANSWER.findall(text)) and (number := _read_line(_simplify(stated[-1]))) is not None:
        return number
    last = _LAST_DIGIT.search(text)
    return None if last is None else _read_last(_simplify(text[max(0, last.start() - _LONGEST) :]))


def boxed_text(text: str) -> str | None:
    r"""Return what the last ``\boxed{}`` of a text holds; None where there is none."""
    boxed = _BOXED.findall(text)
    return boxed[-1] if boxed else None


def close_box(completion: str, stop_text: str) -> str:
    r"""Return a completion with the end of its last ``\boxed{}`` where the text that ended the completion has it."""
    return close_match(_BOXED, completion, stop_text) if "}" in stop_text else completion


def is_same_number(number: Decimal | None, wanted: Decimal) -> bool:
    """Return whether ``number`` is ``wanted``, but for a millionth of it."""
    return number is not None and abs(number - wanted) <= TOLERANCE * max(Decimal(1), abs(wanted))


def _simplify(text: str) -> str:
    """Write the mathematics of LaTeX and of typography in plain characters."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text


def _read_line(line: str) -> Decimal | None:
    """The number that a line states. The sides of an equation that are numbers must agree."""
    numbers = [number for side in re.split("[=≈→]", line) if (number := _read_side(side)) is not None]
    return numbers[0] if numbers and all(is_same_number(number, numbers[0]) for number in numbers) else None


def _read_side(side: str) -> Decimal | None:
    """The first number of a text, if no second number belongs to it, as in "3 hours 45 minutes"."""
    digit, match = _DIGIT.search(side), _NUMBER.search(side)
    if digit is None or match is None or not match.start() <= digit.start() < match.end():
        return None
    rest = side[match.end() :]
    clause = _CLAUSE.search(rest)
    assert clause is not None  # the end of the text is the end of a clause
    unit, after = rest[: clause.start()], rest[clause.end() :]
    if _DIGIT.search(unit) or (not unit.strip() and clause[0] in tuple(",;:") and after.lstrip()[:1].isdigit()):
        return None
    return _value(match, side)


def _read_last(text: str) -> Decimal | None:
    """The last number of a text. None if the last digits are a part of something else."""
    digit, matches = _LAST_DIGIT.search(text), list(_NUMBER.finditer(text))
    return _value(matches[-1], text) if digit and matches and matches[-1].end() > digit.start() else None


def _value(match: re.Match[str], text: str) -> Decimal | None:
    if _JOINED_BEFORE.search(text[max(0, match.start() - _NEAR) : match.start()]):
        return None
    top, bottom = _decimal(match["top"]), _decimal(match["bottom"] or "1")
    if not bottom:
        return None
    number = top / bottom if match["bottom"] else top
    if match["integer"]:
        number += Decimal(match["integer"])
    exponent = match["exponent"] or match["power"]
    number = number.scaleb(int(exponent.replace("\u2212", "-"))) if exponent else number
    rest = text[match.end() :]
    if _ALGEBRA.match(rest):
        return None
    if word := _WORD.match(rest):
        number = number.scaleb(_FACTORS.get(word[1], 0))
    negative = any(match[name] and match[name] in _MINUS for name in ("sign", "inner"))
    return -number if negative else number


def _decimal(digits: str) -> Decimal:
    """The value of digits with separators. A comma separates decimals unless it stands before groups of thousands."""
    digits = re.sub(r"['\u2019\s]", "", digits)
    if re.fullmatch(r"(?!0)\d{1,3}(,\d{3})+(\.\d+)?", digits):
        return Decimal(digits.replace(",", ""))
    if "," in digits or digits.count(".") > 1:
        return Decimal(digits.replace(".", "").replace(",", "."))
    return Decimal(digits)
