"""Each prompt is in one state, and what the file says is what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podium.errors import CheckpointError, PodiumError
from podium.runs.ledger import Ledger, read_ledger


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_prompt_goes_through_the_states_in_order(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, 2)
    ledger.take(1, 2)
    ledger.move(1, "rolled_out", versions=[(0, 0), (0, 1)])
    ledger.take(2, 4)
    ledger.move(1, "graded")
    assert ledger.states.counts() == {"graded": 2, "taken": 2}
    ledger.move(1, "trained")
    assert ledger.states.counts() == {"trained": 2, "taken": 2}
    assert ledger.states.in_flight() == [2, 3]
    ledger.drop("the run ended", 3)
    assert (ledger.states.counts(), ledger.states.reasons) == ({"trained": 2, "dropped": 2}, {"the run ended": 2})
    ledger.close()
    assert lines(ledger.path)[:3] == [
        {"first": 0},
        {"state": "taken", "step": 1, "prompts": [0, 1]},
        {"state": "rolled_out", "step": 1, "prompts": [0, 1], "versions": [[0, 0], [0, 1]]},
    ]
    assert read_ledger(ledger.path).counts() == ledger.states.counts()


def test_no_prompt_is_trained_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, 2)
    ledger.move(1, "trained")
    ledger.move(1, "trained")  # the step has no prompts in flight any more
    for line in (
        {"state": "trained", "step": 1, "prompts": [1]},
        {"state": "taken", "step": 2, "prompts": [1]},
        {"state": "dropped", "step": 1, "prompts": [0], "reason": "late"},
        {"state": "returned", "prompts": [0]},
    ):
        with pytest.raises(PodiumError, match=r"prompt [01] is trained and cannot become"):
            ledger.states.enter(line)
    ledger.take(2, 3)
    ledger.move(2, "graded")
    with pytest.raises(PodiumError, match="prompt 2 is graded and cannot become rolled_out"):
        ledger.move(2, "rolled_out")
    ledger.close()


def test_a_resumed_run_takes_again_what_was_in_flight_at_the_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, 2)
    ledger.move(1, "trained")
    ledger.take(2, 4)
    ledger.move(2, "graded")
    size, _ = ledger.sync()  # the checkpoint
    ledger.move(2, "trained")
    ledger.take(3, 6)
    ledger.close()
    with ledger.path.open("a") as file:
        file.write('{"state": "grad')  # a kill
    assert read_ledger(ledger.path).counts() == {"trained": 4, "taken": 2}
    again = Ledger(ledger.path, 2, size)
    assert again.states.counts() == {"trained": 2, "returned": 2}
    again.take(2, 4)
    again.move(2, "trained")
    again.take(3, 6)
    assert again.states.counts() == {"trained": 4, "taken": 2}
    again.close()
    assert read_ledger(ledger.path).counts() == {"trained": 4, "taken": 2}


def test_what_no_step_took_again_is_dropped_with_the_end_of_a_resumed_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.take(step, 2 * step)
    ledger.move(1, "trained")
    ledger.close()
    again = Ledger(ledger.path, 2, ledger.path.stat().st_size)
    again.take(2, 4)
    again.drop("the run ended", 3)
    assert again.states.counts() == {"trained": 2, "dropped": 4}
    again.close()
    assert read_ledger(ledger.path).reasons == {"the run ended": 4}


def test_another_runs_file_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", 10)
    ledger.take(1, 14)
    ledger.move(1, "trained")
    size, _ = ledger.sync()
    ledger.close()
    Ledger(ledger.path, 14, size).close()
    with pytest.raises(
        CheckpointError, match=r"goes on at prompt 14, and the checkpoint at prompt 12: put the run's own"
    ):
        Ledger(ledger.path, 12, size)
    with pytest.raises(CheckpointError, match=rf"has {size} bytes, and had {size + 1} when the checkpoint was made"):
        Ledger(ledger.path, 14, size + 1)
    for wrong in (
        b"[]\n",
        b'{"state": "gone", "prompts": []}\n',
        b'{"state": "trained", "prompts": [70]}\n',
        b"\xff\n",
    ):
        ledger.path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="line 1: no entry of a ledger"):
            read_ledger(ledger.path)


def test_a_run_without_a_checkpoint_begins_a_new_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        ledger = Ledger(path)
        ledger.take(1, 3)
        ledger.close()
    assert lines(path) == [{"first": 0}, {"state": "taken", "step": 1, "prompts": [0, 1, 2]}]


def test_places_stay_those_of_the_step_when_some_of_its_prompts_are_dropped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, 3)
    ledger.move(1, "dropped", [0], reason="the reward scored no completion")
    ledger.move(1, "rolled_out", [2])
    assert ledger.states.in_flight() == [1, 2]
    assert ledger.states.in_flight([1], ["rolled_out"]) == [2]
    ledger.move(1, "trained")
    assert ledger.states.counts() == {"trained": 2, "dropped": 1}
    ledger.move(1, "trained")  # nothing of the step is in flight any more
    ledger.close()


def test_suspects_are_dropped_where_others_are_taken(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.take(1, 4, {1: "in flight in two losses of rollout", 9: "later"})
    ledger.move(1, "rolled_out", [1])
    assert ledger.states.in_flight([1], ["rolled_out"]) == [2]
    assert ledger.states.reasons == {"in flight in two losses of rollout": 1}
    assert ledger.states.next == 4
    ledger.close()
    assert read_ledger(ledger.path).counts() == {"taken": 2, "rolled_out": 1, "dropped": 1}
