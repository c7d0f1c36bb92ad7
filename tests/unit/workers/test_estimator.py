"""The estimator: whole batches by reference; and texts beside tokens."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

import podium
from podium.algorithms import AdvantageInputs, AdvantageOutputs, AlgorithmConfig, Declaration
from podium.algorithms.config import Aggregation
from podium.data import Batch, Jagged, TensorRef, completion_texts, fields, sampled_tokens
from podium.data.sampled_text import decode_sampled, text_column
from podium.errors import EndpointError
from podium.models import char_tokenizer
from podium.telemetry import metrics
from podium.training import OptimConfig
from podium.workers import Estimator, Policy
from podium.workers.estimator import Trajectories
from podium.workers.learner import LEFT_OUT
from tests.unit.workers.tiny import TINY, recorded


def rollouts() -> Batch:
    """Two prompts, two completions each, of 1, 2, 2 and 3 tokens after prompts of 1 and 2."""
    tokens = Jagged.from_rows([torch.tensor(row) for row in ([5, 6], [5, 7, 8], [1, 2, 3, 4], [1, 2, 9, 9, 9])])
    mask = [torch.arange(n) >= p for n, p in zip(tokens.lengths.tolist(), [1, 1, 2, 2], strict=True)]
    return Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: Jagged.from_rows(mask),
            fields.GROUP: torch.tensor([0, 0, 1, 1]),
            fields.REWARDS: torch.tensor([1.0, 0.0, 0.5, 0.5]),
        }
    )


def test_advantages_stay_with_the_worker_and_are_those_of_the_whole_batch() -> None:
    config = AlgorithmConfig(advantage="grpo", normalize_advantage=False)
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(config), cluster.pool([1]))
        found = estimator.advantages(rollouts())
        assert isinstance(found.jagged(fields.ADVANTAGES).data, TensorRef)
        rows = [row.tolist() for row in found.fetch().jagged(fields.ADVANTAGES).unbind()]
    assert rows == [[0.0, 0.5], [0.0, -0.5, -0.5], [0.0] * 4, [0.0] * 5]


def test_the_kl_counts_in_the_reward_where_it_is_asked_for() -> None:
    batch = rollouts()
    tokens = batch.jagged(fields.TOKENS)
    batch = batch.with_columns(
        {fields.OLD_LOGPROBS: tokens.like(torch.full((14,), -1.0)), fields.REF_LOGPROBS: tokens.like(torch.zeros(14))}
    )
    config = AlgorithmConfig(
        advantage="reinforce_pp", normalize_advantage=False, kl_in="reward", kl_coef=1.0, kl_estimator="k1"
    )
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(config), cluster.pool([1]))
        found = estimator.advantages(batch, 0.5).fetch().jagged(fields.ADVANTAGES)
    assert found.row(0).tolist() == [0.0, 1.5]  # the score, and half of KL = -1
    assert found.row(3).tolist() == [0.0, 0.0, 2.0, 1.5, 1.0]


@Declaration(columns=("entropy", "rollout_logprobs"), data=("source",))
def everything(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Uses all that an estimator may be given: entropies at masked tokens of rows that ended by themselves."""
    assert inputs.entropy_N is not None and inputs.truncated_B is not None
    assert inputs.old_logprobs_N is None  # not declared
    assert inputs.rollout_logprobs_N is not None
    scale_B = torch.tensor([{"easy": 1.0, "hard": 2.0}[source] for source in inputs.data["source"]])
    per_row_B = torch.where(inputs.truncated_B, 0.0, scale_B * inputs.parts_B["length"])
    return AdvantageOutputs(advantages_N=inputs.spread(per_row_B) * inputs.entropy_N)


def test_an_estimator_is_given_what_it_declares() -> None:
    batch = rollouts()
    tokens = batch.jagged(fields.TOKENS)
    batch = batch.with_columns(
        {
            fields.FINISH_REASON: ["stop", "length", "stop", "stop"],
            fields.PART + "length": torch.tensor([1.0, 2.0, 3.0, 4.0]),
            fields.DATA + "source": ["easy", "easy", "hard", "easy"],
            fields.ENTROPY: tokens.like(torch.full((14,), 0.5)),
            fields.ROLLOUT_LOGPROBS: tokens.like(torch.zeros(14)),
        }
    )
    with podium.connect("inline") as cluster:
        estimator = cluster.start(
            Estimator.bind(AlgorithmConfig(advantage=f"{__name__}:everything")), cluster.pool([1])
        )
        found = estimator.advantages(batch).fetch().jagged(fields.ADVANTAGES)
        with pytest.raises(EndpointError, match="no column 'entropy'"):
            estimator.advantages(batch.drop(fields.ENTROPY))
    rows = [row.tolist() for row in found.unbind()]
    assert rows == [[0.0, 0.5], [0.0] * 3, [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0, 2.0]]


def test_what_an_advantage_returns_is_checked_and_the_function_named() -> None:
    config = AlgorithmConfig(advantage=f"{__name__}:of_a_wrong_shape")
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(config), cluster.pool([1]))
        with pytest.raises(EndpointError, match="of_a_wrong_shape' returned int; expected AdvantageOutputs"):
            estimator.advantages(rollouts())


def of_a_wrong_shape(inputs: object, config: object) -> int:
    return 3


def test_figures_of_rewards_and_lengths_and_the_mismatch_of_sampled_tokens_only() -> None:
    batch = rollouts()
    tokens, mask = batch.jagged(fields.TOKENS), batch.jagged(fields.LOSS_MASK).values
    generator = torch.where(mask, torch.tensor(-1.0), torch.tensor(-50.0))
    trainer = torch.where(mask, torch.tensor(-1.5), torch.tensor(0.0))
    trainer[-1] = -3.0
    columns = {fields.OLD_LOGPROBS: tokens.like(trainer), fields.ROLLOUT_LOGPROBS: tokens.like(generator)}
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(AlgorithmConfig()), cluster.pool([1]))
        assert estimator.describe(batch) == {
            metrics.REWARD_MEAN: 0.5,
            metrics.REWARD_STD: pytest.approx(math.sqrt(0.125)),
            metrics.FLAT_GROUPS: 0.5,
            metrics.LENGTH_MEAN: 2.0,
            metrics.LENGTH_MAX: 3.0,
        }
        figures = estimator.describe(batch.with_columns(columns))
    assert figures[metrics.MISMATCH_MEAN] == pytest.approx((7 * 0.5 + 2.0) / 8)
    assert figures[metrics.MISMATCH_MAX] == 2.0


@pytest.mark.parametrize("left_out", [None, [False, False, True, False]])
def test_the_mismatch_is_that_of_an_update_of_all_rows(left_out: list[bool] | None) -> None:
    """With several optimizer steps it was the mean over all tokens, also of rows that are left out of the loss."""
    batch = recorded((3, 4, 9, 6), max_new_tokens=7.0).drop("loss_weights")
    batch = batch.with_columns({fields.GROUP: torch.tensor([0, 0, 1, 1]), fields.REWARDS: torch.zeros(4)})
    if left_out is not None:
        batch = batch.with_columns({LEFT_OUT: torch.tensor(left_out)})
    for aggregation in get_args(Aggregation):
        config = AlgorithmConfig(aggregation=aggregation)
        with podium.connect("inline") as cluster:
            figures = cluster.start(Estimator.bind(config), cluster.pool([1])).describe(batch)
        updated = Policy(TINY, OptimConfig(), algorithm=config).update(batch)
        for name in (metrics.MISMATCH_MEAN, metrics.MISMATCH_MAX):
            assert figures[name] == pytest.approx(updated[name], rel=1e-5)


def test_the_mismatch_is_measured_where_all_rows_are_left_out() -> None:
    batch = recorded((3, 4), max_new_tokens=7.0).with_columns(
        {fields.GROUP: torch.zeros(2, dtype=torch.int64), fields.REWARDS: torch.zeros(2)}
    )
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(AlgorithmConfig()), cluster.pool([1]))
        all_left_out = estimator.describe(batch.with_columns({LEFT_OUT: torch.ones(2, dtype=torch.bool)}))
        assert all_left_out[metrics.MISMATCH_MEAN] == estimator.describe(batch)[metrics.MISMATCH_MEAN] > 0


def test_sampled_tokens_are_those_of_the_completions() -> None:
    assert [row.tolist() for row in sampled_tokens(rollouts()).unbind()] == [[6], [7, 8], [3, 4], [9, 9, 9]]


@pytest.mark.parametrize("texts", [["a", "", "zwölf 十二", "\udce9"], ["", ""], []])
def test_texts_cross_as_bytes(texts: list[str]) -> None:
    column = text_column(texts)
    assert completion_texts(Batch({fields.TEXT: column}), char_tokenizer("a")) == texts


def test_texts_are_decoded_where_the_generator_wrote_none() -> None:
    tokenizer = char_tokenizer("abcdef")
    assert completion_texts(rollouts(), tokenizer) == decode_sampled(rollouts(), tokenizer) == ["c", "de", "a", "fff"]


def sessions() -> Batch:
    """Three trajectories of one prompt: one of two rows, one of another agent, and one of a single row."""
    tokens = Jagged.from_rows([torch.tensor(row) for row in ([5, 6, 6], [5, 7], [1, 2], [1, 3], [1, 4])])
    mask = [torch.arange(n) >= 1 for n in tokens.lengths.tolist()]
    turns = [[-1, 0, 0], [-1, 1], [-1, 0], [-1, 0], [-1, 0]]
    earned = [[0.0, 0.0, 0.5], [0.0, 0.25], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    return Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: Jagged.from_rows(mask),
            fields.GROUP: torch.zeros(5, dtype=torch.int64),
            fields.REWARDS: torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]),
            fields.TRAJECTORY: torch.tensor([0, 0, 1, 2, 3]),
            fields.AGENT: ["", "", "judge", "", "judge"],
            fields.TURN: Jagged.from_rows([torch.tensor(row) for row in turns]),
            fields.TOKEN_REWARDS: Jagged.from_rows([torch.tensor(row) for row in earned]),
        }
    )


def test_a_trajectory_of_several_rows_is_rewarded_and_compared_once() -> None:
    config = AlgorithmConfig(advantage="grpo", normalize_advantage=False)
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(config), cluster.pool([1]))
        rows = [row.tolist() for row in estimator.advantages(sessions()).fetch().jagged(fields.ADVANTAGES).unbind()]
        figures = estimator.describe(sessions())
    assert rows[0] == [0.0, 0.875, 0.875]  # 1.75 with its turns' rewards, against 0.0 of the other: the mean is 0.875
    assert rows[1] == [0.0, 0.875]
    assert rows[3] == [0.0, -0.875]
    assert (rows[2], rows[4]) == ([0.0, -0.5], [0.0, 0.5])  # another agent's group is its own
    assert figures[metrics.REWARD_MEAN] == pytest.approx((1.75 + 0.0 + 0.0 + 1.0) / 4)
    assert figures[metrics.LENGTH_MEAN] == pytest.approx((3 + 1 + 1 + 1) / 4)
    assert figures[metrics.FLAT_GROUPS] == 0.0


def test_advantages_of_turns_follow_the_rewards_of_turns() -> None:
    config = AlgorithmConfig(advantage="grpo_turns", normalize_advantage=False)
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(config), cluster.pool([1]))
        rows = [row.tolist() for row in estimator.advantages(sessions()).fetch().jagged(fields.ADVANTAGES).unbind()]
    assert rows[0] == [0.0, 0.875, 0.875]
    assert rows[1] == [0.0, 0.0]  # no other trajectory had a second turn


def out_of_order() -> Batch:
    """One trajectory of two rows: the first has the turns 0 and 2, and the second turn 1. Then one of a single row."""
    tokens = Jagged.from_rows([torch.tensor(row) for row in ([5, 6, 9, 7], [1, 2, 3], [4, 5])])
    turns = [[-1, 0, -1, 2], [-1, 1, 1], [-1, 0]]
    return Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: Jagged.from_rows([torch.tensor(row) >= 0 for row in turns]),
            fields.GROUP: torch.zeros(3, dtype=torch.int64),
            fields.REWARDS: torch.tensor([1.0, 1.0, 0.5]),
            fields.TRAJECTORY: torch.tensor([0, 0, 1]),
            fields.AGENT: ["", "", ""],
            fields.FINISH_REASON: ["stop", "length", "stop"],
            fields.TURN: Jagged.from_rows([torch.tensor(row) for row in turns]),
            fields.TOKEN_REWARDS: Jagged.from_rows(
                [torch.tensor(row) for row in ([0.0] * 4, [0.0, 0.0, 8.0], [0.0, 0.0])]
            ),
            fields.VALUES: Jagged.from_rows(
                [torch.tensor(row) for row in ([0.0, 10.0, 0.0, 40.0], [0.0, 20.0, 30.0], [0.0, 0.0])]
            ),
        }
    )


def test_what_was_cut_off_is_left_out_with_all_rows_of_its_trajectory_and_counts_in_its_group() -> None:
    batch = out_of_order().with_columns({fields.GROUP: torch.tensor([0, 0, 0])})
    for reasons, expected in (
        (["length", "stop", "stop"], [True, True, False]),  # the first row has the last turn
        (["stop", "length", "length"], [False, False, True]),
    ):
        rows = batch.with_columns({fields.FINISH_REASON: reasons})
        with podium.connect("inline") as cluster:
            estimators = [
                cluster.start(Estimator.bind(AlgorithmConfig(cut_off=cut_off)), cluster.pool([1]))
                for cut_off in ("learn", "leave_out")
            ]
            learned, left = (estimator.advantages(rows).fetch() for estimator in estimators)
            assert "left_out" not in learned
            assert left.dense("left_out").tolist() == expected
            pairs = ((learned, fields.ADVANTAGES), (left, fields.ADVANTAGES))
            one, other = (columns.jagged(name).values for columns, name in pairs)
            assert torch.equal(one, other) and bool((one != 0).any())
            figures = estimators[1].describe(rows.merge(left))
            assert figures[metrics.LEFT_OUT] == 0.5
            assert metrics.LEFT_OUT not in estimators[0].describe(rows.merge(learned))


def advantages_of(batch: Batch, **algorithm: Any) -> list[list[float]]:
    with podium.connect("inline") as cluster:
        estimator = cluster.start(
            Estimator.bind(AlgorithmConfig(normalize_advantage=False, **algorithm)), cluster.pool([1])
        )
        found = estimator.advantages(batch).fetch()
    assert found.dense(fields.TRAJECTORY_TOKENS).tolist() == [4, 4, 1]
    return [row.tolist() for row in found.jagged(fields.ADVANTAGES).unbind()]


def test_rewards_to_come_follow_time_and_not_the_order_of_rows() -> None:
    rows = advantages_of(out_of_order(), advantage="reinforce_pp", gamma=0.5)
    # In time: 6, then 2 and 3 (which earns 8), then 7, where the score of the trajectory counts.
    assert rows[0] == [0.0, 0.125 + 0.25 * 8, 0.0, 1.0]
    assert rows[1] == [0.0, 0.25 + 0.5 * 8, 0.5 + 8.0]
    assert rows[2] == [0.0, 0.5]


def test_values_that_follow_are_those_of_the_next_token_in_time() -> None:
    rows = advantages_of(out_of_order(), advantage="gae", gamma=1.0, lam=0.0)
    assert rows[0] == [0.0, 20.0 - 10.0, 0.0, 1.0 - 40.0]
    assert rows[1] == [0.0, 30.0 - 20.0, 8.0 + 40.0 - 30.0]


@Declaration()
def of_truncated(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    assert inputs.truncated_B is not None
    return AdvantageOutputs(advantages_N=inputs.spread(inputs.truncated_B.float()))


def test_a_trajectory_was_cut_off_if_its_last_answer_was() -> None:
    spec = f"{__name__}:of_truncated"
    assert advantages_of(out_of_order(), advantage=spec)[0] == [0.0] * 4
    batch = out_of_order().with_columns({fields.FINISH_REASON: ["length", "stop", "stop"]})
    assert advantages_of(batch, advantage=spec)[:2] == [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]


def test_sessions_are_as_they_were_where_rows_stand_in_the_order_of_time() -> None:
    assert Trajectories.of(sessions()).order_N is None
    assert Trajectories.of(out_of_order()).order_N is not None


def test_one_completion_a_prompt_has_no_flat_groups() -> None:
    batch = Batch(
        {
            fields.REWARDS: torch.tensor([1.0, 0.0]),
            fields.GROUP: torch.tensor([0, 1]),
            fields.LOSS_MASK: Jagged.from_rows([torch.tensor([False, True])] * 2),
        }
    )
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(AlgorithmConfig(advantage="grpo")), cluster.pool([1]))
        assert metrics.FLAT_GROUPS not in estimator.describe(batch)
        assert estimator.describe(batch.with_columns(group=torch.tensor([0, 0])))[metrics.FLAT_GROUPS] == 0.0


def test_the_mean_of_greedy_rewards_counts_each_prompt_once() -> None:
    """Where the reward leaves completions out, prompts have different numbers of rows."""
    rows = Batch(
        {
            "loss_mask": Jagged.from_rows([torch.tensor([True])] * 4),
            "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
            "group": torch.tensor([0, 0, 0, 2]),
            "baseline": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        }
    )
    with podium.connect("inline") as cluster:
        estimator = cluster.start(Estimator.bind(AlgorithmConfig()), cluster.pool([1]))
        assert estimator.describe(rows)[metrics.BASELINE_MEAN] == 0.5
