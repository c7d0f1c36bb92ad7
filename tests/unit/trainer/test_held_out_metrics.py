"""The figures of several completions a prompt, against enumeration."""

from __future__ import annotations

import itertools
from collections import Counter
from statistics import fmean

import pytest

from podium.errors import ConfigError
from podium.rewards import Grade, Grader, RewardConfig
from podium.runs.config import GRPOConfig, InferenceConfig
from podium.runs.evaluation import Evaluation
from podium.runs.metric_choice import choose_metric
from podium.telemetry.held_out import Metric
from podium.trainer import build_config
from podium.trainer.held_out_metrics import Sampled, majority, pass_at_k, scores_of


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_the_choices_of_k_that_have_a_correct_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = [*itertools.combinations([True] * c + [False] * (n - c), k)]
            assert pass_at_k(n, c, k) == pytest.approx(fmean(any(choice) for choice in choices), abs=1e-12)


def test_pass_at_k_of_many_completions_is_finite() -> None:
    assert pass_at_k(65536, 1, 32768) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("4455", 0.5),  # a tie counts in part
        ("4555", 0.0),
        ("4456", 1.0),
        ("----", 0.0),  # nobody votes
        ("4---", 1.0),  # those without an answer do not vote
    ],
)
def test_the_most_frequent_answer_counts(answers: str, expected: float) -> None:
    votes = [None if answer == "-" else answer for answer in answers]
    assert majority(votes, [answer == "4" for answer in answers], len(answers)) == expected


def test_blocks_of_k_are_averaged_and_what_is_left_over_is_not_used() -> None:
    assert majority([*"44", *"45", *"55", "4"], [True, True, True, False, False, False, True], 2) == 0.5


def grade(score: float) -> Grade:
    return Grade(score, correct=score >= 1)


def items_of(rows: list[str], right: str = "4") -> list[list[Sampled]]:
    return [[Sampled(grade(float(a == right)), len(row), a == "9", a) for a in row] for row in rows]


def test_figures_are_those_of_all_completions() -> None:
    scores = scores_of(items_of(["4444", "4559", "9999"]), reads_answers=True)
    figures = Evaluation.of(1, 3, scores).figures
    assert figures["accuracy"] == figures["pass@1"] == pytest.approx(5 / 12)
    assert figures["pass@2"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert figures["pass@4"] == pytest.approx(2 / 3)
    assert figures["maj@4"] == pytest.approx(1 / 3)
    assert "maj@1" not in figures
    assert (figures["cut_off"], figures["completion_tokens"]) == (pytest.approx(5 / 12), 4.0)


def test_one_completion_has_the_figures_that_it_had() -> None:
    assert {*scores_of(items_of(["4", "5"]))} == {"accuracy", "reward_mean", "completion_tokens", "cut_off"}


def test_a_part_called_score_has_a_figure_like_any_other() -> None:
    several = Grade(1.2, {"score": 1.0, "format": 0.2}, correct=None)
    scores = scores_of([[Sampled(several, 3)]])
    assert (scores["reward_parts/score"], scores["reward_parts/format"]) == ([1.0], [0.2])


def test_the_k_of_the_metric_is_among_those_that_are_computed() -> None:
    assert {"pass@3", "maj@3"} <= scores_of(items_of(["44556"]), "maj@3", reads_answers=True).keys()


def test_each_source_has_figures_of_its_own() -> None:
    scores = scores_of(items_of(["44", "45", "55"]), sources=["math", "code", "code"])
    figures = Evaluation.of(1, 3, scores).figures
    assert (figures["sources/math/accuracy"], figures["sources/code/accuracy"]) == (1.0, 0.25)
    assert figures["sources/code/pass@2"] == 0.5
    assert Metric("sources/code/pass@2").title == "pass@2 of code"
    assert "sources/math/accuracy" not in scores_of(items_of(["44"]), sources=["math"])


def test_shares_of_completions_have_the_interval_of_a_mean() -> None:
    evaluation = Evaluation.of(1, 3, scores_of(items_of(["4444", "4559", "9999"])))
    low, high = evaluation.interval("accuracy") or (-1.0, -1.0)
    assert 0 <= low <= evaluation.figures["accuracy"] <= high <= 1
    assert not evaluation.counts_items("accuracy")


def test_completions_that_the_reward_left_out_do_not_count_in_the_mean() -> None:
    scores = scores_of([[Sampled(grade(1.0), 3), Sampled(None, 3)], [Sampled(None, 3), Sampled(None, 3)]])
    assert scores["accuracy"] == scores["pass@1"] == [1.0, None]
    assert scores["pass@2"] == [None, None], "of neither item two completions have a verdict"


def test_completions_that_the_reward_left_out_do_not_count_in_pass_at_k_and_maj_at_k() -> None:
    item = [Sampled(grade(1.0), 3, answer="4"), Sampled(None, 3), Sampled(grade(0.0), 3, answer="5")]
    scored = [Sampled(grade(1.0), 3, answer="4")] * 3
    scores = scores_of([item, scored], reads_answers=True)
    assert scores["accuracy"] == scores["pass@1"] == [0.5, 1.0]
    assert (scores["pass@2"], scores["pass@3"]) == ([1.0, 1.0], [None, 1.0])
    assert (scores["maj@2"], scores["maj@3"]) == ([0.5, 1.0], [None, 1.0])


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("gsm8k", "so 6 * 7 = 42.0\n#### 42.0", "42"),
        ("math", r"thus \boxed{ \frac{a}{b} }", r"\frac{a}{b}"),
        ("math", "the answer is 7", "7"),
        ("exact", " yes\n", "yes"),
    ],
)
def test_answers_are_read_as_the_reward_reads_them(name: str, text: str, answer: str) -> None:
    with Grader(RewardConfig(name=name)) as grader:
        assert grader.read_answers([text], [Grade(1.0)]) == [answer]


def test_an_answer_is_read_up_to_the_text_that_ended_it() -> None:
    text = r"the answer is 3, no: \boxed{x"
    with Grader(RewardConfig(name="math")) as grader:
        assert grader.read_answers([text, "4", text], [Grade(1.0)] * 3, ["}", " 5", ""]) == ["x", "4", "3"]


def test_a_reward_says_what_it_read() -> None:
    with Grader(RewardConfig(name="my.py:score")) as grader:
        assert grader.read_answers(["x"], [Grade(1.0, extra={"answer": " 42 "})]) == ["42"]
        assert grader.read_answers(["x"], [Grade(1.0, parts={"score.answer": 42.0})]) == ["42.0"]
        assert grader.read_answers(["x"], [Grade(1.0)]) is None


def test_a_vote_over_answers_that_nobody_reads_is_refused_with_the_remedy() -> None:
    config = build_config(InferenceConfig, {"eval": {"metric": "maj@2", "temperature": {"temperature": 1, "n": 2}}})
    with pytest.raises(ConfigError, match="does not say which answer a completion gives: return a mapping"):
        choose_metric(config, Evaluation.of(0, 1, scores_of(items_of(["45"]), "maj@2")))


@pytest.mark.parametrize("figure", ["pass@2", "maj@2"])
@pytest.mark.parametrize("correct", [[1.0, 0.0], [1.0, 1.0], []])
def test_a_run_cannot_be_judged_by_completions_that_the_reward_left_out(figure: str, correct: list[float]) -> None:
    """The reward scored one completion of each prompt, or none at all."""
    config = build_config(InferenceConfig, {"eval": {"metric": figure, "temperature": {"temperature": 1, "n": 2}}})
    items = [[Sampled(grade(score), 3, answer="4"), Sampled(None, 3)] for score in correct]
    items += [[Sampled(None, 3), Sampled(None, 3)]] * (3 - len(items))
    message = (
        "no held-out prompt has 2 completions with a score, because" if correct else "returned None for all 3 held-out"
    )
    with pytest.raises(ConfigError, match=message):
        choose_metric(config, Evaluation.of(0, 3, scores_of(items, figure, reads_answers=True)))


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"metric": "pass@8"}, "needs 8 completions"),
        ({"metric": "pass@8", "temperature": {"temperature": 1.0, "n": 4}}, "needs 8 completions"),
        ({"temperature": {"n": 4}}, "n = 4 at temperature 0"),
        ({"temperature": {"samples": 4}}, "eval.temperature.samples"),
        ({"temperature": {}}, "eval.temperature"),
        ({"metric": "pass@0"}, "pass@K"),
        ({"metric": "pass@2", "stop_at": 40, "temperature": {"temperature": 1.0, "n": 2}}, "write 0.4"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(section: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        build_config(GRPOConfig, {"eval": section})


def test_ties_are_counted_as_an_average_over_random_tie_breaks() -> None:
    answers, correct = [*"4455667"], [a == "5" for a in "4455667"]
    counts = Counter(answers)
    best = [a for a in counts if counts[a] == max(counts.values())]
    assert majority(answers, correct, 7) == pytest.approx(sum(a == "5" for a in best) / len(best))
