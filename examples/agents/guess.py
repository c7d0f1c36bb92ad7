"""A model learns to find a number in three tries, with a reward for each.

After each try it hears whether the number is higher or lower. Halving finds any of seven numbers. Trained by single
answers, the model has one try.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from small import Choice, main, reinforce, shape, write_rows, write_tokenizer

import podium
from podium.algorithms import AlgorithmConfig
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig
from podium.trainer import Summary
from podium_agents import Step


class Guess:
    """Each try is rewarded by how much it tells: 1 for the number, less for what is far away, nothing for no number."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, task: dict[str, Any]) -> str:
        self.number, self.left = int(task["answer"]), self.turns
        return str(task["prompt"])

    def step(self, answer: str) -> Step:
        self.left -= 1
        if not (len(answer) == 1 and answer in "1234567"):
            return Step(reward=0.0, done=True)
        away = int(answer) - self.number
        if not away:
            return Step(reward=1.0, done=True)
        near = 0.1 * (1 - abs(away) / 6)
        return Step(say="-" if away > 0 else "+", reward=near, done=not self.left)


def train(cluster: podium.Cluster, out: Path, choice: Choice) -> Summary:
    """The numbers from one to seven."""
    rows = [{"prompt": "?", "answer": str(number)} for _ in range(100) for number in range(1, 8)]
    random.Random(0).shuffle(rows)
    tokenizer = write_tokenizer(out / "tokenizer", "1234567?+-")
    model = ModelConfig(config=shape(length=32), tokenizer=str(tokenizer), seed=choice.seed)
    numbers = write_rows(out / "numbers.jsonl", rows)
    data = DataConfig(train=numbers, eval=numbers)  # there are no others
    environment = EnvironmentConfig(name=f"{__file__}:Guess", options={"turns": 1} if choice.single else {})
    algorithm = AlgorithmConfig(advantage="grpo_turns", normalize_advantage=False)
    return reinforce(
        cluster,
        out,
        model,
        data,
        environment,
        choice=choice,
        steps=120,
        max_new_tokens=1,
        lr=2e-3,
        algorithm=algorithm,
        reward=RewardConfig(correct_at=1.0),
    )


if __name__ == "__main__":
    main(train, __doc__)
