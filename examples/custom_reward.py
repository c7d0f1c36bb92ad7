"""A reward of your own: a function from a completion and its example's row to a number, or to named parts.

    python examples/custom_reward.py
    podium train grpo --reward.name examples/custom_reward.py:digits_in_order --model.path … --data.train …

It runs in processes that can be killed: one that spins costs its time limit and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.rewards import Grader, RewardConfig


def digits_in_order(completion: str, row: Mapping[str, Any]) -> dict[str, float]:
    """1 for the right answer; else up to a half for the right digits in their places. ``score`` is what trains."""
    answer = str(row["answer"])
    right = sum(said == wanted for said, wanted in zip(completion.strip(), answer, strict=False))
    exact = float(completion.strip() == answer)
    return {"score": max(exact, 0.5 * right / len(answer)), "exact": exact, "length": float(len(completion))}


if __name__ == "__main__":
    with Grader(RewardConfig(correct_at=1.0), reward=digits_in_order) as grader:
        grades = grader.grade(["42", "49", "none"], [{"answer": "42"}] * 3)
    for grade in grades:
        print(f"{grade.score:.2f}  {'correct' if grade.correct else 'wrong':<8} {dict(grade.parts)}")
