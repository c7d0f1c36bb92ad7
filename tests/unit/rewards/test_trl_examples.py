"""The kinds of custom rewards that TRL's documentation shows, in our own words: all of them run as they are.

by tokens · by characters · by a format of messages · by a reference · for several tasks · awaited
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy
import pytest

from podium.errors import RewardError
from podium.rewards import Grader, RewardConfig


def count_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def count_characters(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def is_tagged(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    texts = [messages[0]["content"] for messages in completions]
    return [float(re.fullmatch(r"<think>.*</think><answer>.*</answer>", text) is not None) for text in texts]


def is_reference(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    boxed = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    return [float(box is not None and box[1] == truth) for box, truth in zip(boxed, ground_truth, strict=True)]


def adds(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    return [
        (1.0 if eval(prompt) == int(text) else -1.0) if kind == "sum" else None
        for prompt, text, kind in zip(prompts, completions, task, strict=True)
    ]


def spells(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    return [
        (1.0 if text == prompt[::-1] else -1.0) if kind == "reverse" else None
        for prompt, text, kind in zip(prompts, completions, task, strict=True)
    ]


async def asks(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0.001)
    return [float(bool(text)) for text in completions]


MESSAGES = [{"role": "user", "content": "1 + 2?"}]
TAGGED = "<think>3</think><answer>3</answer>"
TASKS = [
    {"prompt": "1 + 2", "task": "sum"},
    {"prompt": "abc", "task": "reverse"},
    {"prompt": "1 + 2", "task": "sum"},
    {"prompt": "abc", "task": "draw"},
]


@pytest.mark.everyday(
    "tokens-False", "characters-False", "format-False", "reference-False", "tasks-False", "awaited-False", "mixed-False"
)
@pytest.mark.parametrize("in_script", [False, True])
@pytest.mark.parametrize(
    ("reward", "completions", "rows", "scores"),
    [
        (count_tokens, ["blue", "in the sky"], [{"prompt": "?"}] * 2, [2.0, 4.0]),
        (count_characters, ["blue", "in the sky"], [{"prompt": "?"}] * 2, [4.0, 10.0]),
        (is_tagged, [TAGGED, "3"], [{"prompt": MESSAGES}] * 2, [1.0, 0.0]),
        (is_reference, [r"\boxed{2}", r"\boxed{6}"], [{"prompt": "?", "ground_truth": "2"}] * 2, [1.0, 0.0]),
        ([adds, spells], ["3", "cba", "4", "x"], TASKS, [1.0, 1.0, -1.0, None]),
        (asks, ["x", ""], [{"prompt": "?"}] * 2, [1.0, 0.0]),
        ([asks, count_characters, is_tagged], [TAGGED], [{"prompt": MESSAGES}], [3.0]),
    ],
    ids=["tokens", "characters", "format", "reference", "tasks", "awaited", "mixed"],
)
def test_it_runs_as_it_is(
    reward: Any, completions: list[str], rows: list[dict[str, Any]], scores: list[float | None], in_script: bool
) -> None:
    ids: list[dict[str, Any]] = [{"completion_ids": [*text.split(" "), "end"]} for text in completions]
    with Grader(RewardConfig(processes=1), reward=reward, in_script=in_script) as grader:
        grades = grader.grade(completions, rows, ids)
    assert [None if grade.abstained else grade.score for grade in grades] == scores


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: [], "returned 0 scores for a list of one completion"),
        (lambda completions: [1.0, 2.0], "returned 2 scores for a list of one completion"),
        (lambda completions: 1.0, "returned 1.0 for a list of one completion: expected a list of one number"),
        (lambda completions: ["good"], "returned 'good'"),
        (lambda completions: b"1", "returned b'1' for a list of one completion: expected a list of one number"),
        (lambda completions: numpy.array([1 + 2j]), r"returned .*complex128"),
    ],
)
def test_what_is_no_list_of_one_number_is_an_error(reward: Any, message: str) -> None:
    with Grader(RewardConfig(), reward=reward, in_script=True) as grader, pytest.raises(RewardError, match=message):
        grader.grade(["4"], [{"prompt": "2+2="}])
