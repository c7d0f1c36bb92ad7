"""Rewards for the shape of a completion: its length, its format, the choice that it makes, and what it repeats."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.rewards.columns import reads
from podium.rewards.number_parsing import boxed_text, close_box

__all__ = ["CHOICE", "FORMAT", "LENGTH", "REPETITION"]
__all__ += ["check_choice", "check_format", "limit_length", "limit_repetition"]

_THOUGHTS: Final = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
_LETTER: Final = r"\(?\b([A-Z])\b\)?(?!['\u2019])"  # not the article of "A's"
_STATED: Final = re.compile(
    rf"(?:\banswer\b(?:\s+is)?|\bchoice\b(?:\s+is)?|\boption\b(?:\s+is)?)\s*[:=]?\s*[*_`]*{_LETTER}", re.IGNORECASE
)
_ALONE: Final = re.compile(rf"[\s*_`]*{_LETTER}[\s.:*_`]*(?:(?<=[:).*])[ ].*)?", re.DOTALL)
_WORD: Final = re.compile(r"\S+")

Score = Callable[..., Any]


def check_format(pattern: str = _THOUGHTS) -> Score:
    """Return a reward of 1 for a completion that ``pattern`` matches as a whole, where "." is any character, else of 0.

    A text that ended the completion belongs to it. The default is ``<think>…</think> <answer>…</answer>``, each tag
    once (DeepSeek-AI 2025, arXiv:2501.12948, table 1).

    Raises:
        ConfigError: The pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"check_format({pattern!r}): this is no regular expression: {error}") from None

    @reads(least=0.0)
    def match(completion: str, stop_text: str = "") -> float:
        return float(compiled.fullmatch(completion + stop_text) is not None)

    return match


def limit_length(most: int | str | None = None, least: int = 0, over: int | None = None) -> Score:
    """Return a reward of 0 for completions of ``least`` to ``most`` tokens, which falls beyond to -1 over ``over``
    tokens.

    Args:
        most: A number of tokens, or the name of a column of the data that has it for each prompt. Without it and
            ``least``, the reward falls from 0 to -1 over all of ``sampling.max_new_tokens``.
        least: Shorter completions lose in the same way; without ``most``, they alone.
        over: Tokens over which the reward falls; by default as many as ``most`` (or ``least``, if that is more).

    Raises:
        ConfigError: A number is below 0, or ``least`` is more than ``most``.
    """
    if least < 0 or (isinstance(most, int) and most < max(least, 0)) or (over is not None and over < 1):
        raise ConfigError(
            f"limit_length(most={most}, least={least}, over={over}): expected 0 <= least <= most, over >= 1"
        )

    def fall(count: int, limit: int | None) -> float:
        beyond = max(0 if limit is None else count - limit, least - count, 0)
        return -min(1.0, beyond / (over or max(limit or 0, least, 1)))

    if most is None and least:

        @reads(least=-1.0)
        def measure_least(completion: str, completion_ids: Sequence[int]) -> float:
            return fall(len(completion_ids), None)

        return measure_least

    if most is None:

        @reads(least=-1.0)
        def measure(completion: str, completion_ids: Sequence[int], max_new_tokens: int) -> float:
            return fall(len(completion_ids), 0) if over else -min(1.0, len(completion_ids) / max_new_tokens)

        return measure

    @reads(*((most,) if isinstance(most, str) else ()), least=-1.0)
    def compare(completion: str, row: Mapping[str, Any], completion_ids: Sequence[int]) -> float:
        limit = row[most] if isinstance(most, str) else most
        return fall(len(completion_ids), int(limit))

    return compare


def limit_repetition(words: int = 3, most: float = 1.0) -> Score:
    """Return a penalty from 0 to ``-most``: the share of a completion's runs of ``words`` words that came before.

    Yeo et al. 2025, arXiv:2502.03373, section 4.3 (the share, as in Open-R1's code, not their flag).

    >>> limit_repetition(words=2)("a b a b a b")
    -0.6

    Raises:
        ConfigError: A number is not above 0.
    """
    if words < 1 or most <= 0:
        raise ConfigError(f"limit_repetition(words={words}, most={most}): expected numbers above 0")

    @reads(least=-most)
    def measure(completion: str) -> float:
        texts = _WORD.findall(completion.lower())
        runs = [tuple(texts[start : start + words]) for start in range(len(texts) - words + 1)]
        return -most * (1 - len({*runs}) / len(runs)) if runs else 0.0

    return measure


def check_choice(letters: str = "ABCDEFGHIJ") -> Score:
    r"""Return a reward of 1 for a completion that chooses the letter of the row's answer, else of 0.

    The choice is the letter in the last ``\boxed{}``, after the last "answer is", "Answer:", "option" or "choice", or
    the completion's only content, as in ``B``, ``(B)`` and ``B) Paris``. A row's answer is a letter, the number of a
    choice, counted from 0, or the text of one of the row's ``choices``.

    Raises:
        ConfigError: The letters are not capital letters.
    """
    if not letters or not (letters.isascii() and letters.isalpha() and letters.isupper()):
        raise ConfigError(f"check_choice({letters!r}): expected capital letters, such as ABCD")

    @reads("answer", least=0.0)
    def choose(completion: str, row: Mapping[str, Any], stop_text: str = "") -> Mapping[str, Any]:
        right, choice = _read_answer(row, letters), _read_choice(close_box(completion, stop_text))
        choice = choice if choice is not None and choice in letters else None
        return {"score": float(choice == right), **({"answer": choice} if choice else {})}

    return choose


def _read_choice(completion: str) -> str | None:
    boxed = boxed_text(completion)
    if boxed is not None and (match := _ALONE.fullmatch(boxed.replace(r"\text", "").strip("{} "))):
        return match[1]
    stated = [match[1] for match in _STATED.finditer(completion) if match[1].isupper()]
    if stated:
        return stated[-1]
    match = _ALONE.fullmatch(completion)
    return match[1] if match else None


def _read_answer(row: Mapping[str, Any], letters: str) -> str:
    answer, choices = row["answer"], row.get("choices")
    if isinstance(answer, list) and len(cast("list[Any]", answer)) == 1:
        answer = answer[0]
    if isinstance(choices, Mapping):  # as ARC has them: {"text": [...], "label": [...]}
        choices = choices.get("text")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    text = str(answer).strip()
    if isinstance(choices, Sequence) and not isinstance(choices, str) and text in [*map(str, choices)]:
        return letters[[*map(str, choices)].index(text)]
    match = _ALONE.fullmatch(text)
    if match is None or match[1] not in letters:
        raise ValueError(
            f"the answer {text[:60]!r} is no letter of {letters}, no number of a choice, and no text of the row's "
            "choices: set data.answer_column"
        )
    return match[1]


FORMAT: Final = check_format()
LENGTH: Final = limit_length()
CHOICE: Final = check_choice()
REPETITION: Final = limit_repetition()
