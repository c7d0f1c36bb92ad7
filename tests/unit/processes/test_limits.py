"""Limits of the system that a run meets, and the sentence about each."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import podium.cli
from podium.errors import ConfigError
from podium.processes import explain_limit


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        RuntimeError("libgomp: pthread_create failed"),
    ],
)
def test_exhausted_threads_are_named_with_limit_and_remedy(error: Exception) -> None:
    wrapper = ValueError("the run ended")
    wrapper.__cause__ = error
    for shown in (error, wrapper):
        assert "no more threads and processes: the limit (ulimit -u)" in explain_limit(shown)
        assert "raise it, or end other processes" in explain_limit(shown)
    assert explain_limit(ValueError("another error")) == ""


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"), "set TMPDIR"),
        (
            RuntimeError("[enforce fail at device.cc:84] Unable to find address for: lo"),
            "ip link set lo",
        ),
    ],
)
def test_what_a_system_lacks_is_named_with_the_remedy(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such an error came out as a traceback, or with the advice to check a path."""

    def fail(words: object) -> int:
        raise ConfigError("the run cannot begin") from error

    assert remedy in explain_limit(error)
    monkeypatch.setattr("podium.cli.load_command", lambda name: fail)
    assert podium.cli.main(["train"]) == 2
    assert remedy in capsys.readouterr().err


def test_other_errors_of_memory_are_no_limit_where_there_is_none() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert explain_limit(MemoryError()) == ""


def test_a_limit_on_address_space_that_is_too_small_gets_one_sentence(tmp_path: Path) -> None:
    """A new interpreter, where torch meets the limit as it is mapped. Under a higher one the C library may abort."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n' * 80)
    words = ["--data.train", str(tmp_path / "rows.jsonl"), "--model.tokenizer", "chars:0123456789="]
    words += [
        "--model.config",
        "{model_type: qwen3, hidden_size: 32}",
        "--run.dir",
        str(tmp_path),
        "--run.steps",
        "1",
        "--eval.items",
        "0",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "podium", "train", "grpo", *words, "--backend", "local"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (500_000 << 10, 500_000 << 10)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    # The process that starts workers meets the limit, too: its C library may write a line before this one or after it.
    (sentence,) = (line for line in process.stderr.splitlines() if line.startswith("podium train: "))
    assert "(ulimit -v) is 500000 KiB, which is too little" in sentence
    assert "`ulimit -v unlimited`" in sentence


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
            r"\(ulimit -n\) is 7, .* raise it, as with `ulimit -n 4096`",
        ),
        (
            ImportError("libtorch.so: failed to map segment from shared object"),
            r"\(ulimit -v\) is 0 KiB, .* raise it, as",
        ),
    ],
)
def test_a_limit_behind_an_error_is_what_the_command_line_names(
    error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapper = ConfigError("trainer of the recipe cannot be loaded")
    wrapper.__cause__ = error

    def end(arguments: list[str]) -> int:
        raise shown

    monkeypatch.setattr(resource, "getrlimit", lambda _: (7, 7))
    monkeypatch.setattr(podium.cli, "load_command", lambda _: end)
    monkeypatch.setattr(podium.cli, "_try_stdout", lambda: True)
    for shown in (error, wrapper):
        assert podium.cli.main(["train"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert said.endswith(f"{shown})\n"), said
        assert re.search(expected, said), said
