"""The everyday tests again and again, beside processes that compute: ``make test-busy``.

A test that a clock decides fails here. Each run is kept in tests/busy_runs.json with the commit that it ran on, so that
the command continues the count where it was interrupted, on another machine too if the file is committed. A run that
fails ends the command, and the count begins anew behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["BusyRecord", "RunResult", "compute_beside", "main", "read_result", "run_tests"]

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "tests" / "busy_runs.json"
RunResult = dict[str, Any]
"""``commit``; ``passed``; ``summary``, the last line of pytest; ``failures``, a line a test; ``seconds``."""

COMPUTE: Final = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True: pass
"""
"""It computes until whoever started it ends, or closes its standard input."""


class BusyRecord:
    """The results of runs, the oldest first, in a file that is written after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[RunResult] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def add(self, result: RunResult) -> None:
        self.runs.append(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.runs, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def list_row(self) -> list[RunResult]:
        """Return the runs behind the last one that failed."""
        failed = [index for index, run in enumerate(self.runs) if not run["passed"]]
        return self.runs[failed[-1] + 1 if failed else 0 :]


@contextmanager
def compute_beside(count: int) -> Iterator[list[int]]:
    """Let ``count`` processes compute, and give their ids."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE))
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        yield [process.pid for process in processes]


def read_result(status: int, output: str) -> RunResult:
    """Read what pytest printed before it ended with ``status``."""
    lines = output.splitlines()
    summaries = [line for line in lines if re.search(r"\d (passed|failed|error).* in \d", line)]
    failures = [line.split(maxsplit=1)[1] for line in lines if re.match(r"(FAILED|ERROR) \S", line)]
    return {
        "passed": status == 0,
        "summary": summaries[-1].strip("= ") if summaries else f"exit status {status}",
        "failures": failures,
    }


def run_tests(command: Sequence[str]) -> tuple[int, str]:
    """Run ``command``, which ends with this process; return its exit status and what it printed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as tests:
        try:
            output, _ = tests.communicate()
        except BaseException:
            tests.terminate()
            raise
    return tests.returncode, output.decode(errors="replace")


def read_commit() -> str:
    """Return the commit of the files here, with ``+`` where some of them but the record differ from it."""

    def read(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = read("status", "--porcelain", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    return read("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def fill_row(record: BusyRecord, runs: int, run: Callable[[], RunResult]) -> Iterator[RunResult]:
    """Run until ``record`` has so many ``runs`` in a row without a failure, or one fails; add and yield each result."""
    while len(record.list_row()) < runs:
        record.add(result := run())
        yield result
        if not result["passed"]:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.busy", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many runs in a row shall pass (default: 10)")
    parser.add_argument("--beside", type=int, default=4, help="how many processes compute beside (default: 4)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes of the tests")
    options = parser.parse_args(arguments)
    record = BusyRecord(RECORD)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.processes), "--dist", "loadscope"]

    def run() -> RunResult:
        commit, started = read_commit(), time.monotonic()
        with compute_beside(options.beside):
            status, output = run_tests(command)
        result = read_result(status, output)
        if not result["passed"]:
            print(output[-40_000:], flush=True)  # noqa: T201 - a command
        return {"commit": commit, **result, "beside": options.beside, "seconds": round(time.monotonic() - started)}

    for result in fill_row(record, options.runs, run):
        print(f"{result['commit']}: {result['summary']}", flush=True)  # noqa: T201 - a command
    row = record.list_row()
    commits = ", ".join(dict.fromkeys(result["commit"] for result in row))
    print(f"{len(row)} of {options.runs} runs in a row have passed{f', on {commits}' if commits else ''}")  # noqa: T201 - a command
    sys.exit(len(row) < options.runs)


if __name__ == "__main__":
    main()
