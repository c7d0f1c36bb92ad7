"""What commands say that SIGTERM or Ctrl-C ends, and their exit status."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import podium_inference.evaluation
from podium.cli import main
from podium.cli.interruption import ended_by_sigterm
from tests.integration.training import write_copy_task


def end_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, number: signal.Signals) -> None:
    """Send this process a signal at a call of a function, the first of which has the number 0."""
    function, calls = getattr(module, name), list[int]()

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > call:
            signal.raise_signal(number)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, count)


@pytest.fixture
def handlers() -> Any:
    """The handlers of a shell's command, which are put back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_an_evaluation_that_a_signal_ends_says_what_was_evaluated(
    number: signal.Signals,
    status: int,
    said: str,
    finished_grpo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["eval", str(finished_grpo / "runs" / "run"), "--backend", "inline", "--eval.items", "2"]
    sets = ["--data.eval", f"{{first: {write_copy_task(tmp_path)}, second: {write_copy_task(tmp_path)}}}"]
    end_at(monkeypatch, podium_inference.evaluation, "score_held_out", 1, number)
    assert main([*words, *sets]) == status
    out, err = capsys.readouterr()
    assert "set       first\n" in out and "second" not in out, "the first set's results are not lost"
    assert f"podium eval: {said}; the results of first are above, and nothing else is kept; it was evaluating" in err
    if status == 143:
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == [signal.SIG_IGN] * 2
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_at(monkeypatch, podium_inference.evaluation, "score_held_out", 0, number)
    assert main([*words, *sets]) == status
    out, err = capsys.readouterr()
    assert not out and f"podium eval: {said}; no set was evaluated to its end, and nothing" in err


@pytest.mark.usefixtures("handlers")
def test_samples_that_a_signal_ends_are_counted(
    finished_grpo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(finished_grpo / "runs" / "run"), "--backend", "inline"]
    end_at(monkeypatch, podium_inference.evaluation, "encode_rows", 0, signal.SIGTERM)
    assert main([*words, "--prompt", "1="]) == 143
    assert "podium sample: ended by SIGTERM; 0 prompts were completed\n" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("command", ["runs", "export", "backends", "train", "serve"])
def test_each_command_says_that_sigterm_ended_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except (Exception, SystemExit):  # noqa: BLE001 - as where a user's code is loaded
            return 0
        return 0

    monkeypatch.setattr("podium.cli.load_command", lambda name: run)
    assert main([command]) == 143
    assert capsys.readouterr().err == f"podium {command}: ended by SIGTERM\n"


@pytest.mark.usefixtures("handlers")
def test_a_fork_of_a_command_ends_by_sigterm_as_any_process() -> None:
    with ended_by_sigterm():
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `trap '' TERM` of a shell has it
    with ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
