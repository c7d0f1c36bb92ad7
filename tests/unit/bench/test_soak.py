"""The soak sees what it looks for: memory, descriptors and shared memory of all processes, and their growth."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import podium
from bench import soak
from bench.census import descendants, take_census
from bench.report import END

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A census counts temporary files, and other programs have a hundred thousand of them on some machines."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.exhaustive
def test_a_census_counts_a_segment_once_whoever_has_it() -> None:
    before = take_census(os.getpid())
    fd = os.memfd_create("census")
    os.write(fd, bytes(MIB))
    os.set_inheritable(fd, True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        assert child.pid in descendants(os.getpid())
        after = take_census(os.getpid())
    finally:
        os.close(fd)
        child.communicate(b"\n")
    assert after.processes == before.processes + 1
    assert after.segments == before.segments + 1
    assert after.segment_bytes == before.segment_bytes + MIB
    assert after.descriptors > before.descriptors + 1
    assert after.rss > before.rss


def test_growth_is_the_last_quarter_against_the_first() -> None:
    census = take_census(os.getpid())
    lines = soak.report([replace(census, segments=count) for count in (1, 1, 5, 9, 9, 9, 7, 7)])
    (line,) = [line for line in lines if line["figure"] == "segments"]
    assert (line["first_quarter"], line["last_quarter"], line["growth"]) == (1, 7, 6)


@pytest.mark.exhaustive
def test_figures_are_lines_of_json_and_the_page_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, page = tmp_path / "samples", tmp_path / "page.md"
    assert soak.main(["--steps", "20", "--kills", "0", "--samples", str(samples)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"figure", "first_quarter", "last_quarter", "growth"} == set(lines[0])
    assert lines[-1]["steps"] == 20
    page.write_text(f"before\n{soak.MARK}\n{END}\nafter\n")
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "soak.json")
    monkeypatch.setattr(soak, "PAGE", page)
    assert soak.main(["--report", str(samples)]) == 0
    assert samples.read_text().count("threads") == 20
    assert "| steps | 20 |" in page.read_text()
    assert re.search(r"\| processes \| \d+ → \d+ \|", page.read_text())  # a process of tests may have others
    written = page.read_text()
    assert soak.main(["--report"]) == 0
    assert page.read_text() == written


def test_threads_and_temporary_files_that_stay_are_counted(tmp_path: Path) -> None:
    words = (
        "import sys, threading",
        "print(flush=True)",
        "sys.stdin.readline()",
        "threading.Thread(target=sys.stdin.read).start()",
        "print(flush=True)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:  # other threads of this process may end meanwhile
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        before = take_census(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
        after = take_census(process.pid)
    assert (after.threads - before.threads, after.files - before.files) == (1, 2)


@pytest.mark.exhaustive
def test_a_short_training_is_sampled(tmp_path: Path) -> None:
    samples, counts = soak.train(tmp_path, "sync", "inline", 4)
    assert len(samples) == counts["StepFinished"] == 4


@pytest.mark.exhaustive
def test_a_short_soak_survives_its_faults() -> None:
    with podium.connect("local", echo=False) as cluster:
        samples, counts = soak.soak(cluster, steps=40, kills=2, seed=1)
    assert len(samples) == 40
    assert (counts["killed_producer"], counts["killed_consumer"]) == (1, 1)
