"""trace.json holds what a viewer needs: named tracks, slices that nest, arrows with both ends inside slices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from podium.telemetry import (
    CallFinished,
    CheckpointSaved,
    EvalFinished,
    Event,
    Note,
    StageFinished,
    Stalled,
    StepFinished,
    WorkerLost,
    WorkerStarted,
    emit,
)
from podium.telemetry.sinks import TraceSink

MS = 1_000_000


def call(role: str, rank: int, call_id: int, submitted: int, started: int, ended: int, ok: bool = True) -> CallFinished:
    return CallFinished(role, "update", rank, "node-0", call_id, submitted * MS, started * MS, ended * MS, ok)


def trace(path: Path, events: list[Event], **options: Any) -> list[dict[str, Any]]:
    with TraceSink(path, **options):
        for event in events:
            emit(event)
    return json.loads(path.read_text())


def check_structure(lines: list[dict[str, Any]]) -> None:
    """The rules a viewer relies on, whatever the run was."""
    named = {(line["pid"], line["tid"]) for line in lines if line["ph"] == "M" and line["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if line["ph"] in "Xisf":
            assert (line["pid"], line["tid"]) in named, f"a track without a name: {line}"
        if line["ph"] == "X":
            assert line["dur"] >= 0
            slices[line["pid"], line["tid"]].append((line["ts"], line["ts"] + line["dur"]))
    for track in slices.values():
        open_ends: list[float] = []
        for start, end in sorted(track, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of one track overlap without nesting"
            open_ends.append(end)
    ends = {phase: {line["id"]: line for line in lines if line["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert sum(line["ph"] in "sf" for line in lines) == 2 * len(ends["s"]), "a flow has one start and one end"
    for line in lines:
        if line["ph"] in "sf":
            around = slices[line["pid"], line["tid"]]
            assert any(start <= line["ts"] <= end for start, end in around), f"an arrow's end in no slice: {line}"
    assert all(ends["s"][i]["ts"] <= ends["f"][i]["ts"] for i in ends["s"])


def test_a_track_a_worker_and_a_flow_from_the_submission_to_each_rank(tmp_path: Path) -> None:
    lines = trace(
        tmp_path / "trace.json",
        [
            WorkerStarted("policy", 0, "node-0", 11),
            WorkerStarted("policy", 1, "node-0", 12),
            call("policy", 1, 7, 10, 12, 19),
            call("policy", 0, 7, 10, 11, 20),
            StageFinished("update", 3, 9 * MS, 21 * MS),
        ],
    )
    check_structure(lines)
    tracks = {line["args"]["name"]: (line["pid"], line["tid"]) for line in lines if line["name"] == "thread_name"}
    processes = {line["args"]["name"] for line in lines if line["name"] == "process_name"}
    assert processes == {"controller", "policy"}
    assert set(tracks) == {"run", "learn", "calls", "policy 0", "policy 1"}
    slices = {(line["pid"], line["tid"]): line for line in lines if line["ph"] == "X"}
    assert slices[tracks["learn"]]["name"] == "update"
    assert slices[tracks["learn"]]["args"] == {"step": 3}
    assert slices[tracks["calls"]]["name"] == "submit policy.update"
    assert (slices[tracks["policy 1"]]["ts"], slices[tracks["policy 1"]]["dur"]) == (12_000.0, 7_000.0)
    starts = [line for line in lines if line["ph"] == "s"]
    ends = [line for line in lines if line["ph"] == "f"]
    assert {(line["pid"], line["tid"]) for line in starts} == {tracks["calls"]}
    assert {(line["pid"], line["tid"]) for line in ends} == {tracks["policy 0"], tracks["policy 1"]}
    assert all(line["bp"] == "e" for line in ends)


def test_the_halves_of_steps_that_overlap_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    stages = [("update", 1, 2, 9, "learn"), ("generate", 2, 1, 12, "collect"), ("update", 2, 13, 15, "learn")]
    lines = trace(
        tmp_path / "trace.json",
        [StageFinished(name, step, start * MS, end * MS, half) for name, step, start, end, half in stages],
    )
    check_structure(lines)
    tracks = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    slices = [(tracks[line["tid"]], line["name"], line["args"]["step"]) for line in lines if line["ph"] == "X"]
    assert slices == [("learn", "update", 1), ("collect", "generate", 2), ("learn", "update", 2)]


def test_overlapping_calls_get_a_second_track(tmp_path: Path) -> None:
    # Three endpoints at once on one worker, answered shortest first, then one after them all.
    answers = [(4, 4, 6), (3, 3, 7), (2, 2, 9), (10, 10, 11)]
    lines = trace(
        tmp_path / "trace.json",
        [call("generator", 0, i, submitted, started, ended) for i, (submitted, started, ended) in enumerate(answers)],
    )
    check_structure(lines)
    names = [line["args"]["name"] for line in lines if line["name"] == "thread_name"]
    assert names.count("generator 0") == 1
    assert {"generator 0 (+1)", "generator 0 (+2)"} <= set(names)
    assert "generator 0 (+3)" not in names


@pytest.mark.exhaustive
def test_a_long_run_of_pipelined_calls_keeps_its_structure_and_its_memory(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", chunk=64)
    held: list[int] = []
    for i in range(3000):
        for rank in range(2):
            sink(call("policy", rank, i, i * 10, i * 10 + 1 + rank, i * 10 + 9))
        held.append(len(sink._lines) + len(sink._call_tracks))
    assert max(held) <= 64 + 20 + 4096
    sink.close()
    lines = json.loads((tmp_path / "trace.json").read_text())
    check_structure(lines)
    assert Counter(line["ph"] for line in lines)["X"] == 3000 * 3


def test_failures_stalls_and_the_rest_are_marks(tmp_path: Path) -> None:
    lines = trace(
        tmp_path / "trace.json",
        [
            call("policy", 0, 1, 1, 2, 3, ok=False),
            WorkerLost("policy", 1, "node-0", "signal SIGKILL"),
            Stalled("policy", "update", (1, 3), 31.5),
            EvalFinished(4, 500, {"accuracy": float("nan"), "reward_mean": 0.1}),
            CheckpointSaved(4, "checkpoints/step-000004"),
            Note("hello"),
            StepFinished(4, {"reward/mean": 0.5, "tokens_per_s/step": float("inf"), "policy/kl": 0.1}),
        ],
    )
    check_structure(lines)
    marks = [line["name"] for line in lines if line["ph"] == "i"]
    assert marks == [
        "lost: signal SIGKILL", "stalled: policy.update", "evaluated", "checkpoint saved", "hello",
        "step 4 finished", "end of the run",
    ]  # fmt: skip
    (failed,) = [line for line in lines if line["name"] == "update"]
    assert failed["args"]["ok"] is False
    assert failed["cname"] == "terrible"
    assert [(line["name"], line["args"]) for line in lines if line["ph"] == "C"] == [("reward/mean", {"value": 0.5})]


def test_the_file_of_a_killed_run_is_whole_but_for_the_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    script = f"""
import os, signal
from podium.telemetry import CallFinished, emit, flush
from podium.telemetry.sinks import TraceSink
TraceSink({str(path)!r}, chunk=10).attach()
for i in range(100):
    emit(CallFinished("policy", "update", 0, "node-0", i, 10 * i, 10 * i + 1, 10 * i + 9, True))
flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith(",\n")
    lines = json.loads(text.rstrip(",\n") + "]")
    check_structure(lines)
    assert sum(line["ph"] == "X" for line in lines) >= 190


def test_the_trace_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    events: list[Event] = [call("policy", 0, i, i, i, i + 1) for i in range(500)]
    lines = trace(path, events, chunk=16, limit_bytes=20_000)
    check_structure(lines)
    assert path.stat().st_size < 30_000
    assert "limit" in lines[-1]["name"]
    (record,) = caplog.records
    assert "20000 bytes" in record.getMessage()


def test_a_script_that_forgets_to_close_has_a_complete_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    script = f"""
import os
from podium.telemetry import Note, emit
from podium.telemetry.sinks import TraceSink
TraceSink({str(path)!r}).attach()
emit(Note("hello"))
if os.fork() == 0:
    raise SystemExit  # a child that exits in good order, with a copy of the buffer
os.wait()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    names = [line["name"] for line in json.loads(path.read_text()) if line["ph"] == "i"]
    assert names == ["hello", "end of the run"]
