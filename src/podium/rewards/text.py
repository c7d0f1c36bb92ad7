"""The rewards of the core: they compare texts, character by character or by their final numbers, or read a score.

The answers that they read in completions are those by which equal answers are counted.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from podium.rewards.columns import reads
from podium.rewards.config import Grade
from podium.rewards.number_parsing import boxed_text, close_box, final_number, is_same_number


def answer_of(row: Mapping[str, Any]) -> str:
    """Return the row's answer as text: text itself, a number as Python writes it, the text of the last of messages. A
    list of one text or number counts as this element.

    Raises:
        ValueError: The row has no answer, or one of another kind. The message names the remedy.
    """
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no answer; set data.answer_column to the column that holds it")
    match answer:
        case [str() | int() | float() as element]:
            return str(element)
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


@reads("answer", least=0.0)
def exact(completion: str, row: Mapping[str, Any], stop_text: str = "") -> float:
    """Return 1 if completion and answer are the same except for white space around them, else 0.

    The answer may have the text that ended the completion, or not.
    """
    return float(answer_of(row).strip() in (completion.strip(), (completion + stop_text).strip()))


@reads("answer", least=0.0)
def fraction(completion: str, row: Mapping[str, Any], stop_text: str = "") -> float:
    """Return the share of positions at which completion and answer have the same character.

    The share is that of the longer text. The reward rises with every right character, where ``exact`` stays at 0 until
    all are right. The text that ended the completion belongs to it where the share is then larger.

    >>> fraction("126", {"answer": "123"}), fraction("1234", {"answer": "123"})
    (0.6666666666666666, 0.75)
    """
    wanted = answer_of(row).strip()
    return max(_share_alike(text.strip(), wanted) for text in {completion, completion + stop_text})


@reads("answer", least=0.0)
def gsm8k(completion: str, row: Mapping[str, Any], stop_text: str = "") -> float:
    """Return 1 if the completion's final number equals the answer's (5 and 5.0 are equal), else 0.

    Answers of GSM8K end in a line ``#### 72`` (Cobbe et al. 2021, arXiv:2110.14168).

    Raises:
        ValueError: The answer of the row has no final number.
    """
    wanted = final_number(answer_of(row))
    if wanted is None:
        raise ValueError(
            f"the answer {answer_of(row)[:80]!r} holds no number, or more than one; use another reward, or repair the "
            "row"
        )
    return float(is_same_number(final_number(close_box(completion, stop_text)), wanted))


@reads("model_score")
def model(completion: str, row: Mapping[str, Any]) -> float:
    """Return the score that the model of ``reward.path`` gave the completion."""
    return row["model_score"]


@reads(least=-1.0)
def overlong(completion: str, completion_ids: Sequence[int], max_new_tokens: int) -> float:
    """Return a penalty from 0 to -1 that grows over the last fifth of the tokens that a completion may have.

    With L tokens of at most M, and c = M / 5, it is 0 up to L = M - c, and then (M - c - L) / c. Yu et al. 2025, DAPO,
    arXiv:2503.14476, equation 13; c is a fifth of M as in their runs (4,096 of 20,480).

    >>> [overlong("", range(count), 20) for count in (16, 18, 20)]
    [0.0, -0.5, -1.0]
    """
    buffer = max_new_tokens / 5
    return max(-1.0, min(0.0, (max_new_tokens - buffer - len(completion_ids)) / buffer))


def _share_alike(text: str, wanted: str) -> float:
    longest = max(len(text), len(wanted))
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / longest if longest else 1.0


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


def find_reader(rewards: Sequence[Any]) -> Callable[[str, Grade | None, str], str | None]:
    """Return a function of a completion, its grade and the text that ended it, which returns the answer in the
    completion; None where it has none.

    The answer is what a reward logged as ``answer``, or else what the first of Podium's rewards that compares with the
    row's answer reads.
    """
    reader = next((_READERS[name] for name in rewards if isinstance(name, str) and name in _READERS), None)

    def read(text: str, grade: Grade | None, stop_text: str) -> str | None:
        logged = [] if grade is None else _list_logged(grade)
        return logged[0] if logged else reader(close_box(text, stop_text)) if reader is not None else None

    return read


def reads_answers(rewards: Sequence[Any], grades: Sequence[Grade | None]) -> bool:
    """Whether completions have answers that can be counted."""
    named = any(isinstance(name, str) and name in _READERS for name in rewards)
    return named or any(_list_logged(grade) for grade in grades if grade is not None)


def _list_logged(grade: Grade) -> list[str]:
    """The answers that rewards logged, a number as text too."""
    values: Mapping[str, float | str] = {**grade.parts, **grade.extra}
    return [str(value).strip() for name, value in values.items() if name.rpartition(".")[2] == "answer"]
