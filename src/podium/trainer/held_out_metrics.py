"""The scores of held-out prompts. A prompt may have several completions.

Legend: n completions of a prompt, c of them correct; k of them are looked at.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from podium.rewards import Grade
from podium.runs.evaluation import Scores
from podium.telemetry import metrics
from podium.telemetry.held_out import ACCURACY, CUT_OFF, LENGTH, MAJ, PASS, REWARD, SOURCES, count_draws

_BY_SOURCE: Final = (ACCURACY, REWARD, LENGTH)


@dataclass(frozen=True)
class Sampled:
    """A completion of a held-out prompt.

    Attributes:
        grade: Its grade; None where the reward left it out.
        length: Number of its tokens; None where nothing was sampled, as in a session that failed.
        is_cut_off: Whether it ended by length.
        answer: The answer that was read in it; None where there is none, and where nobody reads answers.
    """

    grade: Grade | None
    length: int | None = None
    is_cut_off: bool = False
    answer: str | None = None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the estimate, without bias, that one of k completions is correct, where c of n are: 1 - C(n-c, k)/C(n, k).

    Chen et al. 2021, arXiv:2107.03374, equation 1, in the form of a product that they give as code.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 3, 2), pass_at_k(4, 0, 4)
    (0.5, 1.0, 0.0)
    """
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return how often the most frequent answer of k completions is correct (Wang et al. 2022, arXiv:2203.11171).

    The completions are cut into blocks of k, whose mean is returned; what is left over is not used. A completion
    without an answer does not vote. Of equally frequent answers each counts in part.

    >>> majority(["4", "4", "5", None], [True, True, False, False], 4)
    1.0
    >>> majority(["4", "5", "4", "4"], [True, False, True, True], 2)
    0.75
    """
    blocks = [range(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return fmean(_vote([answers[row] for row in block], [correct[row] for row in block]) for block in blocks)


def _vote(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    verdicts: dict[str, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            verdicts.setdefault(answer, []).append(is_correct)
    most = max(map(len, verdicts.values()), default=0)
    return fmean(fmean(votes) for votes in verdicts.values() if len(votes) == most) if most else 0.0


def scores_of(
    items: Sequence[Sequence[Sampled]], figure: str = "", sources: Sequence[str] = (), *, reads_answers: bool = False
) -> dict[str, Scores]:
    """Return the scores of items, each with n completions, by the names of their figures.

    A score is the mean over the completions that the reward scored. An item of which it left out all has None. There is
    no accuracy, and no figure that counts correct completions, where a grade is no verdict.

    Args:
        figure: The figure that judges the run, whose k is one of those of pass@k and maj@k.
        sources: The source of each item, where the data have several.
        reads_answers: Whether answers were read, so that they can be counted.
    """
    grades = [[sample.grade for sample in item if sample.grade is not None] for item in items]
    every = [grade for item in grades for grade in item]
    scores: dict[str, Scores] = {}
    if all(grade.correct is not None for grade in every):
        scores[ACCURACY] = [_mean([float(bool(grade.correct)) for grade in item]) for item in grades]
        scores |= _count_correct(items, figure, reads_answers=reads_answers)
    scores[REWARD] = [_mean([grade.score for grade in item]) for item in grades]
    for name in dict.fromkeys(name for grade in every for name in grade.parts):
        parts = [[grade.parts[name] for grade in item if name in grade.parts] for item in grades]
        scores[metrics.REWARD_PART_PREFIX + name] = [_mean(values) for values in parts]
    sampled = [[sample for sample in item if sample.length is not None] for item in items]
    scores[LENGTH] = [_mean([float(sample.length or 0) for sample in item]) for item in sampled]
    scores[CUT_OFF] = [_mean([float(sample.is_cut_off) for sample in item]) for item in sampled]
    return scores | _split(scores, sources)


def _count_correct(items: Sequence[Sequence[Sampled]], figure: str, *, reads_answers: bool) -> dict[str, Scores]:
    """pass@k and maj@k for powers of two, the number of completions, and the k of ``figure``. An item of which the
    reward scored fewer than k completions has neither."""
    count, wanted = max(map(len, items), default=1), count_draws(figure)
    items = [[sample for sample in item if sample.grade is not None] for item in items]
    if count < 2 and not wanted:
        return {}
    powers = [2**power for power in range(count.bit_length())]
    counts: list[int] = sorted({*powers, count, wanted or count})
    correct = [[bool(sample.grade and sample.grade.correct) for sample in item] for item in items]
    scores: dict[str, Scores] = {}
    for k in counts:
        scores[f"{PASS}{k}"] = [pass_at_k(len(item), sum(item), k) if len(item) >= k else None for item in correct]
    for k in counts if reads_answers else ():
        if k > 1 or figure == f"{MAJ}1":
            scores[f"{MAJ}{k}"] = [
                majority([sample.answer for sample in item], verdicts, k) if len(item) >= k else None
                for item, verdicts in zip(items, correct, strict=True)
            ]
    return scores


def _split(scores: Mapping[str, Scores], sources: Sequence[str]) -> dict[str, Scores]:
    """The scores of each of several sources; items of the others have None."""
    names = dict.fromkeys(filter(None, sources))
    if len(names) < 2:
        return {}
    return {
        f"{SOURCES}{name}/{figure}": [
            score if source == name else None for score, source in zip(column, sources, strict=True)
        ]
        for name in names
        for figure, column in scores.items()
        if figure in _BY_SOURCE or figure.startswith((PASS, MAJ))
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
