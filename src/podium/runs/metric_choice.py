"""The choice of the metric that judges a run, from its settings and its first evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import ConfigError
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.config import InferenceConfig, check_goal
from podium.runs.evaluation import Evaluation
from podium.spelling import write_count
from podium.telemetry import Note, emit
from podium.telemetry.held_out import ACCURACY, MAJ, PASS, REWARD, REWARD_MARGIN, Metric, count_draws
from podium.telemetry.metrics import REWARD_PART_PREFIX


def choose_metric(config: InferenceConfig, evaluation: Evaluation) -> tuple[Metric, bool]:
    """Return the metric that judges a run, and whether ``evaluation`` decides that for all later ones.

    With ``eval.metric: auto`` the metric is the loss where evaluations score answers, and of preferences the accuracy.
    Otherwise the metric is the
    accuracy if it is known, and else the reward. Where all scores are 0, the next evaluation decides: a reward with
    partial credit begins like that too, and both figures are 0 meanwhile.

    Raises:
        ConfigError: The evaluation has no such figure, or ``eval.stop_at`` cannot be reached.
    """
    figure, _ = config.judged_by
    decides = True
    if figure == "auto" and config.scores_answers:
        figure = config.usual_figure
    elif figure == "auto":
        figure = ACCURACY if ACCURACY in evaluation.figures else REWARD
        decides = config.reward.correct_at is not None or any(evaluation.scores.get(REWARD, ()))
    if figure not in evaluation.figures:
        raise ConfigError(_explain_missing(config, figure, evaluation))
    check_goal(metric := Metric(figure), config.eval.stop_at)
    return metric, decides


def judge_resumed(
    state: TrainerState, config: InferenceConfig, rows: Sequence[Mapping[str, Any]], *, is_sum: bool
) -> TrainerState:
    """Return the state of a resumed run, as the metric of its settings judges it from now on.

    ``rows`` are the evaluations in metrics.jsonl. A run whose evaluations had an accuracy although each score is the
    sum of several rewards (``is_sum``), which is no verdict, is judged by the reward.
    """
    figure, set_name = config.judged_by
    mistaken = is_sum and config.reward.correct_at is None and counts_correct(state.metric)
    if figure == "auto" and mistaken and not config.scores_answers:
        figure = REWARD
        emit(
            Note(
                f"the run was judged by {Metric(state.metric).title}, and a score that is the sum of several rewards "
                "does not say whether a completion is correct: the run is judged by the reward from now on. "
                "reward.correct_at or eval.metric = reward_parts/NAME would choose another figure"
            )
        )
    return state.judged_by(figure, set_name, rows)


def knows_accuracy(config: InferenceConfig, metric: str, step: int) -> bool:
    """Whether completions count as correct or not although some of their scores are neither 0 nor 1.

    ``metric`` is the name of the metric that was chosen; "" before that. An evaluation before the first step must show
    that ``eval.metric: accuracy`` has a meaning. A later one takes 1 as the lowest score of a correct completion.
    """
    wanted = step > 0 and counts_correct(config.judged_by[0])
    return config.reward.correct_at is not None or counts_correct(metric) or wanted


def counts_correct(figure: str) -> bool:
    """Whether a figure is one of completions that are correct or not."""
    return figure == ACCURACY or count_draws(figure) > 0


def _explain_missing(config: InferenceConfig, figure: str, evaluation: Evaluation) -> str:
    subject, draws = f"eval.metric = {config.eval.metric!r}", count_draws(figure)
    if REWARD not in evaluation.figures and (figure == REWARD or counts_correct(figure)):
        return f"{subject}, and the reward returned None for all {write_count(evaluation.items, 'held-out completion')}"
    if draws and ACCURACY in evaluation.figures and f"{PASS}{draws}" not in evaluation.figures:
        return (
            f"{subject}, and no held-out prompt has {write_count(draws, 'completion')} with a score, because the "
            "reward returned None for others: return a score for each, or set eval.metric to accuracy"
        )
    if figure.startswith(MAJ) and ACCURACY in evaluation.figures:
        return (
            f"{subject}, and the reward does not say which answer a completion gives: return a mapping with the answer "
            'beside the score, as in {"score": 1.0, "answer": "42"}'
        )
    if counts_correct(figure):
        scores = [score for score in evaluation.scores.get(REWARD, ()) if score not in (0, 1)]
        if not scores:
            return (
                f"{subject}, and held-out scores are sums of several rewards, which do not say whether a completion is "
                "correct: set reward.correct_at to the lowest score of a correct completion, or eval.metric to reward"
            )
        return (
            f"{subject}, and {len(scores)} of {write_count(evaluation.items, 'held-out score')} "
            f"{'is' if len(scores) == 1 else 'are'} neither 0 nor 1, such as {scores[0]:g}: set reward.correct_at to "
            "the lowest score of a correct completion, or eval.metric to reward"
        )
    if figure == REWARD_MARGIN:
        return f"{subject}, and the held-out answers have labels, not margins: set eval.metric to accuracy or loss"
    names = ", ".join(name for name in evaluation.figures if name.startswith(REWARD_PART_PREFIX))
    return f"{subject}, and the evaluation has no such part: the reward returned {names or 'no parts'}"
