"""Rewards of TRL's form are recognized, and called with lists of one completion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, RewardError
from podium.rewards import Grader, RewardConfig
from podium.rewards.trl import of_one, takes_lists
from podium.telemetry import Event, Note, subscribe

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def plain(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def conversational(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [len(p) + float(c[0]["content"] == "4") for p, c in zip(prompts, completions, strict=True)]


def without_kwargs(completions: list[str], *, solution: list[str], log_extra: Any = None) -> list[float]:
    assert log_extra is None
    return plain(completions, solution)


class AnObject:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(kwargs["prompts"][0]) + len(kwargs["answer"])) for _ in completions]


def test_it_is_recognized_by_its_parameter() -> None:
    assert all(map(takes_lists, (plain, conversational, without_kwargs, AnObject())))
    assert not any(map(takes_lists, (lambda completion, row: 1.0, len, RewardConfig)))


@pytest.mark.parametrize(
    ("reward", "completion", "row", "score"),
    [
        (plain, "4", {"prompt": "2+2=", "solution": "4"}, 1.0),
        (plain, "5", {"prompt": "2+2=", "solution": "4"}, 0.0),
        (conversational, "4", {"prompt": MESSAGES, "answer": "4"}, 2.0),
        (without_kwargs, "4", {"prompt": "2+2=", "solution": "4", "other": 1}, 1.0),
        (AnObject(), "4", {"prompt": "2+2=", "answer": "4"}, 5.0),
    ],
)
def test_completions_prompts_and_columns_come_as_trl_gives_them(
    reward: Callable[..., Any], completion: str, row: dict[str, Any], score: float
) -> None:
    assert of_one(reward)(completion, row) == score


def test_a_grader_runs_it_and_says_so_once() -> None:
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    unsubscribe = subscribe(hear)
    try:
        with Grader(RewardConfig(processes=1), reward=plain) as grader:
            grades = grader.grade(["4", "5"], [{"prompt": "2+2=", "solution": "4"}] * 2)
            assert [(grade.score, grade.correct) for grade in grades] == [(1.0, True), (0.0, False)]
    finally:
        unsubscribe()
    assert len(notes) == 1
    assert "calls it with lists of one completion" in notes[0]


def test_one_in_a_file_goes_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(completions, **kwargs):\n    return [len(text) for text in completions]\n")
    with Grader(RewardConfig(name=f"{path}:score", processes=1)) as grader:
        assert grader.submit("four", {"prompt": "?"}).result().score == 4.0


async def later(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, completion_ids, **kwargs: [1.0], "needs completion_ids, which only TRL's trainer has"),
        (lambda completions, trainer_state: [1.0], "needs trainer_state, which only TRL's trainer has"),
        (later, "later is a coroutine function"),
    ],
)
def test_what_needs_the_trainer_of_trl_is_refused_at_the_start(reward: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), Grader(RewardConfig(processes=1), reward=reward) as grader:
        grader.start()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (plain, "needs the column 'solution', and the row has prompt, answer"),
        (lambda completions, **kwargs: [None], "returned None. In TRL, None leaves a completion"),
        (lambda completions, **kwargs: [], "returned 0 scores for a list of one completion"),
        (lambda completions, **kwargs: [1.0, 2.0], "returned 2 scores for a list of one completion"),
        (lambda completions, **kwargs: 1.0, "returned 1.0 for a list of one completion: expected a list of one number"),
        (lambda completions, **kwargs: ["good"], "returned 'good'"),
    ],
)
def test_what_is_no_list_of_one_number_is_an_error_with_the_remedy(reward: Callable[..., Any], message: str) -> None:
    with Grader(RewardConfig(processes=1), reward=reward) as grader, pytest.raises(RewardError, match=message):
        grader.grade(["4"], [{"prompt": "2+2=", "answer": "4"}])
