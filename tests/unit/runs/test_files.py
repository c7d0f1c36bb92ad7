"""Files stay whole, whoever is killed, and a directory has one writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.runs.files import write_atomically


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
from podium.runs.files import write_atomically
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
