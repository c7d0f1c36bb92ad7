"""The everyday tests beside processes that compute: the processes end, and the count of runs in a row continues."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.busy import BusyRecord, RunResult, compute_beside, fill_row, read_result
from tests.waits import all_end, wait_until


def read_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()[11])


def test_the_processes_compute_until_the_run_has_ended() -> None:
    with compute_beside(2) as pids:
        assert wait_until(lambda: all(read_ticks(pid) > 10 for pid in pids))
    assert all_end(pids)


def test_the_processes_end_with_a_command_that_is_killed() -> None:
    program = "from tests.busy import compute_beside\nwith compute_beside(2) as pids: print(*pids, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout
        pids = [*map(int, command.stdout.readline().split())]
        assert len(pids) == 2 and wait_until(lambda: all(map(read_ticks, pids)))
        command.kill()
    assert all_end(pids)


def test_the_tests_end_with_the_command_that_is_asked_to_end(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    tests = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    program = f"import sys; from tests.busy import run_tests; run_tests([sys.executable, '-c', {tests!r}])"
    with subprocess.Popen([sys.executable, "-c", program]) as command:
        assert wait_until(lambda: note.exists() and note.read_text(encoding="ascii").endswith("."))
        command.terminate()
        assert command.wait() == 143
    assert all_end([int(note.read_text(encoding="ascii")[:-1])])


def test_failures_and_the_last_line_are_read() -> None:
    output = (
        "FAILED tests/unit/test_a.py::test_b[1 - 2] - assert 1 == 2\n"
        "ERROR tests/unit/test_c.py::test_d\n"
        "========= 1 failed, 8 passed, 1 error in 3.2s =========\n"
    )
    assert read_result(1, output) == {
        "passed": False,
        "summary": "1 failed, 8 passed, 1 error in 3.2s",
        "failures": ["tests/unit/test_a.py::test_b[1 - 2] - assert 1 == 2", "tests/unit/test_c.py::test_d"],
    }
    assert read_result(-9, "..")["summary"] == "exit status -9"


def test_a_count_continues_and_begins_anew_behind_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "busy.json"
    results = iter([True, KeyboardInterrupt, True, False, True, True, True, True])

    def run() -> RunResult:
        if (passed := next(results)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return {"passed": passed}

    with pytest.raises(KeyboardInterrupt):
        list(fill_row(BusyRecord(path), 3, run))
    assert len(list(fill_row(BusyRecord(path), 3, run))) == 2, "it ends with the run that fails"
    assert BusyRecord(path).list_row() == []
    assert len(list(fill_row(BusyRecord(path), 3, run))) == 3
    assert len(BusyRecord(path).list_row()) == 3
    assert list(fill_row(BusyRecord(path), 3, run)) == [], "there are as many as were asked for"
    assert os.listdir(path.parent) == ["busy.json"]
