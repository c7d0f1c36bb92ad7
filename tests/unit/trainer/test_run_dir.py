"""A run's directory stays whole, whoever is killed and whoever else wants to write there."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.errors import CheckpointError, ConfigError
from podium.telemetry import (
    CheckpointSaved,
    EvalFinished,
    Event,
    PhaseStarted,
    StepFinished,
    emit,
    metrics,
    subscribe,
)
from podium.telemetry.sinks import JsonlSink
from podium.trainer.run_dir import (
    CompletionRecord,
    CompletionsWriter,
    RunDirectory,
    Summary,
    library_versions,
    write_atomically,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "one")
    run.write_config("seed: 1\n")
    return run


def save(run: RunDirectory, step: int, keep: int = 0, text: str = "weights") -> Path:
    with run.checkpoint(step, keep=keep) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text)
    return run.checkpoints / f"step-{step:06d}"


# Whose directory it is


def test_a_new_run_has_its_folders(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "b")
    assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == {"completions", "logs", "checkpoints"}
    assert run.trace_path == run.path / "trace.json"


def test_another_run_is_not_overwritten(run: RunDirectory) -> None:
    run.close()
    with pytest.raises(ConfigError, match=r"an unfinished run: resume it \(--resume .*\), or choose another"):
        RunDirectory(run.path)
    run.write_summary(Summary(task="copy", seed=0, steps=1, wall_s=1.0))
    with pytest.raises(ConfigError, match="a finished run"):
        RunDirectory(run.path)


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run to resume at .*typo"):
        RunDirectory(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


def test_foreign_files_and_files_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis\.tex\)"):
        RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match=r"thesis\.tex is a file"):
        RunDirectory(tmp_path / "thesis.tex")


def test_what_a_failed_start_left_is_no_obstacle(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    (first.logs / "policy-0.log").write_text("CUDA error")
    first.close()
    RunDirectory(tmp_path / "run").close()


def test_two_processes_cannot_write_to_one_run(run: RunDirectory) -> None:
    script = f"from podium.trainer.run_dir import RunDirectory; RunDirectory({str(run.path)!r}, resume=True)"
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"being written to by process {os.getpid()}" in refused.stderr
    run.close()
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_resumed_run_keeps_the_older_configuration_and_trace(run: RunDirectory) -> None:
    run.trace_path.write_text("[")
    run.close()
    again = RunDirectory(run.path, resume=True)
    assert again.trace_path.name == "trace-1.json"
    again.write_config("seed: 1\n")
    assert not (run.path / "config.1.yaml").exists()
    again.write_config("seed: 2\n")
    again.write_config("seed: 3\n")
    texts = {path.name: path.read_text() for path in run.path.glob("config*.yaml")}
    assert texts == {"config.yaml": "seed: 3\n", "config.1.yaml": "seed: 1\n", "config.2.yaml": "seed: 2\n"}


# Atomic writes


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    path.with_name(f".{path.name}.{os.getpid()}.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_reader_never_sees_half_a_file_although_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    script = f"""
import sys
from pathlib import Path
from podium.trainer.run_dir import write_atomically
for n in range(10**6):
    write_atomically(Path({str(path)!r}), '{{"n": "' + str(n % 10) * 500_000 + '"}}')
    if n == 0:
        sys.stdout.write("go\\n"); sys.stdout.flush()
"""
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(20):
            assert len(json.loads(path.read_text())["n"]) == 500_000
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert len(json.loads(path.read_text())["n"]) == 500_000


# Checkpoints


def test_a_checkpoint_is_complete_before_latest_moves(run: RunDirectory) -> None:
    events: list[Event] = []
    leave = subscribe(events.append)
    try:
        first = save(run, 10)
        with run.checkpoint(20) as folder:
            (folder / "weights.bin").write_text("half")
            latest = run.latest_checkpoint()
            assert latest is not None
            assert latest.step == 10
    finally:
        leave()
    assert (run.checkpoints / "latest" / "weights.bin").read_text() == "half"
    assert [one.step for one in run.list_checkpoints()] == [10, 20]
    assert events == [CheckpointSaved(10, str(first)), CheckpointSaved(20, str(run.checkpoints / "step-000020"))]


def test_a_checkpoint_that_fails_leaves_nothing(run: RunDirectory) -> None:
    save(run, 10)
    with pytest.raises(KeyboardInterrupt), run.checkpoint(20) as folder:
        (folder / "weights.bin").write_text("half")
        raise KeyboardInterrupt
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["latest", "step-000010"]


def test_an_empty_checkpoint_is_refused(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"), run.checkpoint(10):
        pass
    assert run.latest_checkpoint() is None


def test_only_the_newest_are_kept(run: RunDirectory) -> None:
    for step in (10, 20, 30, 1_000_000):
        save(run, step, keep=2)
    assert [one.step for one in run.list_checkpoints()] == [30, 1_000_000]


def test_a_checkpoint_of_the_same_step_is_replaced(run: RunDirectory) -> None:
    save(run, 10, text="old")
    final = save(run, 10, text="new")
    assert (final / "model" / "weights.bin").read_text() == "new"
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["latest", "step-000010"]


def test_latest_survives_its_deletion(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    save(run, 10)
    second = save(run, 20)
    (second / "model" / "weights.bin").unlink()
    (second / "model").rmdir()
    second.rmdir()
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.step == 10
    assert "which is gone" in caplog.text


KILLED_IN = {
    # The call inside commit_checkpoint at which the process is killed, and the text that must be there afterwards.
    "first file's fsync": ("os.fsync", 1, "old"),
    "first rename": ("Path.rename", 1, "old"),
    "second rename": ("Path.rename", 2, "old"),
    "symlink": ("Path.symlink_to", 1, "new"),
    "replacing latest": ("Path.replace", 1, "new"),
    "last fsync": ("os.fsync", 5, "new"),
}


@pytest.mark.parametrize("moment", KILLED_IN)
def test_killed_while_a_checkpoint_is_replaced(run: RunDirectory, moment: str) -> None:
    function, count, expected = KILLED_IN[moment]
    save(run, 5, text="older")
    save(run, 10, text="old")
    run.close()
    script = f"""
import os, signal
from pathlib import Path
from podium.trainer.run_dir import RunDirectory
run = RunDirectory({str(run.path)!r}, resume=True)
owner, name = {function!r}.split(".")
owner = {{"os": os, "Path": Path}}[owner]
real, calls = getattr(owner, name), []
def deadly(*args):
    calls.append(args)
    if len(calls) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
with run.checkpoint(10) as folder:
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_text("new")
    setattr(owner, name, deadly)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = RunDirectory(run.path, resume=True)
    latest = again.latest_checkpoint()
    assert latest is not None
    assert latest.step == 10
    assert (latest.path / "model" / "weights.bin").read_text() == expected
    assert {entry.name for entry in again.checkpoints.iterdir()} == {"latest", "step-000005", "step-000010"}


# Going on


def test_rewinding_forgets_later_steps(run: RunDirectory) -> None:
    writer = run.completions_writer()
    with JsonlSink(run.metrics_path):
        emit(PhaseStarted("sft", 3))
        for step in (1, 2, 3):
            emit(StepFinished(step, {"loss": 1.0}))
        emit(PhaseStarted("grpo", 3))
        for step in (1, 2, 3):
            emit(StepFinished(step, {"reward/mean": 0.5}))
            writer.write(step, [[]], ())
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "st')
    run.rewind(2, phase="grpo")
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [(row["phase"], row["step"]) for row in rows] == [
        ("sft", 1), ("sft", 2), ("sft", 3), ("grpo", 1), ("grpo", 2),
    ]  # fmt: skip
    assert sorted(path.name for path in run.completions.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    run.rewind(1)
    assert len(run.metrics_path.read_text().splitlines()) == 1


def test_rewinding_a_run_that_wrote_nothing(run: RunDirectory) -> None:
    run.rewind(0)
    assert not run.metrics_path.exists()


# What it writes


def test_completions_are_read_by_pandas(tmp_path: Path) -> None:
    import pandas as pd

    records = [
        CompletionRecord(
            group=0, prompt="2 + 2?", completion="4", reward=1.0, finish_reason="stop", version=3, tokens=[5, 7],
            parts={"exact": 1.0, "format": 0.5}, advantage=0.7, correct=True, expected="4",
        ),
        CompletionRecord(
            group=0, prompt="2 + 2?", completion="5\ud800", reward=0.0, finish_reason="length", version=3,
            parts={"exact": 0.0},
        ),
    ]  # fmt: skip
    path = CompletionsWriter(tmp_path).write(12, [records[:1], records[1:]], {"exact", "format"})
    assert path == tmp_path / "step-000012.parquet"
    frame = pd.read_parquet(tmp_path)
    assert list(frame["step"]) == [12, 12]
    assert list(frame["reward_exact"]) == [1.0, 0.0]
    assert frame["reward_format"].isna().tolist() == [False, True]
    assert [list(tokens) for tokens in frame["tokens"]] == [[5, 7], []]
    assert list(frame["completion"]) == ["4", "5?"]
    assert frame["advantage"].isna().tolist() == [False, True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000012.parquet"]


def test_the_summary_is_valid_json_with_versions(run: RunDirectory) -> None:
    assert run.read_summary() is None
    run.write_summary(
        Summary(
            task="copy",
            seed=3,
            steps=160,
            wall_s=math.inf,
            accuracy_before=0.25,
            accuracy_after=0.75,
            items=500,
            tokens_per_s={"generate": 1000.0, "update": math.nan},
        )
    )
    read = run.read_summary()
    assert read is not None
    assert read["tokens_per_s"] == {"generate": 1000.0, "update": None}
    assert (read["accuracy_before"], read["accuracy_after"], read["wall_s"]) == (0.25, 0.75, None)
    assert read["versions"] == library_versions()
    assert {"python", "torch", "transformers"} <= set(read["versions"])


def test_the_controllers_log_is_kept(run: RunDirectory) -> None:
    before = (list(logging.getLogger().handlers), logging.getLogger("podium").level)
    with run.controller_log() as path:
        logging.getLogger("podium.trainer").info("step 1 took long")
    logging.getLogger("podium.trainer").info("afterwards")
    assert "INFO podium.trainer: step 1 took long" in path.read_text()
    assert "afterwards" not in path.read_text()
    assert (list(logging.getLogger().handlers), logging.getLogger("podium").level) == before


# The page about it


def test_the_examples_of_the_documentation_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    run.write_summary(Summary(task="copy", seed=0, steps=2, wall_s=1.0, tokens_per_s={"generate": 1000.0}))
    with JsonlSink(run.metrics_path):
        for step in (1, 2):
            emit(StepFinished(step, {"reward/mean": 0.5, "policy/entropy": 1.0, "tokens_per_s/step": 1000.0}))
        emit(EvalFinished(2, 0.5, 500, 0.5))
    record = CompletionRecord(group=0, prompt="?", completion="!", reward=0.0, finish_reason="length", version=1)
    run.completions_writer().write(1, [[record]], record.parts)
    monkeypatch.chdir(run.path)
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, {"__name__": "example"})
    assert capsys.readouterr().out == "step 40: accuracy 5%\n"


def test_every_metric_of_the_documentation_exists_and_the_other_way_round() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    table = page.partition("| metric | meaning |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.strip().splitlines()]
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    named = {value for name, value in vars(metrics).items() if name.isupper()}
    prefixes = {metrics.TIME_PREFIX, metrics.TOKENS_PER_S_PREFIX}
    stages = {metrics.STEP_S, metrics.TOKENS_PER_S}
    assert documented == named - prefixes - stages | {prefix + "STAGE" for prefix in prefixes}
