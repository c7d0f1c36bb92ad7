"""Mathematical equality of final answers by math-verify, to which ``1/2``, ``0.5`` and ``\\frac{1}{2}`` are equal."""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.extras import install_command
from podium.rewards.columns import reads
from podium.rewards.number_parsing import MARK
from podium.rewards.stop_texts import close_match
from podium.rewards.text import answer_of

try:
    import math_verify
except ImportError as error:
    raise ConfigError(
        f"reward.name = 'math' needs math-verify, which cannot be imported ({error}): "
        f"{install_command('math', package='podium-rewards')}"
    ) from error

__all__ = ["mathematics"]

_LATEX_MARKS: Final = ("$", "\\boxed", "\\(", "\\[")

_FORMULA: Final = re.compile(
    r"\\boxed\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
    r"|\$+[^$]+\$+|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]",
    re.DOTALL,
)

_NO_LIMIT: Final = cast(int, None)  # math-verify takes None for no limit, though it annotates an int

# math-verify guards itself with signal.alarm, which works in a main thread only and not below C code. The guards are
# off here, because a grading process is killed from outside. math-verify would warn of that twice for each item.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@lru_cache(maxsize=4096)  # the completions of a group share their answer
def _gold(answer: str) -> tuple[Any, ...]:
    if MARK in answer:
        answer = answer.rpartition(MARK)[2].strip()
    if not any(mark in answer for mark in _LATEX_MARKS):
        answer = f"\\boxed{{{answer}}}"
    return tuple(math_verify.parse(answer, parsing_timeout=_NO_LIMIT))


@reads("answer", least=0.0)
def mathematics(completion: str, row: Mapping[str, Any], stop_text: str = "") -> float:
    """Return 1 if the completion's last formula equals the answer, else 0. Boxed formulas come before others.

    The answer may be plain (``1/2``), LaTeX, boxed, or end in ``#### 72``. The comparison may take 0.1 s and more, and
    may never end: run it through a :class:`~podium.rewards.Grader`.
    """
    gold = _gold(answer_of(row))
    if not gold:
        raise ValueError(f"math-verify finds no mathematics in the answer {answer_of(row)[:80]!r}; repair the row")
    parsed = math_verify.parse(close_match(_FORMULA, completion, stop_text), parsing_timeout=_NO_LIMIT)
    return float(math_verify.verify(list(gold), parsed, timeout_seconds=None))
