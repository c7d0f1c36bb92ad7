"""Rewards in the script's own process: a debugger and prints work, time limits only note; elsewhere, errors say so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.errors import RewardError
from podium.rewards import Grade, Grader, RewardConfig
from podium.telemetry import Event, Note, subscribe
from tests.waits import LONG_S
from tests.warm_python import WarmPopen

SCRIPT = """
from podium.rewards import Grader

def score(completion, row):
    breakpoint()
    print("printed", completion)
    return float(row["answer"])

with Grader(reward=score, in_script=True) as grader:
    print("score", grader.grade(["word"], [{"answer": "3"}])[0].score)
"""


def stop(completion: str, row: Mapping[str, Any]) -> float:
    breakpoint()
    return 1.0


def ask(completion: str, row: Mapping[str, Any]) -> float:
    return float(input())


def read_nothing(completion: str, row: Mapping[str, Any]) -> float:
    raise EOFError("the cache is cut off")


def run_script(path: Path, typed: str) -> tuple[str, str]:
    path.write_text(SCRIPT)
    pipe = subprocess.PIPE
    with WarmPopen([sys.executable, str(path)], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        return process.communicate(typed, timeout=LONG_S)


def test_a_breakpoint_stops_in_the_reward_and_prints_appear(tmp_path: Path) -> None:
    out, errors = run_script(tmp_path / "script.py", "p completion, row\nup\nc\n")
    assert "('word', {'answer': '3'})" in out, errors
    assert "printed word" in out
    assert "score 3.0" in out


def test_leaving_the_debugger_ends_the_run(tmp_path: Path) -> None:
    out, errors = run_script(tmp_path / "script.py", "q\n")
    assert "score 3.0" not in out
    assert "RewardError: the debugger was left within the reward __main__:score" in errors


@pytest.mark.parametrize("reward", [stop, pytest.param(ask, marks=pytest.mark.exhaustive)])
def test_elsewhere_an_error_says_where_a_debugger_works(reward: Any) -> None:
    with Grader(RewardConfig(processes=1), reward=reward) as grader, pytest.raises(RewardError) as caught:
        grader.grade(["x"], [{}])
    assert "a grading process has no terminal: with --backend inline" in str(caught.value)


def test_another_end_of_file_is_only_itself() -> None:
    with Grader(RewardConfig(processes=1), reward=read_nothing) as grader, pytest.raises(RewardError) as caught:
        grader.grade(["x"], [{}])
    assert "raised EOFError: the cache is cut off; expected" in str(caught.value)


def test_it_runs_in_this_process_and_its_error_is_the_cause() -> None:
    error = ValueError("no such unit")
    pids: list[int] = []

    def score(completion: str, row: Mapping[str, Any]) -> float:
        pids.append(os.getpid())
        if completion == "raise":
            raise error
        return 1.0

    with Grader(RewardConfig(correct_at=2.0), reward=score, in_script=True) as grader:
        assert grader.grade(["a", "b"], [{}] * 2) == [Grade(1.0)] * 2
        assert grader.submit("a", {}).result() == Grade(1.0)
        with pytest.raises(RewardError, match=r"item 1, completion 'raise': the reward .* raised ValueError") as caught:
            grader.grade(["a", "raise", "c"], [{}] * 3)
    assert caught.value.__cause__ is error
    assert "in score" in str(caught.value)
    assert pids == [os.getpid()] * 5, "what follows an error is not scored"


def test_an_error_may_give_a_score_and_ctrl_c_passes() -> None:
    def score(completion: str, row: Mapping[str, Any]) -> float:
        raise KeyboardInterrupt if completion == "stop" else SystemExit(3)

    with Grader(RewardConfig(on_error="score", failure_score=-1.0), reward=score, in_script=True) as grader:
        (grade,) = grader.grade(["a"], [{}])
        assert (grade.score, grade.error) == (-1.0, "raised SystemExit: 3")
        with pytest.raises(KeyboardInterrupt):
            grader.grade(["stop"], [{}])


def test_ctrl_c_passes_a_reward_that_is_awaited() -> None:
    """It was the failure of the reward, and a run of a notebook went on."""

    async def score(completion: str, row: Mapping[str, Any]) -> float:
        await asyncio.sleep(0)
        raise KeyboardInterrupt if completion == "stop" else SystemExit(3)

    with Grader(RewardConfig(on_error="score", failure_score=-1.0), reward=score, in_script=True) as grader:
        (grade,) = grader.grade(["a"], [{}])
        assert (grade.score, grade.error) == (-1.0, "raised SystemExit: 3")
        with pytest.raises(KeyboardInterrupt):
            grader.grade(["a", "stop", "a"], [{}] * 3)


def test_over_the_time_limit_the_score_counts_and_that_is_noted_once() -> None:
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def slow(completion: str, row: Mapping[str, Any]) -> float:
        time.sleep(0.02)
        return 1.0

    unsubscribe = subscribe(hear)
    try:
        with Grader(RewardConfig(time_limit_s=0.01), reward=slow, in_script=True) as grader:
            assert grader.grade(["a"] * 3, [{}] * 3) == [Grade(1.0, {}, True)] * 3
    finally:
        unsubscribe()
    (note,) = notes
    assert "reward.time_limit_s = 0.01" in note
    assert "its score counts" in note


def test_threads_take_turns() -> None:
    inside: list[str] = []

    def alone(completion: str, row: Mapping[str, Any]) -> float:
        inside.append(completion)
        time.sleep(0.001)
        assert inside == [completion]
        inside.clear()
        return 1.0

    with Grader(reward=alone, in_script=True) as grader:
        results: list[Grade] = []
        threads = [
            threading.Thread(target=lambda: results.extend(grader.grade(list("abcd"), [{}] * 4))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [Grade(1.0, {}, True)] * 16
