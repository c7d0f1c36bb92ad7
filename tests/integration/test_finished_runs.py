"""Runs that tests share are made once, and a test that changes one fails."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from podium.cli import main
from tests.integration.finished_runs import LAYOUTS, copy_folder, read_only, share_folder


def test_a_layout_is_made_by_the_first_who_asks(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that could not be made is made again."""
    makers: list[Path] = []

    def make(folder: Path) -> None:
        (folder / "run").mkdir()
        makers.append(folder)
        if len(makers) == 1:
            raise ArithmeticError("it fails once")

    monkeypatch.setitem(LAYOUTS, "counted", make)
    with pytest.raises(ArithmeticError):
        share_folder(tmp_path_factory, "counted")
    with ThreadPoolExecutor(4) as threads:
        folders = {*threads.map(lambda _: share_folder(tmp_path_factory, "counted"), range(4))}
    assert makers == [*folders, *folders]
    (folder,) = folders
    assert (folder / "run").is_dir()
    assert folder.stat().st_mode & 0o222 == 0


def test_who_changes_a_shared_run_fails_and_who_changes_a_copy_does_not(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "shared" / "latest").symlink_to("metrics.jsonl")
    with pytest.raises(AssertionError, match="change a copy of it"), read_only(tmp_path / "shared") as folder:
        (folder / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(AssertionError, match="change a copy of it"), read_only(tmp_path / "shared") as folder:
        (folder / "more").touch()
    with read_only(tmp_path / "shared") as folder:
        copy = copy_folder(folder, tmp_path / "copy")
        (copy / "latest").write_text("changed\n")
    assert (copy / "metrics.jsonl").read_text() == "changed\n"


def test_a_prompt_with_characters_that_the_tokenizer_lacks_is_named(
    finished_grpo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = str(finished_grpo / "runs" / "run")
    assert main(["sample", run_folder, "--prompt", "1é=", "--backend", "inline", "--engine.name", "transformers"]) == 0
    assert "1 of 1 prompt holds characters that the tokenizer does not know, such as 'é'" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["1="], ["1=", "", "2="]])
def test_answers_to_lines_of_stdin_are_told_apart(
    finished_grpo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    run_folder = str(finished_grpo / "runs" / "run")
    assert main(["sample", run_folder, "--backend", "inline", "--engine.name", "transformers"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
    assert heads == [f"--- prompt {number}, completion 1" for number in range(1, len(list(filter(None, typed))) + 1)]
