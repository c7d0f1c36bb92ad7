"""What PPOTrainer computes itself."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from podium.algorithms import AlgorithmConfig, explained_variance, value_moments
from podium.algorithms.config import Aggregation
from podium.algorithms.metrics import EFFECTIVE_SIZE, PartialMetrics, TokenMean
from podium.errors import PodiumError
from podium.telemetry import Note, metrics, subscribe
from podium.trainer import GRPOConfig
from podium.trainer.ppo import join_updates
from podium.trainer.step_watch import StepWatch
from podium.training import OptimConfig
from podium.workers import Critic, Policy
from tests.integration.training import tiny, train
from tests.unit.workers.tiny import TINY, recorded


def test_updates_are_averaged_and_the_largest_ratio_kept() -> None:
    joined = join_updates(
        [{metrics.LOSS: 1.0, metrics.RATIO_MAX: 3.0}, {metrics.LOSS: 2.0, metrics.RATIO_MAX: 2.0}, {"v": 1}]
    )
    assert joined == {metrics.LOSS: 1.5, metrics.RATIO_MAX: 3.0, "v": 1.0}


def test_a_maximum_of_a_loss_is_that_of_all_updates_and_nan_is_not_hidden() -> None:
    """Maxima of a user's own loss, and the peak of memory, were averaged over the optimizer steps of a step."""
    parts = [PartialMetrics(torch.ones(()), {}, {"mine/widest": torch.tensor(value)}) for value in (4.0, 1.0)]
    joined = join_updates([pickle.loads(pickle.dumps(part.means())) for part in parts])
    assert joined == {"mine/widest": 4.0}
    assert math.isnan(join_updates([{metrics.RATIO_MAX: 1.0}, {metrics.RATIO_MAX: math.nan}])[metrics.RATIO_MAX])


@pytest.mark.parametrize("kind", [Policy, Critic])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_metrics_of_tokens_are_the_same_however_a_step_is_cut_into_updates(
    kind: type[Policy | Critic], aggregation: Aggregation
) -> None:
    """A mean over few tokens counted as much as one over many."""
    left_out = torch.tensor([True, False, False, False, False, False, True, False])
    batch = recorded(max_new_tokens=7.0).drop("loss_weights").with_columns({"left_out": left_out})
    algorithm = AlgorithmConfig(aggregation=aggregation, kl_in="loss", correction="truncate")
    worker = kind(TINY, OptimConfig(lr=0.0), algorithm=algorithm)
    in_one = worker.update(batch)
    parts = [batch.take(rows) for rows in ([7, 0, 3], [1, 5], [2, 4, 6])]
    joined = join_updates([pickle.loads(pickle.dumps(worker.update(part))) for part in parts])
    of_updates = {metrics.LOSS, metrics.GRAD_NORM, metrics.VALUE_LOSS, EFFECTIVE_SIZE}
    compared = {name for name in in_one if name not in {*of_updates, "value/grad_norm"}}
    assert compared >= (
        {metrics.ENTROPY, metrics.KL, metrics.CLIP_FRACTION}
        if kind is Policy
        else {"value/clip_fraction", metrics.EXPLAINED_VARIANCE}
    )
    for name in compared:
        assert joined[name] == pytest.approx(in_one[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    "algorithm",
    [{"correction": "bypass", "epochs": 3}, {"loss": "dppo_tv", "minibatches": 2}, {"loss": "dro", "epochs": 2}],
    ids=str,
)
def test_the_mismatch_is_that_of_the_policy_before_it_moves_also_without_old_logprobs(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """Each optimizer step moves the policy far. The generator had the weights from before the first one."""
    config = tiny(GRPOConfig, tmp_path, algorithm=algorithm, eval={"items": 0}, optim={"lr": 0.03}, run={"steps": 1})
    rows = [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]
    (step,) = (row for row in rows if row["kind"] == "step")
    assert step["policy/approx_kl"] > 1e-3
    assert max(step[name] for name in ("mismatch/mean", "mismatch/max", "mismatch/kl")) < 1e-4


def test_an_update_without_tokens_does_not_count_unless_there_is_no_other() -> None:
    """As where all completions of a minibatch are left out."""
    empty, full = TokenMean.over(0.0, {"a": math.nan}), TokenMean.over(10.0, {"a": 5.0})
    assert join_updates([empty, full]) == {"a": 5.0}
    assert join_updates([TokenMean.over(3.0, {"a": 0.1})]) == {"a": 0.1}, "3 * 0.1 / 3 is another number"
    assert join_updates([TokenMean.over(0.0, {"a": 0.0})] * 2) == {"a": 0.0}


def test_the_explained_variance_of_a_step_is_that_of_all_its_tokens() -> None:
    """Each update's returns are all equal, so that it explains nothing of them; the critic knows all returns."""
    updates = [
        TokenMean.over(
            3.0, {metrics.EXPLAINED_VARIANCE: explained_variance(value_moments(returns_N, returns_N, ones_N))}
        )
        for returns_N, ones_N in ((torch.full((3,), level), torch.full((3,), 1 / 3)) for level in (0.0, 5.0))
    ]
    assert [update[metrics.EXPLAINED_VARIANCE] for update in updates] == [0.0, 0.0]
    assert join_updates([pickle.loads(pickle.dumps(update)) for update in updates]) == {metrics.EXPLAINED_VARIANCE: 1.0}
    assert join_updates([{metrics.EXPLAINED_VARIANCE: 0.5}, {metrics.EXPLAINED_VARIANCE: 0.0}]) == {
        metrics.EXPLAINED_VARIANCE: 0.25
    }, "of a critic of the user's own"


def test_steps_before_a_resume_count_among_those_in_which_nothing_is_learned() -> None:
    watch, notes = StepWatch(GRPOConfig()), list[str]()
    flat = {metrics.FLAT_GROUPS: 1.0, metrics.REWARD_STD: 0.0}
    watch.go_on([{metrics.FLAT_GROUPS: 0.5}, flat, flat, flat])
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        watch.check_signal(flat, 5)
        assert not notes
        watch.check_signal(flat, 6)
    finally:
        unsubscribe()
    assert "nothing is learned: for 5 steps, up to step 6" in notes[0]


def test_a_limit_of_the_mismatch_below_what_is_noted_ends_the_run() -> None:
    config = GRPOConfig(algorithm=AlgorithmConfig(max_mismatch=0.01))
    watch = StepWatch(config)
    watch.check_mismatch({metrics.MISMATCH_MEAN: 0.005}, 2)
    with pytest.raises(PodiumError, match=r"step 3: .* differ by 0\.02 nats .*max_mismatch = 0\.01"):
        watch.check_mismatch({metrics.MISMATCH_MEAN: 0.02}, 3)


@pytest.mark.parametrize(
    ("advantage", "share", "noted"),
    [("grpo", 0.0, True), ("gdpo", 0.0, False), ("grpo_turns", 0.0, False), ("gdpo", 1.0, True)],
)
def test_equal_rewards_are_noted_where_whole_rewards_are_compared(advantage: str, share: float, noted: bool) -> None:
    """Parts of equal sums, or turns of sessions, may differ."""
    watch, notes = StepWatch(GRPOConfig(algorithm=AlgorithmConfig(advantage=advantage))), list[str]()
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        for step in range(1, 6):
            watch.check_signal({metrics.FLAT_GROUPS: share, metrics.REWARD_STD: 0.0}, step)
    finally:
        unsubscribe()
    assert bool(notes) == noted


@pytest.mark.parametrize(("advantage", "noted"), [("grpo", True), ("reinforce_pp", False), ("remax", False)])
def test_groups_without_a_difference_are_noted_where_groups_are_compared(advantage: str, noted: bool) -> None:
    """With one completion a prompt every group is flat, and an estimator without groups learns all the same."""
    watch, said = StepWatch(GRPOConfig(algorithm=AlgorithmConfig(advantage=advantage))), list[str]()
    unsubscribe = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    try:
        for step in range(1, 6):
            watch.check_signal({metrics.FLAT_GROUPS: 1.0, metrics.REWARD_STD: 0.5}, step)
    finally:
        unsubscribe()
    assert bool(said) == noted
