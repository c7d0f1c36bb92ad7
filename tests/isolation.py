"""Each test file in a process of its own, with its tests in random order: ``make test-alone``.

A test that passes only after another test, or only before it, fails here. The files' results are kept in
runs/test-alone.json, so that a run that was interrupted continues with the files that have not passed. The order of a
file's tests depends on the seed and on their names alone: ``pytest --shuffle SEED FILE`` repeats it, and two tests keep
their order when others are deselected. ``make test-ray`` runs the tests with Ray.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from tests.scheduling import read_seconds

__all__ = ["FileResult", "IsolationRecord", "list_test_files", "main", "run_files", "shuffle"]

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "runs" / "test-alone.json"
FileResult = dict[str, Any]
"""``passed``, whether no test failed; ``summary``, the last line of pytest; ``output`` where a test failed."""


def shuffle(items: list[Any], seed: int) -> None:
    """Sort pytest's ``items`` in place: the files stay in their order, the tests of each file come in a random one."""
    ranks: dict[Path, int] = {}
    for item in items:
        ranks.setdefault(item.path, len(ranks))
    items.sort(key=lambda item: (ranks[item.path], hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()))


class IsolationRecord:
    """The seed of a run and the results of its files, in a file that is written after each of them."""

    def __init__(self, path: Path, seed: int | None = None, again: bool = False) -> None:
        """Continue the record at ``path``, unless ``again`` is true or ``seed`` is another than the record's."""
        self.path = path
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not again else {}
        if seed is not None and content.get("seed") != seed:
            content = {"seed": seed}
        self.seed: int = content.get("seed", random.SystemRandom().randrange(1_000_000))
        self.files: dict[str, FileResult] = content.get("files", {})

    def add(self, file: str, result: FileResult) -> None:
        self.files[file] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"seed": self.seed, "files": self.files}, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def has_passed(self, file: str) -> bool:
        return self.files.get(file, {}).get("passed", False)


def list_test_files(root: Path, names: Sequence[str]) -> list[str]:
    """Return the test files in the files and folders ``names``, in that order; of one folder the longest first."""
    seconds = read_seconds()
    files: list[str] = []
    for name in names:
        path = root / name
        if not path.exists():
            raise SystemExit(f"there is no {name} in {root}")
        paths = [path] if path.is_file() else path.rglob("test_*.py")
        folder = [path.relative_to(root).as_posix() for path in paths]
        files += sorted(folder, key=lambda file: (-seconds.get(file, 0.0), file))
    return list(dict.fromkeys(files))


def run_files(
    files: Sequence[str], record: IsolationRecord, processes: int, run: Callable[[str, int], FileResult]
) -> Iterator[tuple[str, FileResult]]:
    """Run ``files`` that have not passed in ``record``, so many ``processes`` at a time; add and yield each result."""
    with ThreadPoolExecutor(processes) as pool:
        futures = {pool.submit(run, file, record.seed): file for file in files if not record.has_passed(file)}
        try:
            for future in as_completed(futures):
                record.add(futures[future], future.result())
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_file(file: str, seed: int) -> FileResult:
    """Run the everyday tests of ``file`` without Ray in a new process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--shuffle={seed}",
        "-m",
        "not ray",
        file,
    ]
    started = time.monotonic()
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = process.stdout.decode(errors="replace")
    lines = [line for line in output.splitlines() if re.search(r"\b(in \d|error|no tests)", line)]
    result: FileResult = {
        "passed": process.returncode in (0, 5),  # 5: the file has exhaustive tests or tests with Ray alone
        "summary": lines[-1].strip("= ") if lines else f"exit status {process.returncode}",
        "seconds": round(time.monotonic() - started, 1),
    }
    return result if result["passed"] else {**result, "output": output[-40_000:]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.isolation", description=__doc__)
    parser.add_argument("files", nargs="*", default=["plugins", "tests"], help="files and folders; all by default")
    parser.add_argument("--seed", type=int, help="seed of the order; by default that of the record, or a new one")
    parser.add_argument("--again", action="store_true", help="begin anew: run the files that have passed, too")
    parser.add_argument("--processes", type=int, default=1, help="how many files run at a time (default: 1)")
    options = parser.parse_args(arguments)
    record = IsolationRecord(RECORD, options.seed, options.again)
    files = list_test_files(ROOT, options.files)
    waiting = [file for file in files if not record.has_passed(file)]
    print(f"seed {record.seed}: {len(waiting)} of {len(files)} files; the others have passed with it", flush=True)  # noqa: T201 - a command
    for file, result in run_files(files, record, options.processes, run_file):
        print(f"{'passed' if result['passed'] else 'FAILED'} {file}: {result['summary']}", flush=True)  # noqa: T201 - a command
        if not result["passed"]:
            print(result["output"], flush=True)  # noqa: T201 - a command
    if failures := [file for file in files if not record.has_passed(file)]:
        print(f"seed {record.seed}: these files failed, each alone:")  # noqa: T201 - a command
        for file in failures:
            print(f"  python -m pytest --shuffle {record.seed} -m 'not ray' {file}")  # noqa: T201 - a command
        sys.exit(1)
    print(f"seed {record.seed}: each of the {len(files)} files has passed alone")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
