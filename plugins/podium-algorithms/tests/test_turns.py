"""Advantages of turns: against their formulas, written out turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from podium.algorithms import AdvantageInputs, AlgorithmConfig, compute_advantages
from podium_algorithms import find_turns

# Three trajectories of one prompt with one, two and two turns of two tokens each; a token of the environment between.
MASK = [[1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 1, 1]]
TURN = [[0, 0], [0, 0, -1, 1, 1], [3, 3, -1, 5, 5]]
TURN_REWARDS = [[0, 0.5], [0, 1.0, 0, 0, 0.0], [0, 0.0, 0, 0, 2.0]]
ROW_REWARDS = [0.0, 1.0, 0.0]


def inputs(**more: Any) -> AdvantageInputs:
    def flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row])

    return AdvantageInputs(
        rewards_B=torch.tensor(ROW_REWARDS),
        group_B=torch.zeros(3, dtype=torch.int64),
        mask_N=flat(MASK).bool(),
        offsets_B1=torch.tensor([0, 2, 7, 12]),
        token_rewards_N=flat(TURN_REWARDS),
        turn_N=flat(TURN).long(),
        **more,
    )


def test_turns_are_found_in_the_order_of_time_even_where_a_later_row_has_an_earlier_turn() -> None:
    turns = find_turns(inputs())
    assert turns.row_K.tolist() == [0, 1, 1, 2, 2]
    assert turns.place_K.tolist() == [0, 0, 1, 0, 1]
    assert turns.rewards_K.tolist() == [0.5, 1.0, 1.0, 0.0, 2.0]  # the row's own reward counts at its last turn
    swapped = AdvantageInputs(
        rewards_B=torch.tensor([1.0]),
        group_B=torch.tensor([0]),
        mask_N=torch.ones(3, dtype=torch.bool),
        offsets_B1=torch.tensor([0, 3]),
        turn_N=torch.tensor([0, 2, 1]),  # two rows of one session, the second of which was said between
    )
    assert find_turns(swapped).rewards_K.tolist() == [0.0, 0.0, 1.0]
    assert find_turns(swapped).index_M.tolist() == [0, 2, 1]


def test_grpo_turns_compares_what_is_left_to_earn_with_that_of_the_same_turn() -> None:
    gamma = 0.5
    found = compute_advantages(
        inputs(), AlgorithmConfig(advantage="grpo_turns", gamma=gamma, normalize_advantage=False)
    )
    firsts = [0.5, 1.0 + gamma * 1.0, 0.0 + gamma * 2.0]
    seconds = [1.0, 2.0]
    first = [value - sum(firsts) / 3 for value in firsts]
    second = [value - sum(seconds) / 2 for value in seconds]
    expected = [
        *[first[0]] * 2,
        *([first[1]] * 2 + [0.0] + [second[0]] * 2),
        *([first[2]] * 2 + [0.0] + [second[1]] * 2),
    ]
    assert found.advantages_N.tolist() == pytest.approx(expected)
    scaled = compute_advantages(inputs(), AlgorithmConfig(advantage="grpo_turns", gamma=gamma))
    std = torch.tensor([firsts[0], firsts[1], 1.0, firsts[2], 2.0]).std()
    assert scaled.advantages_N.tolist() == pytest.approx([value / float(std) for value in expected], abs=1e-4)


def test_with_one_turn_a_row_grpo_turns_is_grpo() -> None:
    one = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 0.0, 0.25, 1.0]),
        group_B=torch.tensor([0, 0, 0, 1]),
        mask_N=torch.tensor([False, True, True, True, True, False, True]),
        offsets_B1=torch.tensor([0, 2, 4, 5, 7]),
    )
    outputs = [compute_advantages(one, AlgorithmConfig(advantage=name)) for name in ("grpo", "grpo_turns")]
    torch.testing.assert_close(outputs[0].advantages_N, outputs[1].advantages_N)


def test_gae_over_turns_steps_from_turn_to_turn() -> None:
    gamma, lam = 0.9, 0.8
    values = torch.tensor(
        [0.1, 9, 0.2, 9, 9, 0.3, 9, 0.4, 9, 9, 0.5, 9]
    )  # only those before a turn's first token count
    bootstrap = torch.tensor([0.0, 0.0, 0.7])
    config = AlgorithmConfig(advantage="gae_turns", gamma=gamma, lam=lam, normalize_advantage=False)
    found = compute_advantages(inputs(values_N=values, bootstrap_B=bootstrap), config)
    last_1, last_2 = 1.0 - 0.3, 2.0 + gamma * 0.7 - 0.5
    first_1 = 1.0 + gamma * 0.3 - 0.2 + gamma * lam * last_1
    first_2 = 0.0 + gamma * 0.5 - 0.4 + gamma * lam * last_2
    advantages = [0.4] * 2 + [first_1] * 2 + [0.0] + [last_1] * 2 + [first_2] * 2 + [0.0] + [last_2] * 2
    assert found.advantages_N.tolist() == pytest.approx(advantages)
    assert found.returns_N is not None
    before = [0.1] * 2 + [0.2] * 2 + [0.0] + [0.3] * 2 + [0.4] * 2 + [0.0] + [0.5] * 2
    assert found.returns_N.tolist() == pytest.approx([a + v for a, v in zip(advantages, before, strict=True)])


def test_one_turn_of_one_token_each_makes_gae_over_turns_the_usual_gae() -> None:
    torch.manual_seed(0)
    given = AdvantageInputs(
        rewards_B=torch.randn(3),
        group_B=torch.arange(3),
        mask_N=torch.tensor([False, True, True, True, False, True, True]),
        offsets_B1=torch.tensor([0, 3, 4, 7]),
        turn_N=torch.tensor([-1, 0, 1, 0, -1, 0, 1]),
        values_N=torch.randn(7),
    )
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5)):
        usual, turns = (
            compute_advantages(given, AlgorithmConfig(advantage=name, gamma=gamma, lam=lam))
            for name in ("gae", "gae_turns")
        )
        torch.testing.assert_close(usual.advantages_N, turns.advantages_N)
        torch.testing.assert_close(usual.returns_N, turns.returns_N)
