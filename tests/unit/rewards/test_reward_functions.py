"""Several rewards: their weighted sum, their parts, and what it means that one of them returns None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.config import load_config
from podium.errors import ConfigError, RewardError
from podium.rewards import Grade, Grader, RewardConfig
from podium.rewards.call_forms import Item
from podium.rewards.reward_functions import Result, RewardFunctions, call_rewards
from podium.telemetry import Event, Note, subscribe

ROW = {"prompt": "2 - 1 =", "answer": "1"}


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def short(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    return {"score": 1.0 / len(completion), "letters": float(len(completion))}


def polite(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if "please" not in text else 2.0 for text in completions]


def never(completion: str) -> None:
    return None


def fails(completion: str) -> float:
    raise ValueError("no such unit")


def result_of(rewards: Sequence[Any], completion: str = "1", weights: Sequence[float] = ()) -> Result:
    return call_rewards(RewardFunctions(rewards, weights, ["prompt", "answer"]), Item(completion, ROW))


def test_the_score_is_the_weighted_sum_and_parts_have_the_functions_names() -> None:
    result = result_of([right, short, polite], "please", [2.0, 6.0, 0.5])
    assert result.score == 6.0 / 6 + 1.0
    assert dict(result.parts) == {"right": 0.0, "short": 1 / 6, "short.letters": 6.0, "polite": 2.0}
    assert result_of([right, short]).score == 2.0
    assert result_of([right, short], weights=[1.0, 0.0]).score == 1.0
    assert result_of([right], weights=[3.0]) == Result(3.0)
    assert dict(result_of([short], weights=[3.0]).parts) == {"letters": 1.0}


def test_a_function_called_score_is_a_part_and_the_score_of_a_mapping_is_none() -> None:
    def score(completion: str, answer: str) -> float:
        return float(completion == answer)

    assert dict(result_of([score, short], "1").parts) == {"score": 1.0, "short": 1.0, "short.letters": 1.0}
    assert dict(result_of([score, score], "1").parts) == {"score": 1.0, "score_2": 1.0}
    assert dict(result_of([score], "1").parts) == {}


def test_podiums_rewards_mix_with_functions() -> None:
    result = result_of(["gsm8k", "exact", right, "tests/unit/rewards/test_reward_functions.py:short"])
    assert result.score == 4.0
    assert {*result.parts} == {"gsm8k", "exact", "right", "short", "short.letters"}


def test_equal_names_get_a_number_and_that_is_noted() -> None:
    functions = RewardFunctions([right, right, lambda completion: 1.0, lambda completion: 2.0])
    assert [form.name for form in functions.forms] == ["right", "right_2", "lambda", "lambda_2"]
    (note,) = functions.notes
    assert note.endswith("in metrics and completions the later ones are called right_2, lambda_2")


def test_none_from_one_leaves_its_term_out_and_none_from_all_leaves_the_completion_out() -> None:
    result = result_of([right, polite])
    assert (result.score, dict(result.parts), result.problem) == (1.0, {"right": 1.0}, "")
    result = result_of([never, polite])
    assert (result.score, dict(result.parts), result.problem) == (None, {}, "")
    with Grader(RewardConfig(processes=1, correct_at=1.0), reward=[never, polite]) as grader:
        first, second = grader.grade(["1", "please"], [ROW] * 2)
    assert first.abstained
    assert math.isnan(first.score)
    assert not first.correct
    assert second == Grade(2.0, {"polite": 2.0}, True)


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([right, fails], "failed in fails, which raised ValueError: no such unit"),
        ([fails], "raised ValueError: no such unit"),
        ([right, lambda completion: "good"], "failed in lambda, which returned 'good' (str)"),
        ([right, lambda completion: {"part": 1.0}], 'failed in lambda, which returned a mapping without "score"'),
        ([lambda completion: 3e38, lambda completions: [3e38]], "has the score 6e+38 with the parts"),
    ],
)
def test_a_failure_names_the_function(rewards: Sequence[Any], problem: str) -> None:
    assert result_of(rewards).problem.startswith(problem)


def test_a_failure_of_one_is_the_completions() -> None:
    message = r"test_reward_functions:right, .*test_reward_functions:fails failed in fails, which raised Val"
    grader = Grader(RewardConfig(processes=1), reward=[right, fails])
    with grader, pytest.raises(RewardError, match=message):
        grader.grade(["1"], [ROW])


def test_a_list_is_read_from_yaml_and_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("name: [gsm8k, 'a.py:format']\n")
    config = load_config(RewardConfig, path)
    assert config.names == ("gsm8k", "a.py:format")
    config = load_config(RewardConfig, None, ["--name", "[gsm8k, a.py:format]"])
    assert config.names == ("gsm8k", "a.py:format")
    assert load_config(RewardConfig, None, ["--name", "gsm8k"]).names == ("gsm8k",)
    for name in ("", " ", "[]", "[gsm8k, '']"):
        with pytest.raises(ConfigError, match="expected text or a list; each item is text, and neither"):
            load_config(RewardConfig, None, ["--name", name])


def test_weights_are_settings_and_each_reward_has_one(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def short(completion):\n    return 1.0\ndef long(completion, row):\n    return 2.0\n")
    names = (f"{path}:short", f"{path}:long")
    with Grader(RewardConfig(name=names, weights=(0.5, 0.25), processes=1)) as grader:
        (grade,) = grader.grade(["x"], [ROW])
    assert (grade.score, dict(grade.parts)) == (1.0, {"short": 1.0, "long": 2.0})
    with pytest.raises(ConfigError, match="one weight for each reward function, and the number of functions is 2"):
        Grader(RewardConfig(name=names, weights=(0.5,), processes=1))
    assert load_config(RewardConfig, None, ["--name", "[a, b]", "--weights", "[1, 0.2]"]).weights == (1.0, 0.2)


@pytest.mark.parametrize("form", ["(completion, row)", "(completions, **kwargs)", "(solution_str, ground_truth)"])
def test_text_in_a_mapping_is_kept_in_every_form_and_its_numbers_are_finite(form: str) -> None:
    def score_of(value: object) -> Result:
        scope: dict[str, Any] = {"value": [value] if "completions" in form else value}
        exec(f"def score{form}: return value", scope)
        return call_rewards(RewardFunctions([scope["score"]], columns=["answer"]), Item("1", ROW))

    result = score_of({"score": True, "acc": 0.5, "pred": "[INVALID]", "why": None, "steps": [1, "two"]})
    assert (result.score, result.parts) == (1.0, {"acc": 0.5})
    assert result.extra == {"pred": "[INVALID]", "steps": "[1, 'two']"}
    assert score_of({"score": 1.0, "pred": "x" * 20_000}).extra["pred"] == "x" * 10_000 + " … (20,000 characters)"
    for bad in (math.nan, math.inf, 10**400, 1j):
        assert f"({type(bad).__name__}) as part 'acc'" in score_of({"score": 1.0, "acc": bad}).problem
    for bad in ("1", [1.0], math.nan):
        assert "as part 'score'" in score_of({"score": bad}).problem


def test_texts_of_several_functions_have_their_names() -> None:
    def first(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 1.0, "pred": "one"}

    def second(completion: str) -> dict[str, Any]:
        return {"score": 1.0, "pred": "two"}

    assert result_of([first, second]).extra == {"first.pred": "one", "second.pred": "two"}


def test_an_exception_without_a_text_and_a_list_of_the_wrong_length_are_told_as_they_are() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    def silent(completion: str) -> float:
        raise Silent

    assert result_of([silent]).problem == "raised Silent: its text cannot be read: __str__ raises RuntimeError"
    assert result_of([lambda completion: Silent()]).problem == "returned an object of Silent"
    assert result_of([lambda completions: [1.0, 2.0]]).problem.startswith("returned 2 scores for a list of one")


def test_what_trls_functions_log_becomes_parts_and_texts() -> None:
    def accuracy(completions: list[str], answer: list[str], log_extra: Any, log_metric: Any = None) -> list[float]:
        scores = [float(text == right) for text, right in zip(completions, answer, strict=True)]
        log_extra("extracted", completions)
        log_metric("accuracy", sum(scores) / len(scores))
        return scores

    with Grader(RewardConfig(processes=1, correct_at=1.0), reward=[accuracy, right]) as grader:
        (grade,) = grader.grade(["1"], [ROW])
    assert grade == Grade(2.0, {"accuracy": 1.0, "right": 1.0}, True, extra={"extracted": "1"})
    several = [lambda completions, log_metric, n=n: (log_metric("n", n), [1.0])[1] for n in (1, 0)]
    assert result_of(several).parts["n"] == 0.5  # as in TRL, a metric is the mean of all that is logged
    assert result_of(several).logged == {"n"}
    assert result_of([lambda completion, log_metric: (log_metric("n", 1), {"score": 1.0, "n": 2.0})[1]]).logged == set()


def test_a_note_says_once_which_functions_get_lists_of_one() -> None:
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    unsubscribe = subscribe(hear)
    try:
        with Grader(RewardConfig(processes=1), reward=[polite, right]) as grader:
            grader.grade(["1"], [ROW])
            grader.grade(["1"], [ROW])
    finally:
        unsubscribe()
    (note,) = notes
    assert note.startswith(
        "the reward polite takes lists of completions. Podium calls it with lists of one, so it cannot compare"
    )


@pytest.mark.parametrize("in_script", [True, False])
def test_the_sum_of_several_rewards_says_nothing_of_what_is_correct(in_script: bool) -> None:
    """A wrong answer in the right format has the score 1, as a right one without the format."""

    def verdicts(
        weights: tuple[float, ...] = (), correct_at: float | None = None, on_error: Any = "raise"
    ) -> list[Any]:
        config = RewardConfig(weights=weights, correct_at=correct_at, on_error=on_error, processes=1)
        second = fails if on_error == "score" else polite
        with Grader(config, reward=[right, second], in_script=in_script) as grader:
            assert grader.is_sum == (weights != (1.0, 0.0))
            return [grade.correct for grade in grader.grade(["1", "2"], [ROW] * 2)]

    assert verdicts() == verdicts((1.0, -1.0)) == [None, None], "also where the other one abstains"
    assert verdicts((1.0, 0.0)) == [True, False], "the second one is only logged"
    assert verdicts(correct_at=1.0) == [True, False]
    assert verdicts(on_error="score") == [None, None]
    assert verdicts(correct_at=1.0, on_error="score") == verdicts((1.0, 0.0), on_error="score") == [False, False]
