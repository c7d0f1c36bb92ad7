"""The choice of the best completion of each prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from podium.data import Batch, Jagged
from podium.data.sampled_text import text_column
from podium.models import ModelConfig, char_tokenizer
from podium.rewards import Grade, RewardConfig
from podium.rollout.tasks import Example
from podium.runs.config import InferenceConfig
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium_inference.best_of_n import BestOfN, _choose

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def scored(scores: list[float], reasons: list[str], texts: list[str], correct_at: float | None = None) -> ScoredBatch:
    """Two completions of each prompt. The second prompt has tools."""
    reward = RewardConfig(correct_at=correct_at)
    grades = [Grade(score, correct=reward.is_correct(score)) for score in scores]
    tokenizer = char_tokenizer("ab")
    examples = [Example(text, None, {"prompt": text}) for text in ("p", "q", "r", "s")]
    examples[1] = replace(examples[1], prompt=[{"role": "user", "content": "q"}], row={"tools": TOOLS})
    ids = torch.tensor([4])
    columns: dict[str, Any] = {
        "tokens": Jagged.from_rows([ids] * len(texts)),
        "rewards": torch.tensor(scores),
        "group": torch.arange(len(texts)) // 2,
        "finish_reason": reasons,
        "text": text_column(texts),
    }
    prompts = [Prompt(ids, example, tokenizer.decode) for example in examples[: len(texts) // 2]]
    return ScoredBatch(
        step=0, steps_before=0, batch=Batch(columns), prompts=prompts, tokenizer=tokenizer, grades=grades
    )


def config_of(**reward: Any) -> InferenceConfig:
    return InferenceConfig(model=ModelConfig(path="x"), reward=RewardConfig(**reward))


def test_the_first_of_the_best_that_ended_by_itself_is_the_answer() -> None:
    batch = scored(
        [0.5, 1.0, 2.0, 2.0, 9.0, 1.0, 7.0, 8.0],
        ["stop", "stop", "stop", "stop", "length", "stop", "length", "length"],
        ["a", "b", "c", "d", "e", "f", "g", "h"],
    )
    count = BestOfN()
    assert [*_choose(batch, config_of(), count)] == [
        {"prompt": "p", "answer": "b", "reward": 1.0},
        {"prompt": [{"role": "user", "content": "q"}], "answer": "c", "reward": 2.0, "tools": TOOLS},
        {"prompt": "r", "answer": "f", "reward": 1.0},
    ]
    assert count == BestOfN(kept=3, unfinished=1)


def test_with_a_lowest_correct_score_a_prompt_without_a_correct_completion_has_no_row() -> None:
    count = BestOfN()
    batch = scored([0.5, 0.9, 1.0, 0.0], ["stop"] * 4, ["a", "b", "c", "d"], correct_at=1.0)
    assert [row["answer"] for row in _choose(batch, config_of(correct_at=1.0), count)] == ["c"]
    assert count == BestOfN(kept=1, wrong=1)


def test_a_score_is_compared_and_written_as_the_reward_gave_it() -> None:
    """0.7 and 0.9 are smaller in float32, in which a step's rewards are."""
    for score in (0.7, 0.9):
        count = BestOfN()
        batch = scored([0.1, score], ["stop"] * 2, ["a", "b"], correct_at=score)
        assert [*_choose(batch, config_of(correct_at=score), count)] == [
            {"prompt": "p", "answer": "b", "reward": score}
        ]
        assert count == BestOfN(kept=1)


def test_an_answer_ends_with_the_text_that_ended_it() -> None:
    """The rewards read the texts without it. A model that learned from such rows would never write it."""
    batch = scored([1.0, 2.0, 3.0, 4.0], ["stop"] * 4, ["<a>1", "<a>2", "<a>3", "d"])
    batch = replace(batch, batch=batch.batch.with_columns({"stop_text": ["</a>", "</a>", "</a>", ""]}))
    assert [row["answer"] for row in _choose(batch, config_of(), BestOfN())] == ["<a>2</a>", "d"]
