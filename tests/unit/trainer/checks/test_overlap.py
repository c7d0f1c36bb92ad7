"""Held-out prompts that are trained on as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import EncodedPairs, Example, TokenRows
from podium.trainer import GRPOConfig
from podium.trainer.checks.overlap import describe_overlaps
from podium.trainer.prompts import Prompt

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3"}]


def example(prompt: Any, answer: str | None = None) -> Example:
    return Example(prompt, answer, {"prompt": prompt, "answer": answer})


def whole(*texts: str) -> Example:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return Example(turns[:-1], texts[-1], {}, turns=turns[-1:], whole=True)


def prompts(*examples: Example) -> list[Prompt]:
    return [Prompt(None, row, None) for row in examples]  # type: ignore[arg-type] - the tokens are not read


def pairs(*examples: Example) -> EncodedPairs:
    rows = TokenRows(torch.ones(len(examples), dtype=torch.int64), torch.arange(len(examples) + 1))
    return EncodedPairs(rows, rows, examples)


@pytest.mark.parametrize(
    ("trained", "held_out", "expected"),
    [
        ([example("a", "1"), example("b", "2")], prompts(example("b", "2"), example("c", "3")), "1 of the 2 held-out"),
        ([example("b", "2")], prompts(example("b", "2"), example("b", "2")), "2 of the 2 held-out"),
        ([example(CHAT)], prompts(example([dict(reversed(turn.items())) for turn in CHAT])), "1 of the 1 held-out"),
        ([example("b", "2")], pairs(example("a", "1"), example("b", "2")), "1 of the 2 held-out"),
        ([example("b", "2")], prompts(example("b", "3")), ""),
        ([example(CHAT)], prompts(example(CHAT[1:])), ""),
        ([example([{"role": "user", "content": "b"}], "2")], prompts(example("b", "2")), "1 of the 1 held-out"),
        # each turn of a conversation is learned
        ([whole("a", "1", "b", "2")], prompts(whole("a", "1")), "1 of the 1 held-out"),
        ([whole("a", "1", "b", "2", "c", "3")], prompts(whole("a", "1", "b", "2")), "1 of the 1 held-out"),
        ([example("a", "1")], prompts(whole("a", "1")), "1 of the 1 held-out"),
        ([whole("a", "1")], prompts(whole("a", "1", "b", "2")), ""),
        ([whole("a", "1", "b", "2")], prompts(whole("a", "1", "b", "3")), ""),
        ([], prompts(example("b", "2")), ""),
        ([example("b", "2")], prompts(), ""),
    ],
)
def test_prompts_that_both_sides_have_are_counted(trained: list[Example], held_out: Any, expected: str) -> None:
    sentences = [*describe_overlaps(GRPOConfig(), trained, {"": held_out})]
    assert len(sentences) == bool(expected)
    assert "".join(sentences).startswith(expected)


def test_each_of_several_sets_is_named() -> None:
    sets = {name: prompts(example(name), example("x")) for name in ("easy", "hard")}
    (sentence,) = describe_overlaps(GRPOConfig(), [example("hard"), example("y")], sets)
    assert sentence.startswith("1 of the 2 held-out prompts of hard is also in the training data")


def test_tasks_of_environments_are_not_compared() -> None:
    config = GRPOConfig(environment=EnvironmentConfig(name="world:play"))
    assert not [*describe_overlaps(config, [example("a")], {"": prompts(example("a"))})]
