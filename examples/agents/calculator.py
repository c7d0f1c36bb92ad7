"""A model that cannot multiply learns to use a calculator, and to copy what it says.

The warm-up shows how a calculator is called. It ends when two in five answers are copied without a mistake.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from small import (
    END_OF_CALL,
    Choice,
    called,
    main,
    reinforce,
    shape,
    start_of_call,
    warm_up,
    write_rows,
    write_tokenizer,
)

import podium
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig
from podium.trainer import Summary
from podium_agents import Client, ToolError, converse


def calculate(expression: str) -> str:
    """Multiply.

    Args:
        expression: Two numbers with * between them.
    """
    left, star, right = expression.partition("*")
    if not (star and left.isdecimal() and right.isdecimal()):
        raise ToolError("two numbers with * between them, please")
    return str(int(left) * int(right))


async def play(task: dict[str, Any], client: Client) -> float:
    """The answer is right or it is not, however it was found."""
    messages = [{"role": "user", "content": task["prompt"]}]
    reply = await converse(client, messages, tools=[calculate], max_turns=2)
    return float(reply.text == task["answer"])


def train(cluster: podium.Cluster, out: Path, choice: Choice) -> Summary:
    """Products of two numbers of two digits; a tenth of them is held out."""
    seed, single = choice.seed, choice.single
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    shown = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                *([] if single else [called("calculate", expression=row["prompt"][:-1])]),
                *([] if single else [{"role": "tool", "content": row["answer"]}]),
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows[:2000]
    ]
    words = [start_of_call("calculate", "expression"), END_OF_CALL, "error: "]
    tokenizer = write_tokenizer(out / "tokenizer", "0123456789*=[] abcdefghijklmnopqrstuvwxyz,.:", words)
    model = ModelConfig(config=shape(hidden=96), tokenizer=str(tokenizer), seed=seed)
    warm = warm_up(cluster, out, model, write_rows(out / "shown.jsonl", shown), seed=seed, steps=300, stop_at=0.4)
    data = DataConfig(train=write_rows(out / "products.jsonl", rows), holdout=0.1)
    environment = EnvironmentConfig(name="" if single else f"{__file__}:play")
    return reinforce(
        *(cluster, out, warm, data, environment),
        **{"choice": choice, "steps": 80, "max_new_tokens": 10, "lr": 5e-4, "reward": RewardConfig(name="exact")},
    )


if __name__ == "__main__":
    main(train, __doc__)
