"""Groups without a signal are dropped, and a step draws others within its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.config import build_config, config_to_dict, load_config
from podium.data import Batch, Jagged, fields
from podium.errors import ConfigError
from podium.models import char_tokenizer
from podium.rewards import Grade
from podium.rollout.tasks import Example
from podium.runs.config import GRPOConfig, PPOConfig
from podium.runs.sections import PromptBatch, PromptChoice
from podium.telemetry import metrics
from podium.trainer.checks.unused import find_unused_settings
from podium.trainer.completions import ScoredBatch
from podium.trainer.group_filter import fill_step, list_flat
from podium.trainer.prompts import Prompt
from podium.workers import Estimator
from podium_agents.environments.contract import Earned


def scored(rewards: dict[int, list[float]], correct: dict[int, list[bool | None]] | None = None) -> ScoredBatch:
    """Completions of one token with these rewards, by group."""
    groups = [group for group, own in rewards.items() for _ in own]
    scores = [reward for own in rewards.values() for reward in own]
    verdicts = [verdict for own in (correct or {}).values() for verdict in own] or [None] * len(scores)
    tokens = Jagged.from_rows([torch.tensor([group]) for group in groups])
    columns = {
        fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(torch.ones(len(groups), dtype=torch.bool)),
        fields.GROUP: torch.tensor(groups), fields.REWARDS: torch.tensor(scores),
        fields.SESSION: torch.arange(len(groups)), fields.TRAJECTORY: torch.arange(len(groups)),
    }  # fmt: skip
    prompts = [Prompt(torch.tensor([0]), Example(str(group), None, {}), str) for group in range(max(groups) + 1)]
    grades = [Grade(score, correct=verdict) for score, verdict in zip(scores, verdicts, strict=True)]
    return ScoredBatch(
        step=1, steps_before=0, batch=Batch(columns), prompts=prompts, tokenizer=char_tokenizer("ab"), grades=grades
    )


def test_groups_are_flat_by_reward_or_by_verdict() -> None:
    batch = scored({0: [0.1, 0.1], 1: [0.1, 0.2], 2: [1.0, 0.9], 3: [0.5]})
    assert list_flat(batch, "rewards") == {0, 3}
    assert list_flat(batch, "accuracy") == {0, 1, 3}, "a reward of 1 is correct"
    verdicts = {0: [True, False], 1: [True, True], 2: [False, False], 3: [None]}
    judged = scored({0: [0.1, 0.1], 1: [0.1, 0.2], 2: [1.0, 0.9], 3: [0.5]}, {**verdicts})
    assert list_flat(judged, "accuracy") == {1, 2, 3}


def test_the_rewards_of_turns_count() -> None:
    """An environment that rewards its turns alone has a score of 0 for each session."""
    batch = scored({0: [0.0, 0.0], 1: [0.0, 0.0], 2: [1.0, 0.5]})
    turns = [0.25, 0.75, 0.5, 0.5, 0.0, 0.5]
    batch = replace(
        batch, batch=batch.batch.with_columns({fields.GRADE: [Earned(0.0, {}, reward, False) for reward in turns]})
    )
    assert list_flat(batch, "rewards") == {1, 2}
    trained, dropped = fill_step(batch, lambda count: None, PromptChoice(count=3, refills=1), 1)
    assert dropped == [1, 2]
    assert trained.figures[metrics.FILTER_REWARD] == pytest.approx(4.0 / 6)


def test_agents_are_compared_with_themselves_and_full_sessions_are_not_correct() -> None:
    """As advantages and accuracy have it."""
    batch = scored({0: [1.0, -1.0, 1.0, -1.0], 1: [1.0, -1.0, 1.0, 0.0], 2: [2.0, 0.0, 0.0, 0.0]})
    agents = batch.batch.with_columns({fields.AGENT: ["", "other"] * 6})
    assert list_flat(replace(batch, batch=agents), "rewards") == {0}
    full = {fields.GRADE: [Earned(0.0, {}, 0.0, reward == 2.0) for reward in batch.rewards_B.tolist()]}
    assert list_flat(batch, "accuracy") == set()
    assert list_flat(replace(batch, batch=batch.batch.with_columns(full)), "accuracy") == {2}
    assert list_flat(replace(batch, batch=agents.with_columns(full)), "accuracy") == {0, 1, 2}


PAIRS = {
    "equal": [(0.5, 0.5), (0.5, 0.5)],
    "of_equal_sum": [(1.0, 0.0), (0.0, 1.0)],
    "second": [(0.5, 0.0), (0.5, 0.25)],
    "first": [(0.5, 0.25), (0.0, 0.25)],
}
"""Two numbers of each of two trajectories: the parts of a reward, or the rewards of two turns."""


def sessions_of(pairs: list[tuple[float, float]], are_turns: bool) -> ScoredBatch:
    """Two trajectories a prompt, each of two turns of two tokens with a token of the environment between them."""
    rows = len(pairs)
    batch = scored({group: [0.0 if are_turns else sum(pair) for pair in pairs[2 * group : 2 * group + 2]]
                    for group in range(rows // 2)})  # fmt: skip
    turn = torch.tensor([0, 0, -1, 1, 1])
    tokens = Jagged.from_rows([torch.zeros(5, dtype=torch.int64)] * rows)
    columns: dict[str, Any] = {
        fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like((turn >= 0).repeat(rows)),
        fields.TURN: tokens.like(turn.repeat(rows)), fields.AGENT: [""] * rows,
    }  # fmt: skip
    if are_turns:
        rewards = torch.tensor([[0.0, first, 0.0, 0.0, second] for first, second in pairs])
        columns |= {fields.TOKEN_REWARDS: tokens.like(rewards.flatten())}
        columns |= {fields.GRADE: [Earned(0.0, {}, sum(pair), False) for pair in pairs]}
    else:
        columns |= {
            fields.PART + name: torch.tensor([*values])
            for name, values in zip("ab", zip(*pairs, strict=True), strict=True)
        }
    return replace(batch, batch=Batch({**{name: batch.batch[name] for name in batch.batch}, **columns}))


@pytest.mark.parametrize(
    ("settings", "are_turns", "flat"),
    [
        ({"advantage": "grpo"}, False, {"equal", "of_equal_sum"}),
        ({"advantage": "grpo"}, True, {"equal", "of_equal_sum"}),
        ({"advantage": "rloo"}, True, {"equal", "of_equal_sum"}),
        ({"advantage": "gdpo", "options": {"part_weights": {"a": 1.0, "b": 0.2}}}, False, {"equal"}),
        ({"advantage": "gdpo", "options": {"part_weights": {"b": 0.2}}}, False, {"equal", "first"}),
        ({"advantage": "gdpo", "options": {"part_weights": {"a": 2.0, "b": 0.0}}}, False, {"equal", "second"}),
        ({"advantage": "grpo_turns"}, True, {"equal"}),
        ({"advantage": "grpo_turns", "gamma": 0.5}, True, {"equal"}),
        ({"advantage": "grpo_turns"}, False, {"equal", "of_equal_sum"}),
    ],
)
def test_a_flat_group_is_one_whose_advantages_are_all_zero(
    settings: dict[str, Any], are_turns: bool, flat: set[str]
) -> None:
    """Filter, metric and estimator agree, whatever an estimator compares."""
    batch = sessions_of([pair for pairs in PAIRS.values() for pair in pairs], are_turns)
    algorithm = AlgorithmConfig(**settings, normalize_advantage=False)
    expected = {group for group, name in enumerate(PAIRS) if name in flat}
    assert list_flat(batch, "rewards", algorithm) == expected
    estimator = Estimator(algorithm)
    rows = estimator.advantages(batch.batch).jagged(fields.ADVANTAGES).unbind()
    assert {row // 2 for row, values in enumerate(rows) if not values.any()} == expected
    assert estimator.describe(batch.batch)[metrics.FLAT_GROUPS] == len(expected) / 4


def test_a_step_draws_as_many_prompts_as_are_missing() -> None:
    draws = [scored({3: [1.0, 1.0], 4: [0.0, 1.0]}), scored({5: [0.0, 0.5]})]
    asked: list[int] = []

    def draw(count: int) -> ScoredBatch:
        asked.append(count)
        return draws.pop(0)

    first = scored({0: [0.0, 0.0], 1: [0.0, 1.0], 2: [1.0, 1.0]})
    whole, dropped = fill_step(first, draw, PromptChoice(count=3, refills=5), 1)
    assert asked == [2, 1], "it draws no more once the step is full"
    assert dropped == [0, 2, 3]
    assert whole.groups == [1, 1, 4, 4, 5, 5]
    assert [whole.prompts[group].example.prompt for group in whole.groups] == ["1", "1", "4", "4", "5", "5"]
    assert [grade.score for grade in whole.grades or ()] == whole.rewards_B.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.5]
    assert whole.firsts == whole.judged == [*range(6)], "sessions of two draws are told apart"
    assert whole.figures[metrics.FILTER_DROPPED] == 0.5
    assert (whole.figures[metrics.FILTER_REFILLS], whole.figures[metrics.FILTER_MISSING]) == (2.0, 0.0)
    assert whole.figures[metrics.FILTER_REWARD] == pytest.approx((0 + 1 + 2 + 2 + 1 + 0.5) / 12)


def test_after_its_last_draw_a_step_trains_with_what_there_is() -> None:
    first = scored({0: [0.0, 0.0], 1: [0.0, 1.0]})
    whole, dropped = fill_step(first, lambda count: None, PromptChoice(count=2, refills=2), 1)
    assert (whole.groups, dropped) == ([1, 1], [0])
    assert (whole.figures[metrics.FILTER_REFILLS], whole.figures[metrics.FILTER_MISSING]) == (2.0, 1.0)
    kept, dropped = fill_step(first, lambda count: None, PromptChoice(count=2, refills=0), 3)
    assert (kept.groups, dropped) == ([0, 0, 1, 1], []), "the policy has three ranks"
    flat = scored({0: [0.0, 0.0], 1: [1.0, 1.0]})
    kept, dropped = fill_step(flat, lambda count: None, PromptChoice(count=2, refills=1), 1)
    assert (kept.groups, dropped) == ([0, 0], [1]), "something is left to train on"


def test_batch_prompts_is_a_number_or_a_mapping() -> None:
    config = load_config(GRPOConfig, None, ["--batch.prompts", "{count: 8, filter: accuracy}"])
    assert config.batch.choice == PromptChoice(count=8, filter="accuracy", refills=3)
    assert (config.taken, config.rows) == (8, 8 * config.sampling.n)
    assert load_config(GRPOConfig, None, ["--batch.prompts", "8"]).batch.choice == PromptChoice(count=8, filter="none")
    assert PromptBatch().choice == PromptChoice(filter="none")
    assert config_to_dict(config)["batch"] == {"prompts": {"count": 8, "filter": "accuracy"}}
    for wrong, message in (
        ({"counts": 8}, r"unknown key batch\.prompts\.counts"),
        ({}, "expected a number, or some of the entries count, filter, refills, skip_solved and"),
        ({"count": 0}, r"batch\.prompts\.count = 0"),
        ({"filter": "mixed"}, r"batch\.prompts\.filter = 'mixed': expected one of none, rewards, accuracy"),
        ({"refills": -1}, r"batch\.prompts\.refills = -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            PromptBatch(prompts=wrong)
    assert replace(config.batch, prompts=4).choice.count == 4


@pytest.mark.parametrize(
    ("recipe", "algorithm", "n", "default"),
    [
        (GRPOConfig, {}, 4, "rewards"),
        (GRPOConfig, {"advantage": "rloo"}, 4, "rewards"),
        (GRPOConfig, {"loss": {"ppo_clip": 1.0, "cross_entropy": 0.1}}, 4, "rewards"),
        (GRPOConfig, {"advantage": "own.py:own"}, 4, "rewards"),
        (GRPOConfig, {"advantage": "own.py:own"}, 1, "none"),
        (GRPOConfig, {"advantage": "reinforce_pp"}, 4, "none"),
        (GRPOConfig, {"advantage": "remax"}, 1, "none"),
        (GRPOConfig, {"loss": "teacher_kl", "options": {"teacher": "model"}}, 4, "none"),
        (PPOConfig, {}, 1, "none"),
        (PPOConfig, {}, 4, "none"),
    ],
)
def test_prompts_without_a_difference_are_dropped_by_default_where_they_teach_nothing(
    recipe: type[PPOConfig], algorithm: dict[str, Any], n: int, default: str
) -> None:
    """With one completion a prompt, each prompt was dropped, and a step trained on one of 64."""
    values = {"algorithm": algorithm, "sampling": {"n": n}}
    config = build_config(recipe, {**values, "batch": {"prompts": {"count": 16, "skip_solved": 1.0}}})
    assert config.prompt_choice == replace(config.batch.choice, filter=default)
    assert not [note for note in find_unused_settings(config) if "batch.prompts" in note]
    plain = build_config(recipe, {**values, "batch": {"prompts": 16}})
    assert plain.prompt_choice == plain.batch.choice


@pytest.mark.parametrize(
    ("algorithm", "learner"),
    [
        ({"advantage": "reinforce_pp"}, "algorithm.advantage = 'reinforce_pp'"),
        ({"loss": "teacher_kl", "options": {"teacher": "model"}}, "algorithm.loss = 'teacher_kl'"),
        ({}, ""),
    ],
)
def test_a_filter_that_drops_what_would_teach_is_noted(algorithm: dict[str, Any], learner: str) -> None:
    values = {"algorithm": algorithm, "batch": {"prompts": {"filter": "rewards"}}}
    config = build_config(GRPOConfig, values)
    assert config.prompt_choice.filter == "rewards"
    notes = [note for note in find_unused_settings(config) if note.startswith("batch.prompts.filter = 'rewards' drops")]
    assert [f"{learner} learns from them too" in note for note in notes] == [True] * bool(learner)


@pytest.mark.parametrize("by", ["rewards", "accuracy"])
def test_a_filter_of_single_completions_is_refused(by: str) -> None:
    message = rf"batch\.prompts\.filter = '{by}' with sampling\.n = 1: .*set batch\.prompts\.filter to none, or"
    with pytest.raises(ConfigError, match=message):
        build_config(PPOConfig, {"batch": {"prompts": {"filter": by}}})
    sections = {"algorithm": {"advantage": f"{__name__}:list_flat"}, "sampling": {"n": 1}}
    config = build_config(GRPOConfig, {**sections, "batch": {"prompts": {"filter": by}}})
    with pytest.raises(ConfigError, match=message):
        config.check_roles(load=True)
    assert build_config(PPOConfig, {"batch": {"prompts": {"filter": "none"}}}).prompt_choice.filter == "none"
