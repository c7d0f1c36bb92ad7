"""What the page of ``podium view`` is told of a run."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.errors import ConfigError, DataError
from podium.runs.run_files import RunFiles
from podium_view.growing_file import GrowingFile
from podium_view.run import Run
from tests.made_runs import write_evaluations, write_run


def test_a_run_in_a_few_facts(run_with_trouble: Path) -> None:
    about = Run(run_with_trouble, "mine").answer("about")
    assert about["name"] == "mine"
    assert (about["phase"], about["step"], about["steps"], about["state"]) == ("grpo", 3, 3, "finished")
    assert (about["metric"], about["before"], about["after"]) == ("accuracy", "10.0%", "80.0%")
    assert about["data"] == "copy.jsonl"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is here"):
        Run(tmp_path, "x")


def test_curves_have_a_column_for_each_metric_and_say_what_is_not_finite(run_with_trouble: Path) -> None:
    curves = Run(run_with_trouble, "").answer("curves")
    assert curves["steps"]["step"] == [1, 2, 3]
    assert curves["steps"]["tokens"] == [1000.0, 2000.0, 3000.0]
    entropies = curves["steps"]["series"]["policy/entropy"]
    assert entropies[1] is None
    assert all(value > 0 for value in (entropies[0], entropies[2]))
    assert curves["nonfinite"] == [(2, "policy/entropy", "nan")]
    assert curves["evaluations"]["series"]["accuracy"] == [0.1, 0.8]
    json.dumps(curves, allow_nan=False)


def test_curves_of_many_steps_are_means(tmp_path: Path) -> None:
    rows = [
        {"kind": "step", "phase": "grpo", "step": n, "time": 60.0 * n, "loss": float(n), "tokens": 1}
        for n in range(12_001)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = Run(tmp_path, "").answer("curves")
    assert curves["every"] == 3
    assert curves["steps"]["step"][:2] == [2, 5]
    assert curves["steps"]["step"][-1] == 12_000
    assert curves["steps"]["series"]["loss"][:2] == [1.0, 4.0]
    assert curves["steps"]["minutes"][:2] == [2.0, 5.0]
    assert len(curves["steps"]["tokens"]) == len(curves["steps"]["step"]) == 4001
    assert curves["steps"]["tokens"][-1] == 12_001


def test_a_run_that_goes_on_is_read_on_and_one_that_was_rewound_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"kind": "step", "phase": "grpo", "time": 1.0}
    path.write_text(json.dumps({**row, "step": 1}) + "\n" + '{"kind": "step", "st')
    run = Run(tmp_path, "")
    before = run.signature()
    assert run.answer("curves")["steps"]["step"] == [1]
    with path.open("a") as file:
        file.write('ep": 2, "time": 2}\nnot json\n[1]\n{"step": "x"}\n')
    assert run.signature() != before
    assert run.answer("curves")["steps"]["step"] == [1, 2]
    aside = tmp_path / "aside"
    aside.write_text(json.dumps({**row, "step": 7}) + "\n")
    aside.replace(path)  # as a resumed run does
    assert run.answer("curves")["steps"]["step"] == [7]


def test_settings_are_texts_as_one_types_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("run: {name: x, steps: 3}\noptim: {lr: 1.0e-5, betas: [0.9, .nan], note: ''}\n")
    settings = Run(run, "").answer("settings")
    assert settings["values"] == {
        "run.name": "x", "run.steps": "3", "optim.lr": "1e-05", "optim.betas": "[0.9, NaN]", "optim.note": '""',
    }  # fmt: skip
    assert "run.name" in settings["uncompared"]
    (run / "config.yaml").unlink()
    assert Run(run, "").answer("settings")["values"] == {}


def test_prompts_of_two_evaluations_have_the_same_keys(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert Run(run, "").answer("evaluations") == []
    write_evaluations(run, {0: ["0", "0", None], 3: ["0", "1", "7"]})
    write_evaluations(run, {3: ["x"]}, name="a%20set")
    answer = Run(run, "").answer
    assert answer("evaluations") == [{"name": "", "steps": [0, 3]}, {"name": "a set", "steps": [3]}]
    first, last = answer("evaluation/0/0")["rows"], answer("evaluation/0/3")["rows"]
    assert [row["key"] for row in first] == [row["key"] for row in last[:2]]
    assert [row["correct"] for row in first] == [True, False]
    assert [row["reward"] for row in last] == [1.0, 1.0, 0.0]
    row = answer("evaluated/0/3/2")
    assert (row["expected"], row["n"]) == ("2", 1)
    assert [(one["completion"], one["correct"], one["finish_reason"]) for one in row["answers"]] == [("7", 0.0, None)]
    assert row["prompt"].endswith("Question 2")
    assert answer("evaluation/0/0")["accuracy"] == 0.1, "what the run has reported"
    assert (answer("evaluation/0/3")["accuracy"], answer("evaluation/1/3")["accuracy"]) == (0.8, None)
    for path in ("evaluation/0/1", "evaluation/2/0", "evaluated/0/3/3"):
        with pytest.raises(DataError):
            answer(path)


def test_equal_prompts_and_sessions_are_told_apart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "evaluations").mkdir()
    columns = {"prompt": ["same"] * 4, "completion": ["a", "b", "c", "d"], "reward": [0.0] * 4, "tokens": [[1]] * 4}
    sessions = {"session": [5, 5, 6, 6], "group": [2, 2, 4, 4]}
    pq.write_table(pa.table(columns | {"group": [0, 1, 2, 3]}), run / "evaluations" / "step-000001.parquet")
    pq.write_table(pa.table(columns | sessions), run / "evaluations" / "step-000002.parquet")
    answer = Run(run, "").answer
    assert len({row["key"] for row in answer("evaluation/0/1")["rows"]}) == 4
    assert [row["key"].rpartition("-")[2] for row in answer("evaluation/0/2")["rows"]] == ["2", "4"]
    assert [answer(f"evaluated/0/2/{row}")["answers"][0]["completion"] for row in range(2)] == ["a", "c"]
    (run / "evaluations" / "step-000003.parquet").write_text("no file of Parquet")
    with pytest.raises(DataError, match="cannot be read"):
        answer("evaluation/0/3")


@pytest.mark.parametrize("sessions", [{}, {"session": [8, 9, 3, 7, 7, 5]}])
def test_several_completions_of_a_prompt_are_one_prompt(tmp_path: Path, sessions: dict[str, list[int]]) -> None:
    """Each was a prompt of its own, whose number among equal prompts was another where the reward left some out."""
    run = write_run(tmp_path / "run")
    (run / "evaluations").mkdir()
    columns: dict[str, Any] = {
        "prompt": ["same", "same", "same", "same", "same", "same"],
        "group": [0, 0, 2, 2, 2, 1],
        "completion": ["a", "b", "c", "d", "e", "f"],
        "correct": [True, False, True, True, None, None],
        "reward": [1.0, 0.0, 1.0, 0.5, None, None],
        "tokens": [[1]] * 6,
    }
    pq.write_table(pa.table(columns | sessions), run / "evaluations" / "step-000001.parquet")
    answer = Run(run, "").answer
    rows = answer("evaluation/0/1")["rows"]
    kept = 2 if sessions else 3  # the rows of a session are one completion
    assert [row["n"] for row in rows] == [2, 1, kept]
    assert [(row["correct"], row["reward"]) for row in rows] == [
        (0.5, 0.5),
        (None, None),
        (1.0, 0.75),
    ]
    assert [row["key"].rpartition("-")[2] for row in rows] == ["0", "1", "2"]
    answers = answer("evaluated/0/1/2")["answers"]
    assert [one["completion"] for one in answers] == (["c", "d"] if sessions else ["c", "d", "e"])
    with pytest.raises(DataError, match="evaluated 3 prompts"):
        answer("evaluated/0/1/3")


def test_evaluations_of_preferences_are_shown(tmp_path: Path) -> None:
    """Their files have no tokens, and their verdicts are numbers."""
    run = write_run(tmp_path / "run")
    (run / "evaluations").mkdir()
    columns = {"prompt": ["a", "b"], "group": [0, 1], "expected": ["c", "d"], "correct": [0.5, 1.0], "loss": [0.7, 0.2]}
    pq.write_table(pa.table(columns), run / "evaluations" / "step-000001.parquet")
    rows = Run(run, "").answer("evaluation/0/1")["rows"]
    assert [(row["correct"], row["loss"], row["n"]) for row in rows] == [(0.5, 0.7, 1), (1.0, 0.2, 1)]


def test_groups_of_a_step(run_with_trouble: Path) -> None:
    answer = Run(run_with_trouble, "").answer("groups/2")
    assert [group["group"] for group in answer["groups"]] == [0, 1]
    table = pq.read_table(run_with_trouble / "completions" / "step-000002.parquet").to_pydict()
    assert [group["mean"] for group in answer["groups"]] == [sum(table["reward"][:2]) / 2, sum(table["reward"][2:]) / 2]
    assert answer["groups"][0]["prompt"] == "Explain, in step 2, question 0."
    assert answer["groups"][1]["cut"] == table["finish_reason"][2:].count("length")
    assert answer["graded"]


def test_a_group_has_what_is_known_of_each_token(run_with_trouble: Path) -> None:
    answer = Run(run_with_trouble, "").answer("group/2/1/0")
    assert (answer["n"], answer["expected"]) == (2, "1")
    table = pq.read_table(run_with_trouble / "completions" / "step-000002.parquet").to_pydict()
    for row, index in zip(answer["rows"], (2, 3), strict=True):
        assert row["tokens"] == table["tokens"][index]
        assert row["text"] == table["completion"][index]
        assert sum(row["chars"]) == len(row["text"])
        assert row["mismatch"] == pytest.approx(table["token_mismatch"][index], rel=1e-4)
        assert all(abs(value) <= 0.0101 for value in row["mismatch"])
        assert row["parts"] == {"form": table["reward_form"][index]}
        for name in ("advantages", "versions", "kept"):
            values = row[name] if isinstance(row[name], list) else [row[name]] * len(row["tokens"])
            assert values == pytest.approx(table[f"token_{name}"][index], rel=1e-4)


def test_a_row_of_a_session_has_its_turns(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", sessions=True), "")
    table = pq.read_table(tmp_path / "run" / "completions" / "step-000002.parquet").to_pydict()
    for row, index in zip(run.answer("group/2/1/0")["rows"], (2, 3), strict=True):
        assert (row["session"], row["agent"], row["text"]) == (index, "critic", "".join(table["turn_said"][index]))
        assert sum(row["chars"]) == len(row["text"]) == sum(turn["characters"] for turn in row["turns"])
        assert [turn["read"] for turn in row["turns"]] == table["turn_read"][index]
        assert [turn["tokens"] for turn in row["turns"]] == table["turn_tokens"][index]
        assert [turn["reward"] for turn in row["turns"]] == [0.5, 0.0]


@pytest.mark.parametrize("broken", [{"turn_tokens": [[1]]}, {"turn_read": [["a", "b"]]}, {"turn_said": [None]}])
def test_turns_that_do_not_fit_the_row_are_left_out(broken: dict[str, Any], tmp_path: Path) -> None:
    columns = {"group": [0], "completion": ["last"], "tokens": [[1, 2]]}
    turns = {"turn_read": [["a"]], "turn_said": [["xy"]], "turn_tokens": [[2]], "turn_rewards": [[0.0]]}
    for part, changes in (("whole", {}), ("broken", broken)):
        (tmp_path / part).mkdir()
        row = _only_file(tmp_path / part, columns | turns | changes).answer("group/1/0/0")["rows"][0]
        assert ("turns" in row, row["text"]) == ((True, "xy") if part == "whole" else (False, "last"))


def test_a_list_of_one_value_is_that_value(tmp_path: Path) -> None:
    columns = {
        "group": [0],
        "completion": ["ab"],
        "tokens": [[1, 2]],
        "token_chars": [[1, 1]],
        "token_versions": [[3, 3]],
    }
    row = _only_file(tmp_path, columns).answer("group/1/0/0")["rows"][0]
    assert (row["chars"], row["versions"]) == ([1, 1], 3)
    assert row["reward"] is None


def test_a_step_that_was_not_graded(tmp_path: Path) -> None:
    columns = {"group": [0, 0], "completion": ["a", "b"], "tokens": [[1], [2]], "reward": [math.nan, math.nan]}
    run = _only_file(tmp_path, columns)
    assert run.answer("groups/1")["groups"] == [
        {"group": 0, "n": 2, "correct": 0, "judged": 0, "cut": 0, "prompt": "", "mean": None, "low": None, "high": None}
    ]
    assert not run.answer("groups/1")["graded"]
    json.dumps(run.answer("group/1/0/0"), allow_nan=False)


def test_the_rows_of_an_agent_in_a_session_are_one_completion(tmp_path: Path) -> None:
    columns = {
        "group": [0, 0, 0, 0, 1],
        "session": [7, 7, 7, 8, 9],
        "agent": ["", "", "critic", "", ""],
        "completion": [""] * 5,
        "tokens": [[1]] * 5,
        "reward": [3.0, 3.0, 1.0, 2.0, 5.0],
        "correct": [True, True, None, False, True],
        "finish_reason": ["stop", "length", "stop", "stop", "stop"],
    }
    first, second = _only_file(tmp_path, columns).answer("groups/1")["groups"]
    assert first == {
        "group": 0, "n": 3, "correct": 1, "judged": 2, "cut": 1, "prompt": "", "mean": 2.0, "low": 1.0, "high": 3.0,
    }  # fmt: skip
    assert second["n"] == 1


def test_a_large_group_comes_in_pages(tmp_path: Path) -> None:
    run = _only_file(tmp_path, {"group": [0] * 3, "completion": [""] * 3, "tokens": [[1] * 60_000] * 3})
    assert len(run.answer("group/1/0/0")["rows"]) == 1
    page = run.answer("group/1/0/2")
    assert (page["first"], len(page["rows"]), page["n"]) == (2, 1, 3)


def _only_file(folder: Path, columns: dict[str, Any]) -> Run:
    (folder / "completions").mkdir()
    (folder / "metrics.jsonl").touch()
    pq.write_table(pa.table(columns), folder / "completions" / "step-000001.parquet")
    return Run(folder, "")


@pytest.mark.parametrize("content", [b"", b"PAR1 no", None])
def test_a_file_that_cannot_be_read_is_said_to_be_so(tmp_path: Path, content: bytes | None) -> None:
    run = _only_file(tmp_path, {"x": [1]})
    if content is not None:
        (tmp_path / "completions" / "step-000001.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"^completions/step-000001\.parquet (cannot be read|lacks the col)"):
        run.answer("groups/1")
    with pytest.raises(DataError, match="step 2 has no completions"):
        run.answer("groups/2")


def test_the_timeline_of_some_steps(run_with_trouble: Path) -> None:
    run = Run(run_with_trouble, "")
    index = run.answer("timeline")
    assert [step for step, _ in index["steps"]] == [1, 2, 3]
    assert {name for *_, name in index["tracks"]} >= {
        "policy 0",
        "policy 1",
        "generator 0",
        "calls",
        "collect",
        "learn",
    }
    assert index["ended"]
    window = run.answer("slices/0/1/1")
    assert window["until"] == index["steps"][1][1]
    names = [entry["name"] for entry in window["slices"]]
    assert names.count("update") == 3  # the stage and both ranks
    assert names.count("submit policy.update") == 1
    assert [entry["rank"] for entry in window["slices"] if entry.get("failed")] == [1]
    everything = run.answer("slices/0/0/3")
    assert len([entry for entry in everything["slices"] if entry["name"] == "generate"]) == 9
    assert all(entry["at"] >= 0 for entry in everything["slices"])
    with pytest.raises(DataError, match="3 steps"):
        run.answer("slices/0/2/9")


def test_columns_of_other_types_count_as_absent(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"group": [0, None, 1], "tokens": [[1], [2], None], "reward": ["a", "b", "c"]}
    columns |= {
        "prompt": [1, 2, 3],
        "completion": [["x"], [], []],
        "token_chars": ["a", "b", "c"],
        "correct": [1, 0, 1],
    }
    columns |= {"reward_x": [{"a": 1}] * 3, "version": [0.5] * 3, "finish_reason": [b"\xff"] * 3}
    run = _only_file(tmp_path, columns)
    assert [group["n"] for group in run.answer("groups/1")["groups"]] == [1, 1]
    assert run.answer("group/1/1/0")["rows"][0]["tokens"] == []
    for path in ("groups/1", "group/1/0/0"):
        json.dumps(run.answer(path), allow_nan=False)


@pytest.mark.parametrize(
    "row", [{"time": 1e999}, {"step": 10**400}, {"loss": -1e999}, {"nonfinite": {"a" * 999: "nan"}}, {"time": "x"}]
)
def test_strange_metrics_break_nothing(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"kind": "step", "step": 1, "time": 1.0, "loss": 2.0, **row}) + "\n"
    )
    run = Run(tmp_path, "")
    for path in ("curves", "about", "failures"):
        json.dumps(run.answer(path), allow_nan=False)


def test_the_last_step_is_so_many_seconds_ago(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": 1, "time": time.time() - 100}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert 99 <= Run(tmp_path, "").answer("about")["quiet_s"] <= 200


def test_a_slice_that_ends_in_a_later_step_is_in_the_step_in_which_it_began(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    lines = [
        {"ph": "i", "name": "step 1 finished", "pid": 1, "tid": 1, "ts": 1e6},
        {"ph": "X", "name": "quick", "pid": 2, "tid": 1, "ts": 1.1e6, "dur": 1e5},
        {"ph": "i", "name": "step 2 finished", "pid": 1, "tid": 1, "ts": 2e6},
        {"ph": "X", "name": "long", "pid": 2, "tid": 2, "ts": 1.5e6, "dur": 1e6},
        {"ph": "X", "name": "later", "pid": 2, "tid": 1, "ts": 2.1e6, "dur": 1e5},
        {"ph": "i", "name": "step 3 finished", "pid": 1, "tid": 1, "ts": 3e6},
    ]
    (tmp_path / "trace.json").write_text(
        "[\n" + "".join(json.dumps(line, separators=(",", ":")) + ",\n" for line in lines)
    )
    run = Run(tmp_path, "")
    assert [entry["name"] for entry in run.answer("slices/0/1/1")["slices"]] == ["quick", "long"]
    assert [entry["name"] for entry in run.answer("slices/0/2/2")["slices"]] == ["long", "later"]


def test_a_trace_that_grows_is_read_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    trace = (folder / "trace.json").read_bytes()
    half = trace.index(b"step 1 finished")
    (folder / "trace.json").write_bytes(trace[:half])
    run = Run(folder, "")
    assert run.answer("timeline")["steps"] == []
    assert run.answer("slices/0/0/0")["slices"]
    with (folder / "trace.json").open("ab") as file:
        file.write(trace[half:])
    assert [step for step, _ in run.answer("timeline")["steps"]] == [1, 2]


def test_failures_are_named_with_their_places(run_with_trouble: Path) -> None:
    answer = Run(run_with_trouble, "").answer("failures")
    failures = {failure["kind"]: failure for failure in answer["found"]}
    assert failures["lost worker"]["says"] == "lost: signal SIGKILL on localhost"
    assert failures["lost worker"]["where"] == "policy 1"
    assert failures["failed call"]["step"] == 2
    assert "policy.update" in failures["stall"]["says"]
    assert failures["not finite"] == {"kind": "not finite", "step": 2, "says": "policy/entropy = nan"}
    assert failures["dropped"]["says"] == "2 prompts: the run was stopped"
    assert failures["warning"]["says"] == "podium: it is \x1b[31mred"
    assert failures["traceback"]["says"] == "ValueError: no <b>number</b>"
    assert 'File "x.py"' in failures["traceback"]["more"]
    assert answer["logs"][0]["name"] == "policy-1.log"


def test_a_quiet_run_has_no_failures(tmp_path: Path) -> None:
    assert Run(write_run(tmp_path / "run"), "").answer("failures")["found"] == []


@pytest.mark.parametrize("path", ["", "x", "group", "group/1", "groups/../1", "groups/-1", "groups/1/2/3/4", "about/1"])
def test_paths_that_name_nothing(run_with_trouble: Path, path: str) -> None:
    with pytest.raises(LookupError):
        Run(run_with_trouble, "").answer(path)


@pytest.mark.parametrize(
    ("places", "shown"),
    [
        (
            {"/home/me/sums.jsonl": {"given": "sums.jsonl", "from_run": "../sums.jsonl", "nbytes": 1, "sha256": None}},
            "sums.jsonl",
        ),
        ({"/home/me/sums.jsonl": 1}, "/home/me/sums.jsonl"),
        ([], "/home/me/sums.jsonl"),
    ],
)
def test_paths_are_shown_as_the_user_wrote_them(tmp_path: Path, places: Any, shown: str) -> None:
    (tmp_path / "config.yaml").write_text("data: {train: /home/me/sums.jsonl}")
    (tmp_path / "places.json").write_text(json.dumps(places))
    assert Run(tmp_path, "").answer("about")["data"] == shown


def test_links_and_pipes_in_a_run_are_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"kind": "step", "step": 1, "loss": 7}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(secret)
    (run / "completions").symlink_to(tmp_path)
    (run / "logs").mkdir()
    (run / "logs" / "a.log").symlink_to(secret)
    os.mkfifo(run / "logs" / "b.log")
    os.mkfifo(run / "trace.json")
    (run / "config.yaml").write_text("a: 1")
    shown = Run(run, "")
    for path in ("curves", "steps", "timeline"):
        with pytest.raises(DataError):
            shown.answer(path)
    assert "is a link" in shown.answer("about")["complaints"][-1]
    (run / "metrics.jsonl").unlink()
    (run / "trace.json").unlink()
    tails = {log["name"]: log["tail"] for log in shown.answer("failures")["logs"]}
    assert "loss" not in str(tails)
    assert "is a link" in tails["a.log"]
    assert "no regular file" in tails["b.log"]


def test_lines_of_a_growing_file_are_whole(tmp_path: Path) -> None:
    file = GrowingFile(RunFiles(tmp_path), "log")
    assert file.read() == (False, b"")
    (tmp_path / "log").write_bytes(b"one\ntw")
    assert file.read() == (False, b"one\n")
    with (tmp_path / "log").open("ab") as more:
        more.write(b"o\n")
    assert file.read() == (False, b"two\n")
    (tmp_path / "log").write_bytes(b"x\n")
    assert file.read() == (True, b"x\n")


@pytest.mark.parametrize(
    "line",
    [
        b'{"ph":"i","pid":1e400,"tid":null,"ts":NaN,"name":7,"args":[1]}',
        b'{"ph":"M","name":"thread_name"}',
        b'{"ph":"X","ok":false,"ts":"x","dur":1e999,"args":{"ok":false}}',
        b'{"ph":"i"',
        b'{"ph":"i","s":' + b"[" * 5000,
    ],
)
def test_a_strange_trace_breaks_nothing(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "trace.json").write_bytes(b"[\n" + line + b",\n")
    run = Run(tmp_path, "")
    for path in ("timeline", "slices/0/0/0", "failures"):
        json.dumps(run.answer(path), allow_nan=False)
