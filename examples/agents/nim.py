"""A model learns to win a game of Nim against an opponent that plays at random half of the time and well otherwise.

Two players take one, two or three of up to eleven sticks. Whoever takes the last one wins. The model begins from
nothing: what is no move loses at once, and a move earns a little. Trained by single answers, it makes one move, and the
game is played to its end at random.
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


def answer_of(left: int, dice: random.Random, skill: float) -> int:
    """A move: the best one with the probability ``skill``, and any other time a random one."""
    best = left % 4
    return best if best and dice.random() < skill else dice.randint(1, min(3, left))


class Nim:
    """A game, in which the model moves first."""

    def __init__(self, skill: float = 0.5, moves: int = 20) -> None:
        self.skill, self.moves = skill, moves

    def reset(self, task: dict[str, Any]) -> str:
        self.left = int(task["answer"])
        self.dice = random.Random(task["dice"])
        return str(task["prompt"])

    def step(self, answer: str) -> Step:
        if answer not in ("1", "2", "3") or int(answer) > self.left:
            return Step(reward=0.0, done=True, parts={"legal": 0.0})
        self.left -= int(answer)
        self.moves -= 1
        while self.left and not self.moves:  # by single answers: the others move at random, also for the model
            self.left -= self.dice.randint(1, min(3, self.left))
            if not self.left:
                return Step(reward=0.0, done=True, parts={"legal": 1.0})
            self.left -= self.dice.randint(1, min(3, self.left))
        if not self.left:
            return Step(reward=1.0, done=True, parts={"legal": 1.0})
        self.left -= answer_of(self.left, self.dice, self.skill)
        if not self.left:
            return Step(reward=0.0, done=True, parts={"legal": 1.0})
        return Step(say=f"{self.left:02d}:", reward=0.02)


def train(cluster: podium.Cluster, out: Path, choice: Choice) -> Summary:
    """Games that begin with five to eleven sticks, and with an opponent of many moods."""
    lefts = [left for left in range(5, 12) if left % 4] * 100  # where whoever begins can win
    random.Random(0).shuffle(lefts)
    rows = [{"prompt": f"{left:02d}:", "answer": str(left), "dice": place} for place, left in enumerate(lefts)]
    tokenizer = write_tokenizer(out / "tokenizer", "0123456789:")
    model = ModelConfig(config=shape(length=128), tokenizer=str(tokenizer), seed=choice.seed)
    train_rows, eval_rows = write_rows(out / "games.jsonl", rows[200:]), write_rows(out / "others.jsonl", rows[:200])
    data = DataConfig(train=train_rows, eval=eval_rows)
    environment = EnvironmentConfig(name=f"{__file__}:Nim", options={"moves": 1} if choice.single else {})
    return reinforce(
        cluster,
        out,
        model,
        data,
        environment,
        choice=choice,
        steps=200,
        max_new_tokens=1,
        lr=3e-4,
        algorithm=AlgorithmConfig(entropy_coef=0.02),
        reward=RewardConfig(correct_at=1.0),
    )


if __name__ == "__main__":
    main(train, __doc__)
