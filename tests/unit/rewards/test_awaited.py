"""Rewards that are awaited: many at once, each with its time, and none that harms another."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.errors import RewardError
from podium.rewards import Grader, RewardConfig
from tests.waits import LONG_S, grade_undisturbed

LIMIT_S = 2.0  # where an item is to pass it
AT_ONCE = 20

barriers: dict[str, asyncio.Barrier] = {}


async def meet(completion: str, row: Mapping[str, Any]) -> float:
    """Wait until as many have come as the row says, which happens only if they run beside each other."""
    await barriers.setdefault(row["place"], asyncio.Barrier(row["count"])).wait()
    return float(completion)


async def misbehave(completion: str, row: Mapping[str, Any]) -> float:
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "block":
        time.sleep(600)  # noqa: ASYNC251 - it blocks the loop
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise ValueError("no such unit")
    if completion == "time out":
        raise TimeoutError("of my own")
    await asyncio.sleep(0.001)
    return 1.0


def blocks(completion: str, row: Mapping[str, Any]) -> float:
    """Take long enough for the time of those that are awaited to be over, if it counted."""
    time.sleep(LIMIT_S / 2)
    return 1.0


@pytest.mark.parametrize("in_script", [False, True])
def test_many_are_awaited_at_once(tmp_path: Path, in_script: bool) -> None:
    config = RewardConfig(time_limit_s=LONG_S)
    row = {"place": str(tmp_path), "count": AT_ONCE}
    with Grader(config, reward=meet, in_script=in_script) as grader:
        grades = grader.grade([str(n) for n in range(AT_ONCE)], [row] * AT_ONCE)
    assert [grade.score for grade in grades] == [float(n) for n in range(AT_ONCE)]


def test_of_one_completion_all_functions_are_awaited_at_once(tmp_path: Path) -> None:
    async def left(completion: str, row: Mapping[str, Any]) -> float:
        return await meet("1", row)

    async def right(completions: list[str], **columns: Any) -> list[float]:
        return [await meet("2", {name: values[0] for name, values in columns.items() if name in ("place", "count")})]

    with Grader(RewardConfig(time_limit_s=LONG_S), reward=[left, right]) as grader:
        (grade,) = grader.grade(["x"], [{"place": str(tmp_path), "count": 2}])
    assert grade.score == 3.0


def test_each_has_its_time_and_none_harms_another() -> None:
    words = ["ok", "hang", "ok", "block", "ok", "exit", "ok", "raise", "time out", *["ok"] * 30]
    config = RewardConfig(time_limit_s=LIMIT_S, on_error="score", failure_score=-1.0)
    with Grader(config, reward=misbehave) as grader:
        grades = grade_undisturbed(lambda: grader.grade(words, [{}] * len(words)), late=[1, 3])
    assert [grade.score for grade in grades] == [1.0 if word == "ok" else -1.0 for word in words]
    errors = {word: (grade.error, grade.timed_out) for word, grade in zip(words, grades, strict=True)}
    assert errors == {
        "ok": (None, False),
        "hang": (f"ran over {LIMIT_S:g} s", True),
        "block": (f"ran over {LIMIT_S:g} s", True),
        "exit": ("ended its process (exit code 3)", False),
        "raise": ("raised ValueError: no such unit", False),
        "time out": ("raised TimeoutError: of my own", False),
    }


def test_the_time_in_which_another_function_blocks_does_not_count() -> None:
    async def waits(completion: str, row: Mapping[str, Any]) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    with Grader(RewardConfig(time_limit_s=LIMIT_S, processes=1), reward=[blocks, waits]) as grader:
        grades = grade_undisturbed(lambda: grader.grade(["x"] * 3, [{}] * 3))
    assert not any(grade.timed_out for grade in grades)


def test_one_event_loop_serves_all_items() -> None:
    """A client of an HTTP library belongs to the loop that it was first used in."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def remember(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return float(loops[0] is loops[-1])

    for in_script in (False, True):
        loops.clear()
        with Grader(RewardConfig(), reward=remember, in_script=in_script) as grader:
            grades = [*grader.grade(["x"] * 3, [{}] * 3), grader.submit("x", {}).result(timeout=LONG_S)]
        assert [grade.score for grade in grades] == [1.0] * 4


def test_in_a_notebook_the_loop_that_runs_already_is_left_alone() -> None:
    async def cell() -> list[float]:
        with Grader(RewardConfig(), reward=misbehave, in_script=True) as grader:
            return [grade.score for grade in grader.grade(["ok"] * 3, [{}] * 3)]

    assert asyncio.run(cell()) == [1.0] * 3


def test_a_function_that_returns_something_to_await_is_awaited() -> None:
    for in_script in (False, True):
        with Grader(
            RewardConfig(), reward=lambda completion, row: misbehave(completion, row), in_script=in_script
        ) as g:
            assert g.submit("ok", {}).result(timeout=LONG_S).score == 1.0


def test_an_error_has_the_traceback_of_the_reward() -> None:
    with Grader(RewardConfig(processes=1), reward=misbehave) as grader, pytest.raises(RewardError) as caught:
        grader.grade(["ok", "raise"], [{}] * 2)
    assert "in misbehave" in str(caught.value)
    assert "reward_functions.py" not in str(caught.value)


async def gives_up(completion: str) -> float:
    """Await a task that the function itself has cancelled, as clients with cancel scopes do."""
    task = asyncio.ensure_future(asyncio.sleep(600))
    if completion == "cancel":
        task.cancel()
        await task
    task.cancel()
    if completion == "raise":
        raise asyncio.CancelledError
    return 1.0


@pytest.mark.parametrize("in_script", [False, True])
def test_a_function_that_cancels_something_of_its_own_has_failed_at_once_and_harms_no_other(in_script: bool) -> None:
    config = RewardConfig(time_limit_s=LONG_S, on_error="score", failure_score=-1.0, processes=1)
    with Grader(config, reward=gives_up, in_script=in_script) as grader:
        grades = grader.grade(["1", "cancel", "raise", "2"], [{}] * 4)
    assert [grade.score for grade in grades] == [1.0, -1.0, -1.0, 1.0]
    assert [(grade.error, grade.timed_out) for grade in grades[1:3]] == [("raised CancelledError", False)] * 2
