"""The answer that a reward reads in a completion, by which equal answers are counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from podium.rewards.config import Grade
from podium.rewards.numbers import boxed_text, final_number

_ANSWER: Final = "answer"


def _read_number(text: str) -> str | None:
    number = final_number(text)
    return None if number is None else str(number.normalize())


def _read_formula(text: str) -> str | None:
    boxed = boxed_text(text)
    return _read_number(text) if boxed is None else _read_number(boxed) or "".join(boxed.split())


_READERS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "exact": str.strip,
    "fraction": str.strip,
    "gsm8k": _read_number,
    "math": _read_formula,
}


def find_reader(rewards: Sequence[Any]) -> Callable[[str, Grade | None], str | None]:
    """Return a function of a completion and its grade that returns the answer in it; None where it has none.

    The answer is what a reward logged as ``answer``, or else what the first of Podium's rewards that compares with the
    row's answer reads.
    """
    reader = next((_READERS[name] for name in rewards if isinstance(name, str) and name in _READERS), None)

    def read(text: str, grade: Grade | None) -> str | None:
        logged = [] if grade is None else _list_logged(grade)
        return logged[0] if logged else reader(text) if reader is not None else None

    return read


def reads_answers(rewards: Sequence[Any], grades: Sequence[Grade | None]) -> bool:
    """Whether completions have answers that can be counted."""
    named = any(isinstance(name, str) and name in _READERS for name in rewards)
    return named or any(_list_logged(grade) for grade in grades if grade is not None)


def _list_logged(grade: Grade) -> list[str]:
    """The answers that rewards logged, a number as text too."""
    values: Mapping[str, float | str] = {**grade.parts, **grade.extra}
    return [str(value).strip() for name, value in values.items() if name.rpartition(".")[2] == _ANSWER]
