"""The statistics of an evaluation, against published values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from podium.runs.evaluation import Evaluation, Gain, gain


def found(correct: int, items: int) -> Evaluation:
    """An evaluation of which only the figures are known, so that it is compared as an independent sample."""
    return Evaluation(step=0, items=items, figures={"accuracy": correct / items})


def scored(name: str, scores: Sequence[float | None], weights: Sequence[float] = (), step: int = 0) -> Evaluation:
    return Evaluation.of(step, len(scores), {name: scores}, weights=weights)


def interval_of(result: Gain) -> tuple[float, float]:
    assert result.interval is not None
    return result.interval


@pytest.mark.parametrize(
    ("correct", "items", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_a_share_is_the_published_one(correct: int, items: int, low: float, high: float) -> None:
    assert found(correct, items).interval("accuracy") == pytest.approx((low, high), abs=5e-5)


def test_the_interval_holds_the_share_at_both_ends() -> None:
    for items in (1, 7, 500):
        for correct in (0, items):
            low, high = found(correct, items).interval("accuracy") or (0, 0)
            assert 0 <= low <= correct / items <= high <= 1


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10: p1 - p2.
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_gain_is_the_published_one(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    assert interval_of(gain(found(*other), found(*one), "accuracy")) == pytest.approx((low, high), abs=5e-5)


def pairs_of(both: int, before: int, after: int, neither: int) -> tuple[Evaluation, Evaluation]:
    """Two evaluations of the same prompts, by how many were correct in both, in one of them, and in neither."""
    counts = {(1.0, 1.0): both, (1.0, 0.0): before, (0.0, 1.0): after, (0.0, 0.0): neither}
    pairs = [pair for pair, count in counts.items() for _ in range(count)]
    return scored("accuracy", [one for one, _ in pairs]), scored("accuracy", [other for _, other in pairs], step=9)


def test_the_gain_of_paired_proportions_is_that_of_the_formula() -> None:
    """Newcombe 1998, Statistics in Medicine 17:2635, method 10, computed here in another way from its definition."""
    both, before, after, neither = 36, 2, 12, 10
    first, second = pairs_of(both, before, after, neither)
    (low_1, high_1), (low_2, high_2) = (one.interval("accuracy") or (0, 0) for one in (first, second))
    p_1, p_2 = first.figures["accuracy"], second.figures["accuracy"]
    margins = (both + before) * (after + neither) * (both + after) * (before + neither)
    phi = (both * neither - before * after - 30) / math.sqrt(margins)
    low = (p_2 - low_2) ** 2 - 2 * phi * (p_2 - low_2) * (high_1 - p_1) + (high_1 - p_1) ** 2
    high = (high_2 - p_2) ** 2 - 2 * phi * (high_2 - p_2) * (p_1 - low_1) + (p_1 - low_1) ** 2
    expected = (p_2 - p_1 - math.sqrt(low), p_2 - p_1 + math.sqrt(high))
    result = gain(first, second, "accuracy")
    assert interval_of(result) == pytest.approx(expected)
    assert not result.may_be_chance
    independent = interval_of(gain(first.without_scores, second, "accuracy"))
    assert independent[0] < expected[0] < expected[1] < independent[1], "what prompts have in common is no chance"


def test_the_mean_of_scores_and_its_interval_are_students() -> None:
    evaluation = scored("reward_mean", [0.0, 0.5, 1.0, None, 0.25, 0.75])
    assert evaluation.figures == {"reward_mean": 0.5}
    # the quantile of four degrees of freedom is 2.776
    assert evaluation.interval("reward_mean") == pytest.approx(
        (0.5 - 2.776 * 0.176777, 0.5 + 2.776 * 0.176777), abs=1e-3
    )
    assert scored("reward_mean", [0.5]).interval("reward_mean") is None


def test_a_loss_of_preferences_has_no_perplexity() -> None:
    labels = {"accuracy": [1.0, 0.5], "loss": [0.4, 0.5], "reward_margin": [None, None]}  # answers without pairs
    assert Evaluation.of(0, 2, labels).figures == {"accuracy": 0.75, "loss": 0.45}


def test_a_loss_is_over_tokens_and_its_interval_over_examples() -> None:
    evaluation = Evaluation.of(0, 2, {"loss": [1.0, 2.0], "token_accuracy": [1.0, 0.0]}, weights=[30, 10])
    assert evaluation.figures == {"loss": 1.25, "token_accuracy": 0.75, "perplexity": math.exp(1.25)}
    low, high = evaluation.interval("token_accuracy") or (0, 0)
    assert (low, high) == (0.0, 1.0), "two examples say little, and no share lies beyond 0 and 1"
    doubled = Evaluation.of(0, 4, {"loss": [1.0, 2.0] * 2}, weights=[15, 5] * 2)
    assert doubled.figures["loss"] == 1.25


def test_gains_of_the_same_items_are_told_from_chance_where_their_spread_would_hide_it() -> None:
    draw = random.Random(0)
    before = [draw.random() for _ in range(50)]
    after = [score + 0.05 + 0.01 * draw.random() for score in before]
    paired = gain(scored("reward_mean", before), scored("reward_mean", after), "reward_mean")
    assert not paired.may_be_chance
    assert interval_of(paired) == pytest.approx((0.055, 0.055), abs=0.003)
    apart = gain(scored("reward_mean", before).without_scores, scored("reward_mean", after), "reward_mean")
    assert apart.interval is None
    assert apart.may_be_chance
    others = gain(scored("reward_mean", before[1:]), scored("reward_mean", after), "reward_mean")
    assert others.may_be_chance, "other prompts are compared by the spread of both"


def test_so_few_changes_that_their_signs_may_be_chance_are_called_so() -> None:
    for changed in (5, 6):
        before = scored("loss", [1.0] * changed + [0.5])
        result = gain(before, scored("loss", [0.8] * changed + [0.5]), "loss")
        assert result.value < 0
        assert result.may_be_chance == (changed == 5)


@pytest.mark.parametrize("name", ["accuracy", "reward_mean"])
def test_intervals_of_gains_hold_the_true_gain_19_times_of_20(name: str) -> None:
    draw, held = random.Random(1), 0
    for _ in range(300):
        easy = [draw.random() for _ in range(60)]
        pairs = [
            (float(draw.random() < one), float(draw.random() < 0.8 * one + 0.1))
            if name == "accuracy"
            else (one, 0.8 * one + 0.1 + draw.gauss(0, 0.1))
            for one in easy
        ]
        low, high = interval_of(gain(scored(name, [p for p, _ in pairs]), scored(name, [p for _, p in pairs]), name))
        held += low <= 0.0 <= high
    assert 0.92 <= held / 300 <= 0.99


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e5])
def test_a_loss_beyond_all_bounds_has_no_interval_or_gain_that_is_sure(loss: float) -> None:
    broken = Evaluation.of(0, 2, {"loss": [loss, 1.0], "token_accuracy": [0.5, 0.5]})
    assert broken.figures["perplexity"] > 1e300 or math.isnan(broken.figures["perplexity"])
    for name in broken.figures:
        bounds = broken.interval(name)
        assert bounds is None or not any(map(math.isnan, bounds))
    assert gain(scored("loss", [2.0, 1.0]), broken, "loss").may_be_chance


def test_an_item_that_only_one_evaluation_has_a_score_of_makes_no_sure_gain() -> None:
    """Nothing changed but that the reward scores one more item. The spread of both means counts, item by item."""
    before = [0.0, 1.0, 0.25, 0.75, 0.5, 0.5, 0.0, 1.0, 0.5]
    result = gain(scored("reward_mean", [*before, None]), scored("reward_mean", [*before, 1.0]), "reward_mean")
    assert result.value == pytest.approx(0.05)
    assert (result.changed, result.may_be_chance) == (1, True)
    old_mean, new_mean = 4.5 / 9, 5.5 / 10
    added = [(score - new_mean) / 10 - (score - old_mean) / 9 for score in before] + [(1.0 - new_mean) / 10]
    error = 2.262 * math.sqrt(sum(amount**2 for amount in added) * 10 / 9)  # nine degrees of freedom
    assert interval_of(result) == pytest.approx((0.05 - error, 0.05 + error), abs=1e-4)
    nothing = gain(scored("reward_mean", [0.5, None]), scored("reward_mean", [None, 1.0]), "reward_mean")
    assert nothing.changed is None and nothing.may_be_chance


def test_the_gain_of_weighted_means_is_students_of_the_differences() -> None:
    old, new, weights = [1.0, 2.0, 4.0], [0.5, 2.5, 1.0], [3.0, 1.0, 2.0]
    result = gain(scored("loss", old, weights), scored("loss", new, weights), "loss")
    differences = [later - earlier for earlier, later in zip(old, new, strict=True)]
    mean = sum(weight * value for weight, value in zip(weights, differences, strict=True)) / 6
    squares = sum((weight * (value - mean)) ** 2 for weight, value in zip(weights, differences, strict=True))
    error = 4.303 * math.sqrt(squares * 3 / 2) / 6  # two degrees of freedom
    assert interval_of(result) == pytest.approx((mean - error, mean + error), rel=0.02)


@pytest.mark.parametrize("name", ["pass@4", "maj@4", "sources/math/accuracy", "cut_off"])
def test_every_share_of_items_has_the_interval_of_a_share(name: str) -> None:
    """Of pass@k where k completions are drawn, each item is solved or not. Nine of nine is no certainty."""
    solved, same = scored(name, [1.0] * 9), scored("accuracy", [1.0] * 9)
    assert solved.interval(name) == same.interval("accuracy") == pytest.approx((0.7009, 1.0), abs=1e-4)
    old, new = [1.0, 0.0, 0.0, 0.0] * 5, [1.0, 1.0, 0.0, 1.0] * 5
    assert gain(scored(name, old), scored(name, new), name) == gain(
        scored("accuracy", old), scored("accuracy", new), "accuracy"
    )
    assert scored(name, [1.0, 0.5, 0.0]).counts_items(name) is False
    assert scored("token_accuracy", [1.0, 0.0], [3.0, 1.0]).counts_items("token_accuracy") is False, "tokens count"


def test_a_figure_that_an_evaluation_lacks_gains_nothing() -> None:
    result = gain(scored("loss", [1.0, 2.0]), scored("reward_mean", [1.0, 2.0]), "loss")
    assert math.isnan(result.value)
    assert result.may_be_chance
