"""All readers of a run's directory say the same of it, and a damaged or hostile file breaks none of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import RunRecord
from podium.runs.run_writer import RunDirectory
from podium_view.run import Run
from tests.made_runs import make_run, write_evaluations

RUN = """
import sys
from podium.runs.run_writer import RunDirectory
from podium.telemetry import StepFinished
from podium.telemetry.sinks import JsonlSink
run = RunDirectory(sys.argv[1])
run.write_config("run: {steps: 5}")
sink = JsonlSink(run.metrics_path)
for step in (1, 2):
    sink.handle(StepFinished(step=step, metrics={"loss": 1.0}))
sink.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_run_that_was_killed_is_the_same_to_all_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", RUN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        page = Run(path, "run")
        try:
            assert read_everywhere(path, page, capsys) == [("running", 2)] * 3
            with pytest.raises(ConfigError, match=f"is being written to by process {process.pid}"):
                RunDirectory(path)
            running = page.signature()
        finally:
            process.send_signal(signal.SIGKILL)
    assert page.signature() != running, "the page asks again"
    assert read_everywhere(path, page, capsys) == [("unfinished", 2)] * 3
    with pytest.raises(ConfigError, match=r"holds a run \(unfinished at step 2\): resume it"):
        RunDirectory(path)
    RunDirectory(path, resume=True).close()


def write_rows(path: Path, *rows: dict[str, Any]) -> RunRecord:
    """A run with these rows in metrics.jsonl."""
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text("run: {steps: 9}\n")
    (path / "metrics.jsonl").write_text("".join(json.dumps({"phase": "sft", **row}) + "\n" for row in rows))
    return RunRecord(path)


def step_row(step: int, time: float, took_s: float = 10.0) -> dict[str, Any]:
    return {"kind": "step", "step": step, "time": time, "time/step": took_s}


def eval_row(step: int, time: float, loss: float | None = 1.0) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "time": time, "metric": "loss", "loss": loss, "items": 4}


def test_a_pause_before_a_resume_and_a_clock_that_was_set_back_are_no_time_of_a_run(tmp_path: Path) -> None:
    """The run was killed after its second step, was resumed a day later, and then the clock was set back."""
    rows = [eval_row(0, 100.0), step_row(1, 110.0), step_row(2, 120.0), eval_row(2, 125.0)]
    assert write_rows(tmp_path, *rows).seconds == 25.0
    assert write_rows(tmp_path, *rows, step_row(3, 86_535.0)).seconds == 35.0
    assert write_rows(tmp_path, *rows, step_row(3, 86_535.0), eval_row(3, 50.0)).seconds == 35.0


def test_an_evaluation_beside_which_the_next_step_was_drawn_counts_once(tmp_path: Path) -> None:
    """With overlapping halves a step lasts from the end of the one before, so that it has the evaluation's time."""
    rows = [eval_row(0, 100.0), step_row(1, 110.0), eval_row(1, 130.0), step_row(2, 140.0, took_s=30.0)]
    assert write_rows(tmp_path, *rows).seconds == 40.0
    assert write_rows(tmp_path, *rows[:3], step_row(2, 140.0)).seconds == 40.0, "sync"
    late = [eval_row(2, 145.0), step_row(3, 160.0, took_s=18.0), step_row(4, 170.0)]
    assert write_rows(tmp_path, *rows, *late).seconds == 70.0, "a step that was drawn during a part of the evaluation"


def test_a_summary_says_nothing_of_a_run_that_was_resumed_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time, its model and its best checkpoint are those of the earlier end."""
    summary = {"steps": 1, "finished": True, "wall_s": 4.0, "model_path": "model", "best_checkpoint": "a/step-000001"}
    (tmp_path / "model").mkdir()
    record = write_rows(tmp_path, step_row(1, 10.0))
    (tmp_path / "config.yaml").write_text("run: {steps: 1}\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert (record.state, record.seconds, record.result("model_path")) == ("finished", 4.0, tmp_path / "model")
    record = write_rows(tmp_path, step_row(1, 10.0), step_row(2, 20.0))
    assert (record.state, record.seconds, record.result("model_path")) == ("unfinished", 20.0, None)
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "took 20" in shown and "model path" not in shown and "best checkpoint" not in shown


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ("run: {steps: 9}", "unfinished"),
        ("run: {steps: 3}", "finished"),
        ("run: {steps: 9}\neval: {stop_at: 0.5}", "finished"),
        ("run: {steps: 9}\neval: {patience: 2}", "finished"),
        ("run: {steps: 9, epochs: 1}", "finished"),
    ],
)
def test_a_finished_run_that_was_resumed_with_more_steps_and_killed_is_unfinished(
    tmp_path: Path, settings: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the first of these steps it was "finished", at 3 steps of 9. Others may have ended early."""
    run = make_run(tmp_path / "run", finished=True)
    (run / "config.yaml").write_text(settings)
    assert RunRecord(run).state == Run(run, "").answer("about")["state"] == state
    assert main(["runs", str(run)]) == 0
    assert f"run: {state} at step 3" in capsys.readouterr().out


def test_a_directory_in_which_a_run_starts_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model may take minutes to load, and a kill then leaves the directory."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    commands = (["runs", str(run)], ["view", str(run)], ["changes", str(run)])
    with RunFiles(run).lock():
        assert [main(command) for command in commands] == [2, 2, 2]
        assert capsys.readouterr().err.count(f"{run}: a run starts here; it has a config.yaml once its models are") == 3
    assert [main(command) for command in commands] == [2, 2, 2]
    assert capsys.readouterr().err.count(f"{run}: a run ended here while it started, before it had a config.yaml") == 3


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_last_evaluation_that_is_not_finite_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    write_rows(tmp_path / "a", eval_row(0, 1.0), {**eval_row(2, 2.0, None), "nonfinite": {"loss": value}})
    write_rows(tmp_path / "b", eval_row(0, 1.0, 7.0))
    assert main(["runs", "--best", str(tmp_path)]) == 0
    _, best, worst = capsys.readouterr().out.splitlines()
    assert "loss 7" in best and f"loss {value}" in worst


def read_everywhere(path: Path, page: Run, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int]]:
    """The state and the step by `podium runs`, by the page of `podium view`, and by `podium changes`."""
    assert main(["runs", str(path)]) == 0
    shown = capsys.readouterr().out.removeprefix(f"{path}: ").split(",")[0].split(" at step ")
    about = page.answer("about")
    assert main(["changes", str(path)]) == 2
    said = capsys.readouterr().err.partition(f"{path} (")[2].partition(")")[0].split(" at step ")
    return [(shown[0], int(shown[1])), (about["state"], about["step"]), (said[0], int(said[1]))]


def test_a_run_begins_while_somebody_reads_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").touch()
    reader, flock, refusals = (tmp_path / ".lock").open("rb"), fcntl.flock, list[BlockingIOError]()
    flock(reader, fcntl.LOCK_SH)

    def watch(file: Any, flags: int) -> None:
        try:
            flock(file, flags)
        except BlockingIOError as error:
            refusals.append(error)
            reader.close()
            raise

    monkeypatch.setattr(fcntl, "flock", watch)
    with RunFiles(tmp_path).lock():
        assert len(refusals) == 1
        assert RunRecord(tmp_path).state == "running"


@pytest.mark.parametrize("text", ["", "[", "[]", "a: [", "7", '{"steps": "x"}', "[" * 5000, "a: &a {b: *a, c: 1}"])
def test_a_damaged_file_counts_as_a_missing_one(tmp_path: Path, text: str) -> None:
    for name in ("config.yaml", "summary.json", "metrics.jsonl", "places.json", "checkpoints"):
        (tmp_path / name).write_text(text)
    record = RunRecord(tmp_path)
    assert record.state == "unknown"
    assert (record.step, record.end, record.checkpoints, record.rows) == (0, None, [], [])
    assert "run.steps" not in record.settings


ROWS = [
    '{"kind": "eval", "phase": null, "step": 0, "metric": "loss", "loss": null, "nonfinite": {"loss": "inf"}}',
    '{"kind": "step", "step": 1, "loss": 1.0, "policy/ratio_mean": 1.0}',
    '{"kind": "step", "step": 2, "loss": 0.0}',
]


@pytest.mark.parametrize(
    ("config", "metrics", "expected"),
    [
        ("{}", ROWS, ""),
        ("run: {steps: null}", ROWS, "config.yaml: run.steps = None: expected an integer"),
        ("reward: {name: true}", ROWS, "config.yaml: reward.name = True: expected text"),
        ("algorithm: {kl_coef: true}", ROWS, "config.yaml: algorithm.kl_coef = True: expected a number"),
        ("model: {attention: .nan}", ROWS, "config.yaml: model.attention = nan: expected"),
        ("optim: {lr: -1}", ROWS, "config.yaml: optim.lr = -1: expected a number from 0"),
        ("engine: 5", ROWS, "config.yaml: engine is int; expected a section of keys"),
        ("{}", [*ROWS[:2], ROWS[2].replace("0.0", "null")], "metrics.jsonl, line 3: .*loss is null"),
        ("{}", [*ROWS[:2], ROWS[2][:-1]], "metrics.jsonl, line 3: .*not JSON"),
        ("{}", ROWS[:2], "metrics.jsonl ends at step 1, and the run reached step 2"),
        ("{}", [], "metrics.jsonl is missing, and the run reached step 2: put the run's own file back"),
    ],
)
def test_what_a_run_lacks_or_cannot_be_is_named(
    tmp_path: Path, config: str, metrics: list[str], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text(f"{config}\n")
    if metrics:
        (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in metrics))
    (tmp_path / "summary.json").write_text('{"steps": 2, "finished": true}')
    assert main(["runs", str(tmp_path)]) == 0
    messages = "\n".join(caplog.messages)
    assert re.search(expected, messages) if expected else not messages, messages


def test_a_last_line_that_a_kill_cut_off_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{ROWS[1]}\n{ROWS[2][:20]}")
    assert [row["step"] for row in RunRecord(tmp_path).rows] == [1]
    assert "metrics.jsonl: its last line is incomplete, as in a run that was killed, and is left out" in caplog.text
    caplog.clear()
    with RunFiles(tmp_path).lock():
        assert len(RunRecord(tmp_path).rows) == 1
    assert not caplog.text, "a run that is running writes the rest"


def test_what_a_run_says_moves_no_cursor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences clear a terminal, set its title, and some terminals take commands by them."""
    escape, quoted = "\\e]0;x\\a\\e[2J", r"\u001b[2J"
    run = tmp_path / "runs" / "on\x1b[2Je"
    run.mkdir(parents=True)
    settings = f'{{steps: 5, seed: 0, "{escape}": "{escape}"}}'
    model, reward = f'model: {{path: "{escape}"}}', f'reward: {{name: ["{escape}"]}}'
    (run / "config.yaml").write_text(f"run: {settings}\n{model}\n{reward}\n")
    rows = [
        f'{{"kind": "eval", "step": 1, "metric": "{quoted}", "{quoted}": 0.5, "items": 2}}',
        '{"kind": "step", "step": 2, "loss": 1.0}',
        f'{{"kind": "step", "step": "{quoted}"}}',
    ]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    lines = [
        '{"first": 0}', '{"state": "taken", "step": 1, "prompts": [0]}',
        f'{{"state": "dropped", "step": 1, "prompts": [0], "reason": "{quoted}"}}',
    ]  # fmt: skip
    (run / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run / "summary.json").write_text(f'{{"steps": 2, "finished": true, "model_path": "{quoted}"}}')
    monkeypatch.chdir(tmp_path)
    other = ["--out", str(tmp_path / "c.png")]
    for argv in (
        ["runs"], ["runs", str(run)], ["runs", "compare", str(run), str(run), *other], ["changes", str(run)],
        ["view", str(run), "--export", str(tmp_path / "v.html")], ["export", str(run), "--to", str(tmp_path / "out")],
        ["sample", str(run), "--prompt", "a"], ["train", "grpo", "--resume", str(run)],
        ["runs", "clean", "--yes", str(run)],
    ):  # fmt: skip
        status, text = main(argv), "".join(capfd.readouterr())
        assert "\x1b" not in text and "\a" not in text, f"{argv[:2]}: {status}: {text!r}"
        assert text


def test_links_pipes_and_huge_files_are_not_read(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text('{"kind": "step", "step": 7, "steps": 7, "finished": true}\n')
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        (run / name).symlink_to(secret)
    os.mkfifo(run / ".lock")
    record = RunRecord(run)
    assert (record.state, record.step, record.settings) == ("unknown", 0, {})
    (run / "summary.json").unlink()
    (run / "summary.json").write_text(secret.read_text() + " " * (1 << 18))
    assert RunRecord(run).summary == {}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (4, ""),
        (
            3,
            "ledger.jsonl has 0 prompts that were trained, and summary.json 2: lines are missing; put the run's own",
        ),
        (0, "ledger.jsonl is missing, and summary.json has 2 prompts that were trained; put the run's own file back"),
        (-1, "ledger.jsonl, line 2: no entry of a ledger: .*not JSON"),
    ],
)
def test_a_ledger_that_lacks_lines_is_named_and_the_rest_is_shown(
    tmp_path: Path, lines: int, complaint: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A ledger without its end showed a finished run with prompts in flight, and a damaged one showed nothing."""
    run = make_run(tmp_path / "run", finished=True, prompts={"trained": 2})
    entries = [
        {"first": 0},
        *({"state": state, "step": 1, "prompts": [0, 1]} for state in ("taken", "graded", "trained")),
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in entries[:lines])
    if lines:
        (run / "ledger.jsonl").write_text(text if lines > 0 else f'{{"first": 0}}\n{{"state"\n{text}')
    assert main(["runs", str(run)]) == 0
    assert "finished at step 3, held-out accuracy 25.0%" in capsys.readouterr().out
    messages = "\n".join(caplog.messages)
    assert re.search(complaint, messages) if complaint else not messages, messages
    assert [*map(str, Run(run, "").answer("about")["complaints"])] == caplog.messages[: len(caplog.messages) // 2]


@pytest.mark.parametrize("content", ["", '{"steps": 3, "fin', "{}", '{"steps": -1, "finished": true}'])
def test_a_run_whose_summary_is_damaged_has_one_state_for_all_readers(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run was "unfinished", and the page said nothing of the file."""
    monkeypatch.chdir(tmp_path)
    for name in ("damaged", "begun"):
        make_run(tmp_path / "runs" / name, steps=0 if name == "begun" else 3, finished=True)
        (tmp_path / "runs" / name / "summary.json").write_text(content)
    assert main(["runs", "runs/damaged"]) == 0
    assert "runs/damaged: unknown at step 3, held-out accuracy 25.0%" in capsys.readouterr().out
    about = Run(tmp_path / "runs/damaged", "").answer("about")
    assert about["state"] == "unknown"
    assert f"{tmp_path}/runs/damaged/summary.json: " in about["complaints"][0]
    assert main(["changes", "runs/damaged"]) == 2
    assert "runs/damaged (unknown at step 3) has fewer than two evaluations" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"damaged holds a run \(unknown at step 3\)"):
        RunDirectory(Path("runs/damaged"))
    assert main(["runs", "clean", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out, "nobody knows what the run was that has a summary"


def test_a_run_without_readable_rows_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, damage in (("rows", "metrics.jsonl"), ("trained", "")):
        run = make_run(tmp_path / "runs" / name, steps=0)
        lines = [
            {"first": 0},
            *({"state": state, "step": 1, "prompts": [0]} for state in ("taken", "graded", "trained")),
        ]
        (run / (damage or "ledger.jsonl")).write_text(
            "no row\n" if damage else "".join(map("{}\n".format, map(json.dumps, lines)))
        )
    assert main(["runs", "clean", "--yes"]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"rows", "trained"}


def test_figures_of_another_set_are_not_compared_with_those_of_the_set_that_judges(tmp_path: Path) -> None:
    """The page had the first figure of the run, by whatever set, and the last one."""
    run = make_run(tmp_path / "run", steps=0)
    judged = {"kind": "eval", "metric": "accuracy"}
    rows = [
        {**judged, "step": 0, "items": 4, "items/easy": 4, "accuracy": 0.75, "accuracy/easy": 0.75},
        {**judged, "step": 1, "items": 8, "accuracy": 0.875},
        {**judged, "step": 2, "items": 2, "items/hard": 2, "items/easy": 4, "accuracy": 0.5, "accuracy/hard": 0.5}
        | {"accuracy/easy": 1.0},
        {**judged, "step": 4, "items": 4, "items/easy": 4, "accuracy": 1.0, "accuracy/easy": 1.0},
    ]
    for judge, count, before, after in (
        ("hard", 3, "50.0%", "50.0%"),
        ("easy", 4, "75.0%", "100.0%"),
        ("", 2, *["87.5%"] * 2),
    ):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        about = Run(run, "").answer("about")
        assert (about["before"], about["after"]) == (before, after), judge
    assert Run(run, "").answer("about")["metric"] == "accuracy"
    broken = {**rows[3], "step": 5, "accuracy": None, "nonfinite": {"accuracy": "nan", "accuracy/easy": "nan"}}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, broken | {"accuracy/easy": None}])
    )
    about = Run(run, "").answer("about")
    assert (about["before"], about["after"]) == ("75.0%", "nan"), "as podium runs says, and not the one before it"


def test_prompts_without_a_score_are_not_compared_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two evaluations without any score had an accuracy of "0.0% (0 of 0)", with exit status 0."""
    run = make_run(tmp_path / "run", finished=True)
    write_evaluations(run, {0: ["0", "1", "2"], 3: ["0", "x", "2"]})
    assert main(["changes", str(run)]) == 0
    assert "left out" not in capsys.readouterr().out
    file = run / "evaluations/step-000003.parquet"
    for scores, status in (([True, None, True], 0), ([None] * 3, 2)):
        table = pq.read_table(file)
        table = table.set_column(table.column_names.index("correct"), "correct", pa.array(scores, pa.bool_()))
        pq.write_table(table, file)
        assert main(["changes", str(run)]) == status
    out, err = capsys.readouterr()
    assert "after     100.0%  (2 of 2)" in out
    assert "left out  1  (the reward left them out in one of the two evaluations)" in out
    assert "step-000003.parquet have no prompt in common that has the accuracy in both\n" in err
    (run / "metrics.jsonl").unlink()
    assert main(["changes", str(run)]) == 2
    assert f"in both; {run}/metrics.jsonl, which says what judges the run, is not there\n" in capsys.readouterr().err


def test_a_set_has_its_own_figures_in_the_summary_though_the_first_set_lacks_them(tmp_path: Path) -> None:
    """A part of the reward has the name of a set, and a set's name ends as another one does."""
    run = make_run(tmp_path / "run")
    row: dict[str, Any] = {"kind": "eval", "step": 0, "metric": "reward_mean", "items": 4, "reward_mean": 0.1}
    row |= {"items/easy": 4, "reward_mean/easy": 0.1, "reward_parts/hard": 2.0, "reward_parts/hard/easy": 2.0}
    row |= {"items/hard": 5, "reward_mean/hard": 0.2, "accuracy/hard": 0.4, "reward_parts/odd/hard": 3.0}
    row |= {"items/very/hard": 6, "reward_mean/very/hard": 0.3, "accuracy/very/hard": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    sets = RunRecord(run).scores_by_set(["easy", "hard", "very/hard"], 0)
    assert {name: of_set["before"] for name, of_set in sets.items()} == {
        "easy": {"reward_mean": 0.1, "reward_parts/hard": 2.0},
        "hard": {"reward_mean": 0.2, "accuracy": 0.4, "reward_parts/odd": 3.0},
        "very/hard": {"reward_mean": 0.3, "accuracy": 0.5},
    }
    assert [of_set["items"] for of_set in sets.values()] == [4, 5, 6]
