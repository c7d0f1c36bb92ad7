"""Run the tests that failed once more, one after the other and with nothing beside them, and name those that now pass.

    python .ci/second_chance.py REPORT.xml

``make test`` has failed and has written REPORT.xml (pytest's ``--junitxml``) and its cache of failed tests. What fails
again fails the run, with pytest's own exit code. What passes is flaky: it is printed as ``flaky: NAME`` and added to
tests/flaky.md, a list of debts. More than ten failed tests are no accident, and get no second run.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MOST_FAILURES = 10
FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")
DEBTS = Path("tests/flaky.md")


def main(report: Path) -> int:
    """Return the exit code of the second run; 1 where there is none."""
    failed = read_failed_tests()
    if not failed or not report.exists():
        print("no second run: the first one ended before it could name its failed tests", flush=True)
        return 1
    if len(failed) > MOST_FAILURES:
        print(f"no second run: {len(failed)} tests failed, more than {MOST_FAILURES}", flush=True)
        return 1
    errors = read_first_error_lines(report)
    print(f"second run of {len(failed)} failed tests, one after the other:", *failed, sep="\n  ", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--all", "--last-failed", "--last-failed-no-failures=none"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    closing_line = ""
    for line in process.stdout:
        print(closing_line, end="", flush=True)
        closing_line = line
    code = process.wait()
    flaky = [test for test in failed if test not in read_failed_tests()] if code in (0, 1) else []
    for test in flaky:
        print(f"flaky: {test}")
    print(closing_line, end="", flush=True)  # pytest's own, which names the outcome, stays the last line
    if flaky:
        with DEBTS.open("a", encoding="utf-8") as debts:
            for test in flaky:
                debts.write(f"| {datetime.date.today()} | `{test}` | {errors.get(key_of(test), '?')} |\n")
    return code


def read_failed_tests() -> list[str]:
    """Return the names of the failed tests in pytest's cache."""
    return sorted(json.loads(FAILED_TESTS.read_text(encoding="utf-8"))) if FAILED_TESTS.exists() else []


def read_first_error_lines(report: Path) -> dict[str, str]:
    """Return the first line of the error of each failed test of a JUnit report, by :func:`key_of` the test."""
    lines: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in (*case.findall("failure"), *case.findall("error")):
            message = (outcome.get("message") or "?").splitlines()[0].replace("|", "\\|")
            lines[f"{case.get('classname')}.{case.get('name')}"] = message[:160]
    return lines


def key_of(test: str) -> str:
    """Return the name that a JUnit report gives to ``test``: dots in place of slashes and colons."""
    file, _, name = test.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
