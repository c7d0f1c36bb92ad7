"""The scripts by which shells complete: each is run in its own shell, where that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from podium.cli import COMMANDS, main

CASES = [
    (["tra"], ["train"]),
    (["train", "g"], ["grpo"]),
    (["train", "grpo", "--optim.l"], ["--optim.lr", "--optim.lr_schedule"]),
    (["train", "grpo", "--optim.lr_schedule", ""], ["constant", "cosine", "linear"]),
    (["train", "sft", "--batch."], ["--batch.examples"]),
    (["train", "grpo", "--dry"], ["--dry-run"]),
    (["eval", "runs/x", "--eval.it"], ["--eval.items"]),
    (["sample", "--prom"], ["--prompt"]),
    (["view", "--exp"], ["--export"]),  # of a package
]


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path_factory.mktemp("completion") / f"podium.{request.param}"
    command = [sys.executable, "-m", "podium", "completion", request.param]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return request.param, path


def completed(shell: str, path: Path, words: list[str]) -> list[str]:
    """What the shell proposes for the last word."""
    line = ["podium", *words]
    quoted = " ".join(f"'{word}'" for word in line)
    scripts = {
        "bash": (
            f"source {path}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _podium; printf '%s\\n' ${{COMPREPLY[@]}}"
        ),
        "zsh": (
            f"compdef() {{ :; }}; source {path}; compadd() {{ shift; for word in $@; do "
            "[[ $word == ${words[CURRENT]}* ]] && print -- $word; done }; "
            f"words=({quoted}); CURRENT={len(line)}; _podium"
        ),
        "fish": f"source {path}; complete -C '{' '.join(line)}' | string split -f1 \\t",
    }
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}
    done = subprocess.run([shell, *flags[shell], "-c", scripts[shell]], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return sorted(done.stdout.split())


@pytest.mark.each_value
@pytest.mark.parametrize(("words", "expected"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_words_are_completed(shell: tuple[str, Path], words: list[str], expected: list[str]) -> None:
    assert completed(*shell, words) == expected


def test_every_command_is_completed(shell: tuple[str, Path]) -> None:
    assert set(completed(*shell, [""])) >= set(COMMANDS)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "powershell"])
    assert "invalid choice" in capsys.readouterr().err
