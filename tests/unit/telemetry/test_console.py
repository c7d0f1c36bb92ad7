"""The terminal display, on a recorded terminal and on a file."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from podium.telemetry import (
    CallFinished,
    CheckpointSaved,
    CompletionsSampled,
    EvalFinished,
    PhaseStarted,
    Progressing,
    Sample,
    Stalled,
    StepFinished,
    Waiting,
    WorkerLost,
    WorkerStarted,
    emit,
    flush,
    metrics,
)
from podium.telemetry.events import Count
from podium.telemetry.sinks import ConsoleSink
from podium.telemetry.sinks.console import fitting
from tests.terminal import in_pty
from tests.waits import wait_until

GRPO = {
    metrics.LOSS: -1e-8,
    metrics.REWARD_MEAN: 0.5123,
    metrics.ACCURACY: 0.425,
    metrics.KL: 0.00042,
    metrics.ENTROPY: 1.234,
    metrics.CLIP_FRACTION: 0.013,
    metrics.GRAD_NORM: 0.61,
    metrics.LENGTH_MEAN: 23.4,
    metrics.TOKENS_PER_S: 12345.0,
    metrics.STEP_S: 0.25,
}


def on_file() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=80, highlight=False), out


def on_terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"}), out


def screen(written: str) -> list[str]:
    """What stands on a terminal of endless height after `written`: the few commands that rich sends for a bar."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece.endswith("A"):
            row -= int(piece[2:-1])
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return lines


def drawn(out: io.StringIO, text: str) -> list[str]:
    """What stands there once the last line, which a thread draws a few times a second, holds ``text``."""
    flush()
    lines: list[str] = []

    def holds_text() -> bool:
        lines[:] = screen(out.getvalue())
        return text in lines[-1]

    wait_until(holds_text)
    return lines


def test_a_file_gets_plain_lines_with_the_columns_that_matter() -> None:
    console, out = on_file()
    with ConsoleSink(console=console, row_every_s=0):
        emit(WorkerStarted("policy", 0, "node-0", 1))
        emit(WorkerStarted("policy", 1, "node-0", 2))
        emit(PhaseStarted("grpo", 2))
        emit(EvalFinished(0, 500, {"accuracy": 0.422, "reward_mean": 0.5}))
        emit(StepFinished(1, GRPO))
        emit(StepFinished(2, {**GRPO, metrics.REWARD_MEAN: float("nan")}))
        emit(EvalFinished(2, 500, {"accuracy": 0.45, "reward_mean": 0.52}, scored=480))
        emit(CheckpointSaved(2, "runs/a/checkpoints/step-000002"))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "workers  2 policy"
    assert lines[1].startswith("grpo  2 steps ---")
    assert lines[2] == "      0  held-out  accuracy 42.2% of 500  reward 0.500"
    assert lines[3].split() == [
        "step", "reward", "accuracy", "KL", "entropy", "clipped", "grad", "length", "tok/s", "time",
    ]  # fmt: skip
    assert lines[4].split() == [
        "1", "0.512", "42.5%", "4.2e-4", "1.234", "1.3%", "0.610", "23.4", "12.3k", "250ms",
    ]  # fmt: skip
    assert len(lines[3]) == len(lines[4]), "headers stand above their columns"
    assert lines[5].split()[:2] == ["2", "nan"]
    assert "accuracy 45.0% of 480  +2.8 points" in lines[6]
    assert lines[7] == "      2  checkpoint  runs/a/checkpoints/step-000002"


def test_supervised_steps_show_the_loss_and_no_empty_columns() -> None:
    console, out = on_file()
    with ConsoleSink(console=console, row_every_s=0):
        emit(PhaseStarted("sft", 1))
        emit(StepFinished(1, {metrics.LOSS: 2.5, metrics.GRAD_NORM: 1.0}))
        emit(PhaseStarted("grpo", 1))
        emit(StepFinished(1, GRPO))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["step", "loss", "grad"]
    assert lines[2].split() == ["1", "2.500", "1.000"]
    assert "loss" not in lines[4]


def test_a_metric_that_appears_later_brings_new_headers() -> None:
    console, out = on_file()
    with ConsoleSink(console=console, row_every_s=0):
        emit(StepFinished(1, {metrics.REWARD_MEAN: 0.1}))
        emit(StepFinished(2, {metrics.REWARD_MEAN: 0.2, metrics.KL: 0.5}))
        emit(StepFinished(3, {metrics.REWARD_MEAN: 0.3}))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["step", "reward"], ["1", "0.100"], ["step", "reward", "KL"], ["2", "0.200", "0.500"], ["3", "0.300", "-"],
    ]  # fmt: skip


def test_fast_steps_are_thinned_but_the_first_and_the_last_are_shown() -> None:
    console, out = on_file()
    with ConsoleSink(console=console, row_every_s=60):
        emit(PhaseStarted("grpo", 50))
        for step in range(1, 51):
            emit(StepFinished(step, GRPO))
    rows = [line.split()[0] for line in out.getvalue().splitlines()[2:]]
    assert rows == ["1", "50"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_narrow_terminal_loses_the_less_important_columns(width: int) -> None:
    columns = fitting(GRPO, width)
    assert [column.metric for column in columns][:2] == [metrics.REWARD_MEAN, metrics.ACCURACY]
    assert 7 + sum(len(column.cell(GRPO)) for column in columns) <= max(width, 7 + 19)
    assert len(columns) == {20: 2, 40: 3, 60: 6, 80: 8, 120: 9}[width]


def test_the_mismatch_is_a_column_of_a_terminal() -> None:
    shown = fitting({**GRPO, metrics.MISMATCH_MEAN: 0.007}, 80)
    assert [column.header for column in shown if column.metric == metrics.MISMATCH_MEAN] == ["mismatch"]


def test_a_terminal_has_one_bar_below_the_rows_and_it_goes_away() -> None:
    console, out = on_terminal()
    with ConsoleSink(console=console, row_every_s=0):
        emit(PhaseStarted("grpo", 4))
        emit(EvalFinished(0, 500, {"accuracy": 0.422, "reward_mean": 0.5}))
        emit(StepFinished(1, GRPO))
        emit(StepFinished(2, GRPO))
        during = drawn(out, "2/4")
    after = screen(out.getvalue())
    assert during[-1].startswith("grpo ━━━")
    assert "2/4" in during[-1]
    assert "held-out accuracy 42.2%" in during[-1]
    assert len(during[-1]) <= 100
    assert sum("━" in line for line in during) == 1
    assert not any("━" in line for line in after)
    assert [line.split()[0] for line in after if line] == ["grpo", "0", "step", "1", "2"]


def test_handlers_made_before_and_raw_writes_go_above_the_bar() -> None:
    console, out = on_terminal()
    early = logging.StreamHandler(sys.stderr)
    own = logging.getLogger("users.reward")
    own.addHandler(early)
    own.propagate = False
    before = early.stream
    try:
        with ConsoleSink(console=console, row_every_s=0):
            emit(PhaseStarted("grpo", 4))
            emit(StepFinished(1, GRPO))
            flush()
            own.warning("from a handler made before")
            sys.stderr.write("raw words\n")
            emit(StepFinished(2, GRPO))
        assert early.stream is before
    finally:
        own.removeHandler(early)
    lines = [line for line in screen(out.getvalue()) if line]
    assert [line.split()[0] for line in lines] == ["grpo", "step", "1", "from", "raw", "2"]
    assert "from a handler made before" in lines
    assert "raw words" in lines


def test_logging_and_hooks_are_put_back() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, sys.breakpointhook, warnings.showwarning, sys.stdout, sys.stderr)
    console, _ = on_terminal()
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 4))
        flush()
        assert sys.stdout is not before[4]
    assert (list(root.handlers), root.level, sys.breakpointhook, warnings.showwarning) == before[:4]
    assert (sys.stdout, sys.stderr) == before[4:]


def test_a_script_without_logging_of_its_own_sees_podiums_remarks_once(tmp_path: Path) -> None:
    script = """
import logging, warnings
from podium.telemetry.sinks import ConsoleSink
with ConsoleSink():
    logging.getLogger("podium.runtime").info("restarted")
    logging.getLogger("podium.runtime").debug("too much")
    logging.getLogger("elsewhere").info("not ours")
    logging.getLogger("elsewhere").warning("worth it")
    logging.getLogger("httpx").warning("noise")
    logging.getLogger("httpx").error("a real error")
    warnings.warn("old")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "podium.runtime  restarted",
        "warning  elsewhere  worth it",
        "error  httpx  a real error",
        "warning  UserWarning: old  <string>:11",
    ]


def test_breakpoint_stops_in_the_users_frame() -> None:
    script = """
from podium.telemetry.sinks import ConsoleSink
def reward():
    found = 41 + 1
    breakpoint()
    return found
with ConsoleSink():
    reward()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input="p found\nc\n", capture_output=True, text=True, check=True
    )
    assert "(Pdb) 42" in done.stdout


def test_the_bar_leaves_for_a_breakpoint_and_returns_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    console, _ = on_terminal()
    real_stdout = sys.stdout
    seen: list[bool] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys.stdout is real_stdout))
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 4))
        emit(StepFinished(1, GRPO))
        flush()
        assert sys.stdout is not real_stdout
        breakpoint()
        emit(StepFinished(2, GRPO))
        flush()
        assert sys.stdout is not real_stdout
    assert seen == [True]


def test_samples_are_shown_as_they_are() -> None:
    console, out = on_file()
    samples = (Sample("What is 12 + 30?", "Let me see:\n[bold]42[/bold]\x1b[2J", 1.0, "42"), Sample("?", "", 0.0))
    with ConsoleSink(console=console):
        emit(CompletionsSampled(30, samples))
    text = out.getvalue()
    assert "step 30 · sample 2 of 2" in text
    assert "completion  Let me see:\n            [bold]42[/bold]\\x1b[2J\n" in text
    assert "  expected  42\n" in text


def test_samples_are_wrapped_under_their_indent_and_the_header_comes_again() -> None:
    """In a terminal of 60 columns, which pyte reads."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system=None)
    long = " ".join(f"word{number}" for number in range(20))
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 9))
        for step in (1, 2):
            emit(CompletionsSampled(step, (Sample("What?", long, 0.5, "42"),)))
            emit(StepFinished(step, {**GRPO, metrics.TRUNCATED: 0.94, metrics.FLAT_GROUPS: 1.0}))
    screen = pyte.HistoryScreen(60, 60)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    start = next(number for number, line in enumerate(lines) if line.startswith("completion"))
    assert lines[start].startswith("completion  word0 ")
    assert lines[start + 1].startswith(" " * 12 + "word")
    assert [line.split()[0] for line in lines if line.split()[0] in ("step", "1", "2", "reward")] == [
        "step", "reward", "step", "1", "step", "reward", "step", "2",
    ]  # fmt: skip


def test_what_keeps_a_run_from_learning_has_columns() -> None:
    shown = fitting({**GRPO, metrics.TRUNCATED: 0.94, metrics.FLAT_GROUPS: 0.5}, 90)
    assert {"cut off", "flat"} <= {column.header for column in shown}
    assert "clipped" not in {column.header for column in shown}, "the share of ratios, which is the first to go"


def test_stalls_and_losses_name_who() -> None:
    console, out = on_file()
    with ConsoleSink(console=console):
        emit(Stalled("policy", "update", (1, 3), 32.4))
        emit(WorkerLost("policy", 1, "node-0", "signal SIGKILL"))
    assert out.getvalue().splitlines() == [
        "waiting  32 s for ranks 1, 3 of policy.update",
        "lost  policy rank 1 on node-0: signal SIGKILL",
    ]


def test_an_ascii_terminal_is_no_reason_to_fail() -> None:
    script = """
from podium.telemetry import CompletionsSampled, Sample, emit
from podium.telemetry.events import Count, Progressing
from podium.telemetry.sinks import ConsoleSink
with ConsoleSink():
    emit(CompletionsSampled(1, (Sample("π?", "數", 1.0),)))
    emit(Progressing((Count("", 0, 0, 40.0, "update"), Count("rows", 1, 2, 40.0))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONIOENCODING": "ascii"}
    )
    assert "\\u6578" in done.stdout
    assert "step 1 - sample 1 of 1" in done.stdout
    assert "update 40s - 1 of 2 rows" in done.stdout, "Podium's own characters are not spelled out"
    assert done.stderr == ""


def test_no_bar_stands_in_what_a_terminal_shows_after_the_last_step() -> None:
    lines = in_pty(
        "-c",
        """
import sys, time
from podium.telemetry import PhaseFinished, PhaseStarted, StepFinished, Waiting, emit, flush
from podium.telemetry.sinks import ConsoleSink
from podium.telemetry.sinks.console import terminal
with ConsoleSink(row_every_s=0):
    for done in range(3):
        emit(Waiting("tokenizing", done, 2))
        flush()
        time.sleep(0.2)
    emit(PhaseStarted("grpo", 30))
    for step in range(1, 31):
        emit(StepFinished(step, {"reward/mean": 0.5}))
    flush()
    time.sleep(0.4)
    emit(PhaseFinished("grpo"))
    flush()
    for line in range(40):  # the report scrolls the terminal
        terminal().print(f"report {line}")
        time.sleep(0.01)
""",
    )
    rows = [line.split() for line in lines if line]
    assert [row[0] for row in rows if row[0].isdigit()] == [str(step) for step in range(1, 31)]
    assert [row[1] for row in rows if row[0] == "report"] == [str(line) for line in range(40)]
    assert not any("━" in line or "tokenizing" in line for line in lines)


@pytest.mark.parametrize(
    ("event", "text"), [('PhaseStarted("grpo", 30)', "0/30"), ('Waiting("loading " + 99 * "x", 1, 4)', "loading")]
)
def test_no_bar_stands_above_the_echo_of_a_key(event: str, text: str) -> None:
    lines = in_pty(
        "-c",
        f"""
import sys
from podium.telemetry import Note, PhaseFinished, PhaseStarted, Progressing, Waiting, emit, flush
from podium.telemetry.events import Count
from podium.telemetry.sinks import ConsoleSink
with ConsoleSink():
    emit({event})
    emit(Progressing((Count("", 0, 0, 9.0, stage="generate"), Count("completions", 9, 99, 9.0))))
    flush()
    sys.stdin.read()  # until control-D
    emit(Note("SIGINT: the run ends now"))
    flush()
    emit(PhaseFinished("grpo"))
""",
        typed=(text, b"\x03\x03\x04"),
    )
    assert "SIGINT: the run ends now" in lines
    assert not [line for line in lines if "━" in line or "xxx" in line or "^C" in line]


def test_all_who_write_to_a_terminal_share_one_console() -> None:
    lines = in_pty(
        "-c",
        """
import sys
from podium.telemetry import PhaseStarted, emit, flush
from podium.telemetry.sinks import ConsoleSink
from podium.telemetry.sinks.console import terminal
before = terminal()
with ConsoleSink() as sink:
    emit(PhaseStarted("grpo", 3))
    flush()
    print("shared" if sink.console is before is terminal() else "two consoles")
""",
    )
    assert "shared" in lines


def test_what_the_run_waits_for_is_one_line_of_a_file() -> None:
    console, out = on_file()
    logged: list[str] = []
    with ConsoleSink(console=console, log=logged.append):
        for done in range(3):
            emit(Waiting("tokenizing 500 prompts", done, 2))
        emit(PhaseStarted("grpo", 2))
        emit(StepFinished(1, {metrics.REWARD_MEAN: 0.5}))
    lines = out.getvalue().splitlines()
    assert lines[0] == "tokenizing 500 prompts"
    assert lines[1].startswith("grpo  2 steps")
    assert [line.split()[0] for line in logged] == ["tokenizing", "grpo", "step", "1"]


def test_a_bar_says_how_much_is_tokenized() -> None:
    console, out = on_terminal()
    with ConsoleSink(console=console):
        emit(Waiting("tokenizing [500] prompts", 1, 4))
        during = drawn(out, "1/4")
    assert "tokenizing [500] prompts" in during[-1]
    assert "1/4" in during[-1]
    assert not [line for line in screen(out.getvalue()) if line]


def test_a_bar_says_how_many_tensors_of_a_model_are_read() -> None:
    console, out = on_terminal()
    with ConsoleSink(console=console):
        emit(Waiting("loading a model for policy, generator", 0, 4))
        first, second = (Count("tensors", done, 100, 9.0, rank=rank) for rank, done in enumerate((30, 20)))
        emit(Progressing((first, second)))
        assert "0/4 workers  50 of 200 tensors" in drawn(out, "50 of 200 tensors")[-1]
        emit(CallFinished("policy", "construct", 0, "node-0", 1, 0, 0, 1, ok=True))
        assert "1/4 workers  20 of 100 tensors" in drawn(out, "20 of 100 tensors")[-1]
        emit(Progressing((replace(second, done=100),)))
        assert "1/4 workers  100 tensors read, preparing" in drawn(out, "preparing")[-1]
        emit(CallFinished("policy", "construct", 1, "node-0", 1, 0, 0, 1, ok=True))
        made = drawn(out, "2/4 workers")[-1]
        assert "tensors" not in made
        assert made.count("━") > 0
    assert not [line for line in screen(out.getvalue()) if line]
