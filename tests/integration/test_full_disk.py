"""Export and view on a disk that is full: the file is named, and nothing half written is left."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from podium.cli import main
from podium.cli.spinner import StatusSink
from podium.telemetry import Note, emit, flush


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB. The test is skipped where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "podium-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("name", ["run", "run@latest"])
def test_an_export_to_a_full_disk_names_the_file(
    name: str, finished_grpo: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(finished_grpo / "runs" / name), "--to", str(small_disk / "model")]) == 2
    error = capsys.readouterr().err
    assert f"cannot write {small_disk}/model/model.safetensors: " in error
    assert "No space left on device; make room on that disk" in error
    assert "Traceback" not in error
    assert [*small_disk.iterdir()] == []


def test_a_page_on_a_full_disk_names_the_file(
    finished_grpo: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = small_disk / "page.html"
    assert main(["view", str(finished_grpo / "runs" / "run"), "--export", str(page)]) == 2
    error = capsys.readouterr().err
    assert f"cannot write {page}: No space left on device; make room on that disk" in error
    assert [*small_disk.iterdir()] == []


def test_a_picture_on_a_full_disk_names_the_file(
    finished_grpo: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, picture = str(finished_grpo / "runs" / "run"), small_disk / "picture.png"
    assert main(["runs", "compare", run, run, "--out", str(picture)]) == 2
    error = capsys.readouterr().err
    assert f"cannot write {picture}: No space left on device; make room on that disk" in error
    assert [*small_disk.iterdir()] == []


def test_a_status_that_cannot_be_written_ends_no_command() -> None:
    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with redirect_stderr(Full()), StatusSink("loading runs/a"):
        emit(Note("1 of 4 prompts"))
        flush()


def test_a_completed_script_on_a_full_disk_is_an_error_of_the_disk(
    finished_grpo: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever writes: the sentence names the disk's reason and the remedy."""
    log = small_disk / "log"
    log.write_bytes(bytes(8 << 10))
    assert main(["export", str(finished_grpo / "runs" / "run"), "--to", str(small_disk / "a" / "b")]) == 2
    assert "make room on that disk" in capsys.readouterr().err
