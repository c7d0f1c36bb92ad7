"""A held-out evaluation of a run, the intervals of its figures, and the gain from one evaluation to another.

An item is a held-out prompt or example. Its scores have weights where an item stands for several tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from podium.runs.run_json import Amount, Count, Figure
from podium.spelling import write_count
from podium.telemetry import Sample
from podium.telemetry.held_out import ACCURACY, LOSS, PERPLEXITY, TOKEN_ACCURACY, Metric

_Z95: Final = 1.959964  # of the normal distribution, two-sided
_FEWEST_CHANGES: Final = 6  # of fewer, all may have one sign by chance: 2 / 2^5 is more than 5 %

Interval = tuple[float, float]
Scores = Sequence[Figure | None]
"""The score of each item; None where it has none, such as a part that the reward left out."""


def _check_figures(figures: Mapping[str, float]) -> Mapping[str, float]:
    for name, value in figures.items():
        if Metric(name).is_share and not 0 <= value <= 1:
            raise ValueError(f"{name} = {value}: expected a share from 0 to 1")
    return figures


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One held-out evaluation of one set, after ``step`` steps.

    Attributes:
        items: Number of prompts or examples.
        figures: The mean of each kind of score, by the names of :mod:`podium.telemetry.held_out`.
        scores: The scores of each kind, by the same names; empty where only the figures were kept.
        weights: The weight of each item in the means; () where all count the same.
        set_name: The name of the evaluation set; "" for one without a name.
        samples: The first completions.
    """

    step: Count
    items: Count
    figures: Annotated[Mapping[str, Figure], AfterValidator(_check_figures)]
    scores: Mapping[str, Scores] = field(default_factory=dict[str, "Scores"])
    weights: tuple[Amount, ...] = ()
    set_name: str = ""
    samples: tuple[Sample, ...] = ()

    @staticmethod
    def of(
        step: int,
        items: int,
        scores: Mapping[str, Scores],
        *,
        weights: Sequence[float] = (),
        set_name: str = "",
        samples: tuple[Sample, ...] = (),
    ) -> Evaluation:
        """Make an evaluation from the scores of its items. A kind of score that no item has is left out."""
        scores = {name: column for name, column in scores.items() if any(score is not None for score in column)}
        figures = {name: _mean(*_present(column, weights)) for name, column in scores.items()}
        if LOSS in figures and TOKEN_ACCURACY in figures:  # a loss of tokens, not of preferences
            figures[PERPLEXITY] = _exp(figures[LOSS])
        return Evaluation(
            step=step,
            items=items,
            figures=figures,
            scores=scores,
            weights=tuple(weights),
            set_name=set_name,
            samples=samples,
        )

    @staticmethod
    def of_rows(rows: Sequence[Mapping[str, Any]], name: str, set_name: str) -> list[Evaluation]:
        """Return the evaluations of a set in rows of metrics.jsonl, with the figure ``name`` alone. Rows without this
        number are left out."""
        suffix = f"/{set_name}" if set_name else ""
        return [
            Evaluation(
                step=row["step"], items=row[f"items{suffix}"], figures={name: row[name + suffix]}, set_name=set_name
            )
            for row in rows
            if isinstance(row.get(name + suffix), int | float)
            and isinstance(row.get(f"items{suffix}"), int)
            and (set_name or not any(key.startswith("items/") for key in row))  # else of a set with a name
        ]

    def value(self, name: str) -> float:
        """Return a figure; NaN where the evaluation has none of this name."""
        return self.figures.get(name, math.nan)

    def count(self, name: str) -> int:
        """Return the number of items with this kind of score."""
        return sum(score is not None for score in self.scores[name]) if name in self.scores else self.items

    @property
    def without_scores(self) -> Evaluation:
        """This evaluation with its figures alone."""
        return replace(self, scores={}, weights=())

    def counts_items(self, name: str) -> bool:
        """Whether a figure is the share of the items that have the score 1, where the others have 0. An accuracy whose
        scores were not kept counts as one."""
        if name not in self.scores or self.weights:
            return name == ACCURACY
        return Metric(name).is_share and all(score in (0, 1, None) for score in self.scores[name])

    def interval(self, name: str) -> Interval | None:
        """Return the 95 % interval of a figure; None where it is not known.

        For a share of items it is the score interval (Wilson 1927, eq. 3), which is right also near 0 and 1. For a
        mean, such as that of the shares of each item's completions, it is Student's.
        """
        if name not in self.figures:
            return None
        if self.counts_items(name):
            return accuracy_interval(self.figures[name], self.count(name))
        if name == PERPLEXITY:
            bounds = self.interval(LOSS)
            return None if bounds is None else (_exp(bounds[0]), _exp(bounds[1]))
        if name not in self.scores:
            return None
        error = _error(*_present(self.scores[name], self.weights))
        if error is None or not math.isfinite(error):
            return None
        is_share = Metric(name).is_share
        least = 0.0 if is_share or name == LOSS else -math.inf  # beyond which no value lies
        most = 1.0 if is_share else math.inf
        return max(least, self.figures[name] - error), min(most, self.figures[name] + error)


def sets_of(row: Mapping[str, Any]) -> set[str]:
    """Return the names of the sets in the row of an evaluation: "" for a set without a name, beside which there are no
    others."""
    return {key.removeprefix("items/") for key in row if key.startswith("items/")} or {""}


def check_scores(evaluation: Evaluation) -> Evaluation:
    """Return an evaluation that was read, whose figures are the means of its scores. Raises ValueError for another."""
    items, weights = evaluation.items, evaluation.weights
    if len(weights) not in (0, items):
        raise ValueError(f"weights has {write_count(len(weights), 'number')} for {write_count(items, 'item')}")
    if evaluation.scores and (names := evaluation.scores.keys() ^ (evaluation.figures.keys() - {PERPLEXITY})):
        raise ValueError(f"{min(names)} is in only one of figures and scores")
    for name, column in evaluation.scores.items():
        if len(column) != items:
            raise ValueError(f"scores.{name} has {write_count(len(column), 'score')} for {write_count(items, 'item')}")
        scores, by_item = _present(column, weights)
        figure, mean = evaluation.figures[name], _mean(scores, by_item) if sum(by_item) else math.nan
        if not (math.isclose(figure, mean, rel_tol=1e-6, abs_tol=1e-9) or math.isnan(figure + mean)):
            raise ValueError(f"figures.{name} = {figure}, and the mean of its scores is {mean}")
    return evaluation


@dataclass(frozen=True)
class Gain:
    """How much a figure rose from one evaluation to another.

    Attributes:
        value: The difference.
        interval: Its 95 % interval; None where it is not known.
        may_be_chance: Whether the interval holds 0, or fewer than six items changed.
        changed: Number of items whose score changed, or that only one of the evaluations has a score of; None where the
            evaluations are not of the same items.
    """

    value: float
    interval: Interval | None
    may_be_chance: bool
    changed: int | None = None


def gain(before: Evaluation, after: Evaluation, name: str) -> Gain:
    """Return the gain in a figure. Evaluations of the same items are compared item by item.

    The interval of a gain in a share of items, such as the accuracy, is that of paired proportions (Newcombe 1998,
    Statistics in Medicine 17:2635, method 10), and Student's of the items' differences for a mean. Evaluations of other
    items are compared as independent samples (Newcombe 1998, Statistics in Medicine 17:873, method 10; or the means'
    intervals joined).
    """
    value = after.value(name) - before.value(name)
    old, new = before.scores.get(name, ()), after.scores.get(name, ())
    is_paired = len(old) == len(new) > 0 and tuple(before.weights) == tuple(after.weights)
    pairs = [*zip(old, new, strict=True)] if is_paired else []
    if all(earlier is None or later is None for earlier, later in pairs):
        pairs = []
    changed = sum(earlier != later for earlier, later in pairs) if pairs else None
    if not math.isfinite(value):
        bounds = None
    elif before.counts_items(name) and after.counts_items(name):
        both = [(bool(old), bool(new)) for old, new in pairs if old is not None and new is not None]
        bounds = _newcombe(before, after, name, _correlation(both))
    elif pairs:
        error = _paired_error(old, new, after.weights)
        bounds = None if error is None else (value - error, value + error)
    else:
        bounds = _join(before.interval(name), after.interval(name), value)
    is_apart = bounds is not None and not bounds[0] <= 0 <= bounds[1]
    return Gain(value, bounds, not is_apart or (changed or _FEWEST_CHANGES) < _FEWEST_CHANGES, changed)


def accuracy_interval(share: float, items: int) -> Interval:
    """Return the 95 % score interval of a share of ``items`` (Wilson 1927, eq. 3)."""
    n, p, z2 = items, share, _Z95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # Rounding must not push a bound past the share itself, where the two meet at 0 and at 1.
    return min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # more is no float


def _present(scores: Scores, weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """The scores that there are, and their weights."""
    pairs = [
        (score, weight)
        for score, weight in zip(scores, weights or [1.0] * len(scores), strict=True)
        if score is not None
    ]
    return [score for score, _ in pairs], [weight for _, weight in pairs]


def _mean(scores: Sequence[float], weights: Sequence[float]) -> float:
    return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)


def _error(scores: Sequence[float], weights: Sequence[float]) -> float | None:
    """Half the 95 % interval of a weighted mean, whose items were drawn with their weights; None for fewer than two."""
    if (count := len(scores)) < 2:
        return None
    mean = _mean(scores, weights)
    squares = sum((weight * (score - mean)) ** 2 for score, weight in zip(scores, weights, strict=True))
    return _student95(count - 1) * math.sqrt(squares * count / (count - 1)) / sum(weights)


def _paired_error(old: Scores, new: Scores, weights: Sequence[float]) -> float | None:
    """Half the 95 % interval of the difference of two weighted means over the same items; None for fewer than two.

    What each item adds to the difference varies by its own share in the two means. Where all items have both scores,
    this is :func:`_error` of the items' differences.
    """
    scores = old, new
    parts = [_present(column, weights) for column in scores]
    means, totals = [_mean(*part) for part in parts], [sum(of_items) for _, of_items in parts]
    added = [
        weight * sum(
            sign * (score - mean) / total
            for sign, score, mean, total in zip((-1, 1), pair, means, totals, strict=True)
            if score is not None
        )
        for pair, weight in zip(zip(*scores, strict=True), weights or [1.0] * len(old), strict=True)
        if any(score is not None for score in pair)
    ]  # fmt: skip
    if (count := len(added)) < 2:
        return None
    return _student95(count - 1) * math.sqrt(sum(amount * amount for amount in added) * count / (count - 1))


def _student95(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution (Abramowitz and Stegun 1964, eq. 26.7.5).

    It is right to 1 % from three degrees of freedom on, and to 6 % for one.
    """
    z = _Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _newcombe(before: Evaluation, after: Evaluation, name: str, correlation: float) -> Interval:
    """The interval of a difference of shares from the score intervals of both."""
    p_1, p_2 = before.figures[name], after.figures[name]
    (low_1, high_1), (low_2, high_2) = (
        accuracy_interval(share, evaluation.count(name)) for share, evaluation in ((p_1, before), (p_2, after))
    )

    def join(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    return p_2 - p_1 - join(p_2 - low_2, high_1 - p_1), p_2 - p_1 + join(high_2 - p_2, p_1 - low_1)


def _correlation(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Newcombe's correlation of paired outcomes, corrected towards 0; 0 for none."""
    both, first, second = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True)))
    neither = len(pairs) - both - first - second
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    if not product:
        return 0.0
    excess = both * neither - first * second
    return (max(0.0, excess - len(pairs) / 2) if excess > 0 else excess) / math.sqrt(product)


def _join(one: Interval | None, other: Interval | None, value: float) -> Interval | None:
    """The interval of a difference of the means of independent samples."""
    if one is None or other is None:
        return None
    error = math.hypot((one[1] - one[0]) / 2, (other[1] - other[0]) / 2)
    return value - error, value + error
