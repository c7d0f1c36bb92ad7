"""Code that a model wrote, graded by the unit tests of its row, in a sandbox.

completion ─▶ code ─▶ sandbox of the solution ◀─ calls, plain data ─▶ sandbox of the tests ─▶ how many passed
                 └──▶ sandbox of the solution, fed with each input ─▶ outputs, compared here
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.rewards.columns import reads
from podium.spelling import write_count
from podium_rewards.sandbox import Kind, Limits, check_sandbox, run_programs

__all__ = ["CodeReward", "check_code", "find_code"]

_COLUMNS: Final = ("tests", "test_list", "test", "input_output", "answer")
_FENCE: Final = re.compile(r"```(\w*)[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_GRACE_S: Final = 1.0
_FUNCTION_NAMES: Final = ("fn_name", "func_name")
_OF_FUNCTIONS: Final = ("functional", "function_call", "call_based")
_OF_SCRIPTS: Final = ("stdin", "stdin_stdout", "standard_input")
"""Kinds of tests, by the names in data sets."""


@dataclass(frozen=True)
class _Tests:
    """The tests of a row: statements for functions, or inputs with their outputs for scripts."""

    statements: tuple[str, ...] = ()
    entry: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    has_calls: bool = False  # whether the statements are calls that this module has written

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
            {"what": "solve", "code": solution, "typed": tests.has_calls},
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
            tests = _parse_tests(row[column], row)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the column {column!r} has no tests that can be read: {error}") from None
        if not len(tests):
            raise ValueError(f"the column {column!r} has no tests")
        return tests


def _parse_tests(value: Any, row: Mapping[str, Any]) -> _Tests:
    """Read tests: statements, a list of them, or inputs and outputs of a script or of a function, also as text."""
    value = _load(value)
    items: list[Any] = (
        [value] if isinstance(value, str) else _split(value, row) if isinstance(value, Mapping) else [*value]
    )
    if all(isinstance(item, str) for item in items):
        _check_statements(items)
        return _Tests(statements=tuple(items), entry=str(row.get("entry_point") or ""))
    name = _find_name(row)
    calls, inputs, outputs = list[str](), list[str](), list[str]()
    for number, item in enumerate(items, 1):
        if not isinstance(item, Mapping) or not {"input", "output"} <= item.keys():
            raise ValueError(f"test {number} is no object with 'input' and 'output', as the others are expected to be")
        try:
            if called := _find_called(cast("Mapping[str, Any]", item), name, str(row.get("entry_point") or "")):
                calls.append(_write_call(called, item["input"], item["output"]))
            else:
                inputs.append(_text(item["input"]))
                outputs.append(_text(item["output"]))
        except ValueError as error:
            raise ValueError(f"test {number}: {error}") from None
    if calls and inputs:
        raise ValueError("some tests call a function, and others run a script: give a row tests of one kind")
    return _Tests(statements=tuple(calls), inputs=tuple(inputs), outputs=tuple(outputs), has_calls=bool(calls))


def _load(value: Any) -> Any:
    """A value that is written as JSON, or as Python writes lists and mappings; others as they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # statements in Python
                return read(value.strip())
    return value


def _split(value: Mapping[str, Any], row: Mapping[str, Any]) -> list[Any]:
    """One object for each test, of an object with the inputs and the outputs of all."""
    if {"input", "output"} <= value.keys():
        texts = [value["input"], value["output"]]
        if _find_name(value) or _find_name(row) or not all(map(_is_list_of_texts, texts)):
            return [value]
        value = {**value, "inputs": texts[0], "outputs": texts[1]}  # of several tests, as DeepMind writes them
    if not {"inputs", "outputs"} <= value.keys():
        raise ValueError(f"it has the entries {', '.join(map(repr, value)) or 'none'}: expected 'inputs' and 'outputs'")
    if other := next((name for name in ("inputs", "outputs") if not isinstance(value[name], list)), ""):
        raise ValueError(f"{other!r} is no list with an entry for each test: {str(value[other])[:40]!r}")
    if len(value["inputs"]) != len(value["outputs"]):
        counts = write_count(len(value["inputs"]), "input"), write_count(len(value["outputs"]), "output")
        raise ValueError(f"it has {counts[0]} and {counts[1]}")
    common = {name: entry for name, entry in value.items() if name not in ("inputs", "outputs")}
    return [
        {**common, "input": parameters, "output": output}
        for parameters, output in zip(value["inputs"], value["outputs"], strict=True)
    ]


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in cast("list[Any]", value))


def _check_statements(texts: Sequence[str]) -> None:
    """Check that statements are Python that tests something. Raises ValueError."""
    nodes = list[ast.AST]()
    for number, text in enumerate(texts, 1):
        try:
            with warnings.catch_warnings(action="ignore"):
                nodes += ast.walk(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"test {number} is neither JSON nor Python: {error}; it begins {text[:80]!r}") from None
    if texts and not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
        raise ValueError(
            f"nothing in it can fail, as an assert or a call can; it begins {texts[0][:80]!r}. Name the column with "
            'the tests, as in check_code(tests="…")'
        )


def _find_name(holder: Mapping[str, Any]) -> str:
    """The name of a function that a row or a test has, by itself or in ``metadata``; "" for none."""
    metadata = _load(holder.get("metadata"))
    holders = [holder, *([cast("Mapping[str, Any]", metadata)] if isinstance(metadata, Mapping) else [])]
    names = [entries.get(name) for entries in holders for name in _FUNCTION_NAMES]
    return next((name for name in names if isinstance(name, str) and name), "")


def _find_called(item: Mapping[str, Any], name: str, entry: str) -> str:
    """The function that a test calls; "" for a test of a script.

    Args:
        item: The test.
        name: The function that the row names for all tests.
        entry: The row's ``entry_point``.

    Raises:
        ValueError: The kind of the test is not known, or it calls a function that nothing names.
    """
    name, kind = _find_name(item) or name, item.get("testtype") or item.get("test_type")
    kind = kind.lower() if isinstance(kind, str) else kind
    if not kind and item.get("type") in (*_OF_FUNCTIONS, *_OF_SCRIPTS):
        kind = item["type"]
    if kind in _OF_SCRIPTS:
        return ""
    if kind and kind not in _OF_FUNCTIONS:
        raise ValueError(
            f"'testtype' is {str(kind)[:40]!r}: expected one of {', '.join((*_OF_FUNCTIONS, *_OF_SCRIPTS))}"
        )
    if kind and not (name or entry):
        raise ValueError(
            "it calls a function, and nothing names it: give 'fn_name' or 'func_name' in the test, in the row, or in "
            "'metadata' of either"
        )
    return name or (entry if kind else "")


def _write_call(name: str, parameters: Any, output: Any) -> str:
    """A test that calls a function. JSON has no tuples, which are equal to lists here.

    Raises:
        ValueError: The arguments or the result cannot be read.
    """
    arguments, named, results = list[Any](), dict[str, Any](), [output]
    if isinstance(parameters, str):
        arguments = [_read_json(line, "'input'") for line in parameters.split("\n") if line.strip()]
        results = [_read_json(output, "'output'") if isinstance(output, str) else output]
    elif isinstance(parameters, Mapping):
        named = {str(key): value for key, value in cast("Mapping[Any, Any]", parameters).items()}
    elif isinstance(parameters, list | tuple):
        arguments = [*cast("Sequence[Any]", parameters)]
    else:
        raise ValueError(
            f"'input' is a {type(parameters).__name__}: expected the arguments of {name!r} as a list, an object by "
            "their names, or a text with a line of JSON for each"
        )
    if not isinstance(parameters, str):  # some data sets wrap a result in a list, and some write it as text
        results += output if isinstance(output, list) and len(cast("list[Any]", output)) == 1 else []
        with contextlib.suppress(ValueError):
            results += [_read_json(output, "'output'")] if isinstance(output, str) else []
    _check_plain([arguments, named, results])
    return (
        f"import json\nnan, inf = float('nan'), float('inf')\n"
        f"_arguments, _named, _results = {arguments!r}, {named!r}, {results!r}\n"
        f"_result = json.loads(json.dumps(_entry({name!r})(*_arguments, **_named)))\n"
        "assert _result in _results, f'{_result!r} is wrong'[:200]"
    )


def _read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} of a test of a function has {text[:80]!r}, which is no JSON ({error}): write each argument as a "
            "line of JSON, and the result as JSON; or give the test the testtype 'stdin' if a script reads it"
        ) from None


def _check_plain(value: Any) -> None:
    """Raise ValueError for a value that a test cannot write down."""
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple | set):
        for item in cast("Sequence[Any]", value):
            _check_plain(item)
    elif not isinstance(value, str | bytes | int | float | None):
        raise ValueError(f"a {type(value).__name__} is no plain data: give numbers, texts, lists and objects")


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
