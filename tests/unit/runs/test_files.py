"""Files stay whole, whoever is killed, and a directory has one writer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.runs.run_files import RunFiles


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write("old", "summary.json")
    with pytest.raises(UnicodeEncodeError):
        files.write("\ud800", "summary.json")
    with pytest.raises(KeyboardInterrupt), files.replace("summary.json") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert files.read("summary.json") == b"old"
    assert files.names() == ["summary.json"]


def test_a_reader_never_sees_half_a_file_although_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    script = f"""
import sys
from podium.runs.run_files import RunFiles
for n in range(10**6):
    RunFiles({str(tmp_path)!r}).write('{{"n": "' + str(n % 10) * 500_000 + '"}}', "state.json")
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
