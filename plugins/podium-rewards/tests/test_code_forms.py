"""Forms of unit tests: those of data sets are read as they are meant, and what cannot be read is refused.

The code is our own, so that it runs without a sandbox.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from podium.errors import RewardError
from podium.rewards import Grader, RewardConfig

check_code = pytest.importorskip("podium_rewards").check_code

METHOD = "class Solution:\n    def add(self, numbers: List[int], more: Optional[int] = 0) -> int:\n"
METHOD += "        return sum(numbers) + more"
FUNCTION = "def add(numbers, more=0):\n    return sum(numbers) + more"
TEXTS = "def add(first, second):\n    return first + second"
FUNCTIONAL: dict[str, Any] = {"testtype": "functional"}
LINES = {"input": "[1, 2]\n3", "output": "6"}


def run(code: str, row: Any) -> dict[str, Any]:
    reward = check_code(partial=True, time_limit_s=60.0, sandbox="none")
    return dict(reward(f"```python\n{code}\n```", row))


@pytest.mark.parametrize(
    ("code", "row"),
    [
        (METHOD, {"tests": json.dumps([{**FUNCTIONAL, **LINES}]), "metadata": '{"func_name": "add"}'}),
        (METHOD, {"tests": json.dumps([{**FUNCTIONAL, **LINES, "metadata": {"func_name": "add"}}])}),
        (METHOD, {"tests": [{**FUNCTIONAL, **LINES, "fn_name": "add"}, {**FUNCTIONAL, **LINES, "fn_name": "add"}]}),
        (METHOD, {"tests": [{**FUNCTIONAL, **LINES}], "fn_name": "add"}),
        (METHOD, {"tests": [{**FUNCTIONAL, **LINES}], "entry_point": "add"}),
        (METHOD, {"tests": [LINES], "metadata": {"func_name": "add"}}),
        (FUNCTION, {"tests": str([{**FUNCTIONAL, **LINES, "fn_name": "add"}])}),
        (FUNCTION, {"tests": {"fn_name": "add", "inputs": ["[1, 2]\n3\n"], "outputs": ["6"]}}),
        (FUNCTION, {"tests": {"fn_name": "add", "inputs": [[[1, 2], 3]], "outputs": [6]}}),
        (FUNCTION, {"tests": {"fn_name": "add", "inputs": [[[1, 2], 3]], "outputs": [[6]]}}),
        (FUNCTION, {"tests": {"fn_name": "add", "inputs": [[[1, 2], 3]], "outputs": ["6"]}}),
        (FUNCTION, {"tests": {"fn_name": "add", "inputs": [{"more": 3, "numbers": [1, 2]}], "outputs": [6]}}),
        (FUNCTION, {"tests": [{"type": "function_call", "fn_name": "add", "input": [[1, 2], 3], "output": 6}]}),
        (FUNCTION, {"tests": [{"type": "public", "fn_name": "add", **LINES}]}),
        (TEXTS,
         {"tests": [{**FUNCTIONAL, "fn_name": "add", "input": '"a"\n"\\n\u2028b"', "output": '"a\\n\u2028b"'}]}),
        (TEXTS, {"tests": [{"fn_name": "add", "input": ["6", "0"], "output": "60"}]}),
        ("def f(x):\n    return x > 1, None",
         {"tests": {"fn_name": "f", "inputs": ["Infinity"], "outputs": ["[true, null]"]}}),
        ("class Solution:\n    def cast(self, x): return x",
         {"tests": [{**FUNCTIONAL, "fn_name": "cast", "input": "[1]", "output": "[1]"}]}),
        ("print(input())",
         {"tests": [{"testtype": "stdin", "input": "6", "output": "6"}], "metadata": '{"func_name": null}'}),
        ("print(input())", {"tests": [{"type": "stdin_stdout", "input": "6", "output": "6"}], "fn_name": "add"}),
        ("print(input())", {"tests": {"inputs": ["6"], "outputs": ["6"], "fn_name": None}}),
        ("print(input())", {"tests": {"input": "6", "output": "6"}}),
        ("print(input())", {"tests": {"input": ["6\n", "5\n"], "output": ["6\n", "5\n"]}}),
        ("print(input())", {"tests": [{"testtype": "STDIN", "input": "6", "output": "6"}]}),
    ],
)  # fmt: skip
def test_a_right_solution_passes_in_each_form(code: str, row: Any) -> None:
    assert run(code, row) == {"score": 1.0, "passed": 1.0}
    assert run("def add(*_, **__): return 7\nf = cast = add\nprint(7)", row)["score"] == 0.0


def test_the_share_of_calls_that_pass_is_the_score() -> None:
    other = {**FUNCTIONAL, "input": "[5]", "output": "6"}
    result = run(METHOD, {"tests": [{**FUNCTIONAL, **LINES}, other], "fn_name": "add"})
    assert result == {"score": 0.5, "passed": 0.5, "failed": "AssertionError: 5 is wrong"}


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([{**FUNCTIONAL, **LINES}], "test 1: it calls a function, and nothing names it: give 'fn_name'"),
        ([{**FUNCTIONAL, "fn_name": "f", "input": "1 2", "output": "3"}],
         "test 1: 'input' .* has '1 2', which is no JSON"),
        ([{**FUNCTIONAL, "fn_name": "f", "input": "1", "output": "True"}],
         "'output' .* has 'True'.* the testtype 'stdin'"),
        ([{"fn_name": "f", "input": 1, "output": 1}], "'input' is a int: expected the arguments of 'f' as a list"),
        ([{"testtype": "interactive", **LINES}], "'testtype' is 'interactive': expected one of functional"),
        ([{**FUNCTIONAL, "fn_name": "f", **LINES}, {"testtype": "stdin", **LINES}], "tests of one kind"),
        ([LINES, {"input": "1"}], "test 2 is no object with 'input' and 'output'"),
        ([LINES, "assert f(1) == 2"], "test 2 is no object"),
        ({"inputs": ["1"], "output": ["1"]}, "it has the entries 'inputs', 'output': expected 'inputs' and 'outputs'"),
        ({"inputs": ["1"], "outputs": []}, "it has 1 input and 0 outputs"),
        ('[{"input": "1", "output": ', "test 1 is neither JSON nor Python"),
        ("eJxLTEoGAAJNASc=", "test 1 is neither JSON nor Python"),
        ("eJxLTEoGAAJNASc", "nothing in it can fail.*check_code"),
        ("42", "nothing in it can fail"),
        ({"inputs": "11\n", "outputs": "12\n"}, "'inputs' is no list with an entry for each test: '11"),
        (['{"input": "1", "output": "1"}'], "nothing in it can fail"),
        ({"fn_name": "f", "inputs": [[object()]], "outputs": [1]}, "a object is no plain data"),
    ],
)  # fmt: skip
def test_tests_that_cannot_be_read_are_refused_and_never_score(tests: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"the column 'tests' has no tests that can be read: .*{why}"):
        run("def f(x): return x", {"tests": tests})


def test_the_run_ends_with_the_row_the_column_and_the_remedy() -> None:
    rows = [{"tests": ["assert f(1) == 1"]}, {"tests": [{**FUNCTIONAL, **LINES}]}]
    reward = check_code(time_limit_s=60.0, sandbox="none")
    settings = RewardConfig(time_limit_s=100)
    with (
        pytest.raises(RewardError, match=r"(?s)item 1, .*the column 'tests' has .*test 1: .*give 'fn_name'"),
        Grader(settings, reward=reward, in_script=True) as grader,
    ):
        grader.grade(["def f(x): return x"] * 2, rows)
