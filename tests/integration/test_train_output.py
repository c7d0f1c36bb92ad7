"""A run whose stdout is closed, full or gone ends with the reason in one sentence, and keeps what it has learned."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.trainer import GRPOConfig, config_to_yaml
from tests.integration.training import tiny
from tests.waits import LONG_S
from tests.warm_python import WarmPopen

TRAIN = "import sys; from podium.cli import main; sys.exit(main())"


def start(tmp_path: Path, stdout: Any, code: str = TRAIN, **sections: Any) -> subprocess.Popen[str]:
    """Start the command on a run of many steps."""
    file = tmp_path / "run.yaml"
    sections = {"eval": {"items": 0}, "save": {"model": False}, "run": {"steps": 10_000}, **sections}
    file.write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, **sections)))
    words = ["train", "grpo", "--config", str(file), "--backend", "inline"]
    return WarmPopen([sys.executable, "-c", code, *words], stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_reader_that_ends_stops_the_run_which_saves(tmp_path: Path) -> None:
    """As `head` does."""
    with start(tmp_path, subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.readline().split()[:1] != ["1"]:
            pass
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(LONG_S) == 2
    (latest,) = (tmp_path / "runs" / "run" / "checkpoints").glob("step-*")
    step = int(latest.name.removeprefix("step-"))
    (line,) = [line for line in err.splitlines() if line.startswith("podium train:")]
    assert line == (
        f"podium train: stdout cannot be written any more (Broken pipe): the run has ended after step {step}, and the "
        f"latest checkpoint is {latest}"
    )
    assert "Traceback" not in err


def test_a_run_whose_terminal_is_gone_saves_and_ends_well(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    with start(tmp_path, terminal) as process:
        os.close(terminal)
        shown = b""
        while b" left" not in shown:  # a step is done
            shown += os.read(main_end, 4096)
        os.close(main_end)
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, err
    assert list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))
    assert (tmp_path / "runs" / "run" / "summary.json").exists()
    assert "ConsoleSink" not in (tmp_path / "runs" / "run" / "logs" / "controller.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_below_stdout_is_not_said_to_be_the_disk_of_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, start(tmp_path, full) as process:
        _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 2
    assert err.splitlines()[-1] == (
        "podium train: stdout cannot be written any more (No space left on device): direct it to /dev/null, or to a "
        "file that has room"
    )
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()
    with (
        Path("/dev/full").open("w") as full,
        start(tmp_path, full, TRAIN.replace("main()", "main(['backends'])")) as one,
    ):
        _, err = one.communicate(timeout=LONG_S)
    assert err == "podium backends: stdout cannot be written (No space left on device)\n"


def test_a_stdout_that_is_closed_from_the_beginning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config_to_yaml(tiny(GRPOConfig, tmp_path)))
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
    assert main(["train", "grpo", "--config", str(file), "--backend", "inline"]) == 2
    err = capsys.readouterr().err
    assert err == "podium train: stdout is closed: direct it to /dev/null, or to a file that has room\n"
    assert not (tmp_path / "runs").exists()
