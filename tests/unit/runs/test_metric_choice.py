"""The metric that judges a run: after a resume, and where it has no meaning."""

from __future__ import annotations

from typing import Any

import pytest

from podium.config import build_config
from podium.errors import ConfigError
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.config import GRPOConfig
from podium.runs.evaluation import Evaluation
from podium.runs.metric_choice import choose_metric, judge_resumed
from tests.unit.rollout.tasks.test_encode import notes_of


def judged_by_accuracy() -> TrainerState:
    """The state of a run whose first evaluation had scores of 0 and 1, and a later one the better reward."""
    state = TrainerState(metric="accuracy")
    for step, (correct, score) in enumerate(((1.0, 0.2), (0.0, 0.9))):
        scores = {"accuracy": [correct] * 2, "reward_mean": [score] * 2}
        state = state.after(Evaluation.of(step, 2, scores), state.judge)
    return state


def test_a_run_that_counted_sums_as_verdicts_goes_on_by_the_reward() -> None:
    state = judged_by_accuracy()
    rows: list[dict[str, Any]] = [{"step": step, "items": 2, "reward_mean": 0.2 + 0.7 * step} for step in range(2)]
    (note,) = notes_of(lambda: judge_resumed(state, GRPOConfig(), rows, is_sum=True))
    assert note.startswith("the run was judged by accuracy, and a score that is the sum of several rewards does not")
    resumed = judge_resumed(state, GRPOConfig(), rows, is_sum=True)
    assert (resumed.metric, resumed.best and resumed.best.step, resumed.waited) == ("reward_mean", 1, 0)


@pytest.mark.parametrize(
    ("values", "is_sum"),
    [({}, False), ({"reward": {"correct_at": 1.0}}, True), ({"eval": {"metric": "accuracy"}}, False)],
)
def test_another_run_goes_on_by_the_metric_that_was_chosen(values: dict[str, Any], is_sum: bool) -> None:
    state = judged_by_accuracy()
    config = build_config(GRPOConfig, values)
    assert judge_resumed(state, config, (), is_sum=is_sum) == state
    assert notes_of(lambda: judge_resumed(state, config, (), is_sum=is_sum)) == []


def test_scores_of_0_and_1_that_are_sums_have_no_accuracy() -> None:
    evaluation = Evaluation.of(0, 2, {"reward_mean": [1.0, 0.0]})
    config = build_config(GRPOConfig, {"eval": {"metric": "accuracy"}})
    with pytest.raises(ConfigError, match=r"held-out scores are sums of several rewards, .*set reward\.correct_at"):
        choose_metric(config, evaluation)
    assert choose_metric(GRPOConfig(), evaluation)[0].name == "reward_mean"
