"""Rewards for the shape of completions."""

from __future__ import annotations

from typing import Any

import pytest

from podium.errors import ConfigError
from podium.rewards import Grader, RewardConfig, resolve_reward
from podium_rewards import check_choice, check_format, limit_length, limit_repetition


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
    ],
)
def test_the_format_is_matched_as_a_whole(text: str, score: float) -> None:
    assert resolve_reward("format")(text) == score


def test_a_pattern_of_ones_own() -> None:
    assert check_format(r"\d+")("42") == 1.0
    with pytest.raises(ConfigError, match="no regular expression"):
        check_format("(")


@pytest.mark.parametrize(
    ("count", "score"), [(0, -1.0), (5, -0.5), (10, 0.0), (20, 0.0), (25, -0.5), (30, -1.0), (99, -1.0)]
)
def test_length_falls_beyond_its_limits(count: int, score: float) -> None:
    assert limit_length(20, least=10, over=10)("", {}, [0] * count) == pytest.approx(score)


@pytest.mark.parametrize(("over", "scores"), [(None, [-1.0, -0.9, -0.5, 0.0, 0.0]), (5, [-1.0, -1.0, -1.0, 0.0, 0.0])])
def test_without_a_most_shorter_completions_alone_lose(over: int | None, scores: list[float]) -> None:
    score = limit_length(least=50, over=over)
    assert [score("", [0] * count) for count in (0, 5, 25, 50, 2000)] == pytest.approx(scores)
    with Grader(RewardConfig(time_limit_s=60), reward=score, columns=["answer"], in_script=True) as grader:
        assert grader.extras == {"completion_ids"}


def test_length_of_a_column_and_of_the_most_tokens() -> None:
    assert limit_length("wanted", over=4)("", {"wanted": 3}, [0] * 5) == -0.5
    assert limit_length()("", [0] * 5, 20) == -0.25
    for options in ({"most": 3, "least": 4}, {"most": -1}, {"least": -1}, {"over": 0}):
        with pytest.raises(ConfigError, match="limit_length"):
            limit_length(**options)


@pytest.mark.parametrize(
    ("text", "score"), [("a b a b a b", -0.6), ("a b c", 0.0), ("a", 0.0), ("", 0.0), ("A a a a", -2 / 3)]
)
def test_repetition_is_the_share_of_runs_that_came_before(text: str, score: float) -> None:
    assert limit_repetition(words=2)(text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"),
        (" (b)", None),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        ("I think A is wrong. The answer is (C).", "C"),
        ("Answer: A\nNo, the answer is D", "D"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{C}}", "C"),
        ("A cat is an animal", None),
        ("the answer is a cat", None),
        ("", None),
        ("Z", None),
    ],
)
def test_the_choice_of_a_completion(text: str, choice: str | None) -> None:
    found = check_choice("ABCD")(text, {"answer": choice or "A"})
    assert found == ({"score": 1.0, "answer": choice} if choice else {"score": 0.0})


@pytest.mark.parametrize(
    ("text", "stop_text", "score"),
    [
        (r"is it A? \boxed{B", "}", 1.0),
        ("B", "}", 1.0),
        (r"the answer is B, no: \boxed{C", "}", 0.0),
        ("B", "\nA", 1.0),
    ],
)
def test_a_choice_may_be_ended_by_a_stop_text(text: str, stop_text: str, score: float) -> None:
    assert check_choice()(text, {"answer": "B"}, stop_text)["score"] == score


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "B"},
        {"answer": "(B)"},
        {"answer": 1},
        {"answer": "Rome", "choices": ["Paris", "Rome"]},
        {"answer": "Rome", "choices": {"text": ["Paris", "Rome"], "label": ["A", "B"]}},
    ],
)
def test_the_answer_of_a_row_is_a_letter_a_number_or_a_text(row: Any) -> None:
    assert check_choice()("B", row)["score"] == 1.0


def test_an_answer_that_is_no_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="is no letter"):
        check_choice()("B", {"answer": "Rome"})


def test_they_have_weights_and_parts_as_any_reward() -> None:
    config = RewardConfig(name=("choice", "repetition", "format"), weights=(1.0, 0.5, 0.25), time_limit_s=60)
    with Grader(config, columns=["answer"], in_script=True) as grader:
        (grade,) = grader.grade(["B"], [{"answer": "B"}])
    assert grade.score == 1.0
    assert dict(grade.parts) == {"choice": 1.0, "repetition": 0.0, "format": 0.0}
    assert grade.extra["choice.answer"] == "B"


def test_length_gets_what_it_asks_for() -> None:
    with Grader(RewardConfig(name="length", time_limit_s=60), columns=["answer"], in_script=True) as grader:
        assert grader.extras == {"completion_ids", "max_new_tokens"}
