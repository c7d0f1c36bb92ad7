"""Code that a model wrote, graded by the unit tests of its row, in a sandbox.

completion ─▶ code ─▶ sandbox of the solution ◀─ calls, plain data ─▶ sandbox of the tests ─▶ how many passed
                 └──▶ sandbox of the solution, fed with each input ─▶ outputs, compared here
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podium.errors import ConfigError
from podium.rewards.columns import reads
from podium_rewards.sandbox import Kind, Limits, check_sandbox, run_programs

__all__ = ["CodeReward", "check_code", "find_code"]

_COLUMNS: Final = ("tests", "test_list", "test", "input_output", "answer")
_FENCE: Final = re.compile(r"```(\w*)[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_GRACE_S: Final = 1.0


@dataclass(frozen=True)
class _Tests:
    """The tests of a row: statements for functions, or inputs with their outputs for scripts."""

    statements: tuple[str, ...] = ()
    entry: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.statements) or len(self.inputs)


def check_code(**options: Any) -> CodeReward:
    """Return a reward that runs the code in a completion against the row's tests.

    Args:
        options: As of :class:`CodeReward`.

    Raises:
        ConfigError: An option is wrong, or there is no sandbox.
    """
    return CodeReward(**options)


@reads(least=0.0)  # which column has the tests, it finds in each row
class CodeReward:
    """Code by unit tests: 1 if all tests of the row pass, else 0.

    Args:
        tests: The column with the tests; "" takes the first of tests, test_list, test, input_output and answer.
        partial: Whether the score is the share of the tests that pass.
        time_limit_s: The most seconds of all tests of a completion together.
        memory_mib: The most memory of the code.
        processes: The most processes and threads at the same time.
        output_mib: The most that the code may write.
        paths: Folders of packages that the code may import.
        sandbox: ``"bwrap"``, or ``"none"`` to run the code without a sandbox, as the user of the run.

    Raises:
        ConfigError: An option is wrong, or there is no sandbox.
    """

    def __init__(
        self,
        *,
        tests: str = "",
        partial: bool = False,
        time_limit_s: float = 4.0,
        memory_mib: int = 1024,
        processes: int = 16,
        output_mib: int = 4,
        paths: Sequence[str] = (),
        sandbox: Kind = "bwrap",
    ) -> None:
        if time_limit_s <= 0 or memory_mib < 64 or processes < 1 or output_mib < 1 or isinstance(paths, str):
            raise ConfigError(
                "check_code: expected time_limit_s above 0, memory_mib from 64 on, processes and output_mib from 1 on, "
                "and a list of paths"
            )
        check_sandbox(sandbox, 'check_code(sandbox="none")')
        self._column, self._partial, self._paths = tests, partial, tuple(paths)
        self._sandbox: Kind = sandbox
        self._limits = Limits(seconds=time_limit_s, memory_mib=memory_mib, processes=processes, output_mib=output_mib)
        self.least_limit_s = time_limit_s + _GRACE_S

    def check_columns(self, columns: frozenset[str]) -> None:
        """Check that rows with these columns have tests. Raises ConfigError."""
        wanted = (self._column,) if self._column else _COLUMNS
        if not columns & {*wanted}:
            raise ConfigError(
                f"the reward code finds no tests: none of {', '.join(wanted)} is a column of the data, which has "
                f'{", ".join(sorted(columns)) or "none"}: name it, as in check_code(tests="…")'
            )

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the score, the share of the tests that passed, and why others failed.

        Raises:
            ValueError: The row has no tests, or none that can be read.
        """
        tests = self._read_tests(row)
        solution = find_code(completion)
        passed, problem = self._run_inputs(solution, tests) if tests.inputs else self._run_calls(solution, tests)
        share = passed / len(tests)
        score = share if self._partial else float(passed == len(tests))
        return {"score": score, "passed": share, **({"failed": problem} if problem else {})}

    def _run_calls(self, solution: str, tests: _Tests) -> tuple[int, str]:
        tasks = [
            {"what": "solve", "code": solution},
            {"what": "test", "tests": tests.statements, "entry": tests.entry},
        ]
        _, done = run_programs(tasks, self._limits, self._sandbox, socket.socketpair(), self._paths)
        if done.limit:
            return 0, f"ran over its limit of {done.limit}"
        try:
            report = json.loads(done.output)
            return int(report["passed"]), str(report["problem"])
        except (ValueError, KeyError, TypeError):
            return 0, f"the tests ended with status {done.status}"

    def _run_inputs(self, solution: str, tests: _Tests) -> tuple[int, str]:
        task = {"what": "inputs", "code": solution, "inputs": tests.inputs}
        (done,) = run_programs([task], self._limits, self._sandbox, (), self._paths)
        passed, problem = 0, ""
        reports = [*_read_reports(done.output)][: len(tests)]
        for (status, output), wanted in zip(reports, tests.outputs, strict=False):
            is_right = status == 0 and output.split() == wanted.split()
            passed += is_right
            if not is_right:
                why = f"ended with status {status}" if status else f"wrote {output[:200]!r} for {wanted[:200]!r}"
                problem = problem or why
        if done.limit:
            problem = f"ran over its limit of {done.limit}"
        elif len(reports) < len(tests):
            problem = problem or f"ended with status {done.status}"
        return passed, problem

    def _read_tests(self, row: Mapping[str, Any]) -> _Tests:
        wanted = (self._column,) if self._column else _COLUMNS
        column = next((name for name in wanted if row.get(name) not in (None, "", [])), None)
        if column is None:
            raise ValueError(f"the row has no tests in {' or '.join(wanted)}")
        try:
            tests = _parse_tests(row[column], str(row.get("entry_point") or ""))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the column {column!r} has no tests that can be read: {error}") from None
        if not len(tests):
            raise ValueError(f"the column {column!r} has no tests")
        return tests


def _parse_tests(value: Any, entry: str) -> _Tests:
    """Read tests: statements, a list of them, or inputs and outputs, also as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # Python that begins with a bracket
            value = json.loads(value)
    if isinstance(value, str):
        return _Tests(statements=(value,), entry=entry)
    if isinstance(value, Mapping):
        name, pairs = value.get("fn_name"), zip(value["inputs"], value["outputs"], strict=True)
    elif all(isinstance(item, str) for item in value):
        return _Tests(statements=tuple(value), entry=entry)
    else:
        name, pairs = None, ((item["input"], item["output"]) for item in value)
    pairs = [*pairs]
    if name:
        return _Tests(statements=tuple(_write_call(str(name), arguments, wanted) for arguments, wanted in pairs))
    inputs, outputs = ([_text(pair[side]) for pair in pairs] for side in (0, 1))
    return _Tests(inputs=tuple(inputs), outputs=tuple(outputs))


def _write_call(name: str, arguments: Any, wanted: Any) -> str:
    """A test that calls a function with these arguments. JSON has no tuples, which are equal to lists here."""
    return (
        f"import json\n_result = json.loads(json.dumps(_entry({name!r})(*{arguments!r})))\n"
        f"assert _result == {wanted!r} or [_result] == {wanted!r}, f'{{_result!r}} is wrong'[:200]"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_reports(output: bytes) -> Sequence[tuple[int, str]]:
    reports: list[tuple[int, str]] = []
    for line in output.splitlines():
        try:
            report = json.loads(line)
            reports.append((int(report["status"]), str(report["output"])))
        except (ValueError, KeyError, TypeError):
            break
    return reports


def find_code(completion: str) -> str:
    """Return the last block of Python in a completion, else the last block, else all of it."""
    blocks = _FENCE.findall(completion)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [text for _, text in blocks] or [completion])[-1]
