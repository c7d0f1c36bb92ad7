"""No test compares how long something took with a number (rule 16 of the house style: no clock decides).

A test that does fails on a busy machine, and says nothing about the code. An order of events takes its place: "before
the other call ended", "without a second request". What takes how long is measured in bench/. That something took *at
least* so long may be asserted, since no machine is too fast for that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULE = "compares a duration with a bound from above; let an order of events decide (style, rule 16)"
CLOCKS = {
    f"{clock}{unit}"
    for clock in ("monotonic", "perf_counter", "process_time", "thread_time", "time")
    for unit in ("", "_ns")
}
SPENT = {"ru_utime", "ru_stime"}  # of resource.getrusage
NAMED = re.compile(r"(^|_)(elapsed|took|lasted)(_|$)")
HINT = re.compile(r"monotonic|perf_counter|process_time|thread_time|\btime(_ns)?\(|ru_[us]time|elapsed|took|lasted")
SAME_UNIT = {"min", "max", "sum", "abs", "round", "float", "int", "sorted", "median", "mean"}


class Durations(ast.NodeVisitor):
    """Finds the lines of a module where a duration is compared with a bound from above.

    A reading is a call of a clock. A duration is a difference whose left side is a reading, a sum or product with such
    a difference, what a function of the module returns that returns one, or whatever is named as one. Names are those
    of the whole module, whichever function binds them.
    """

    def __init__(self, module: ast.Module) -> None:
        self.lines: set[int] = set()
        self.readings: set[str] = set()
        self.durations: set[str] = set()
        self.lower: set[ast.AST] = set()  # comparisons that are asserted
        for _ in range(3):  # a name may be bound by a name that is bound further down
            for node in ast.walk(module):
                self._bind(node)
        self.visit(module)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
            self._assign(node.target, node.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and node.args
        ):
            self._assign(node.func.value, node.args[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
            if any(map(self.is_duration, returned)):
                self.durations.add(node.name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, part_value in zip(target.elts, value.elts, strict=False):
                self._assign(part, part_value)
            return
        values = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        name = _name(target)
        if name and any(map(self.is_reading, values)):
            self.readings.add(name)
        if name and any(map(self.is_duration, values)):
            self.durations.add(name)

    def is_reading(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return _name(node.func) in CLOCKS and not node.args and not isinstance(node.func, ast.Subscript)
        return _name(node) in self.readings | SPENT

    def is_duration(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Sub) and self._holds_reading(node.left):
                return True
            return self.is_duration(node.left) or self.is_duration(node.right)
        if isinstance(node, ast.Call):
            inner = node.args if _name(node.func) in SAME_UNIT else []
            return _name(node.func) in self.durations or any(map(self.is_duration, inner))
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self.is_duration(node.elt)
        name = _name(node)
        return name in self.durations or (bool(NAMED.search(name)) and not isinstance(node, ast.Constant))

    def _holds_reading(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return self._holds_reading(node.left)
        return self.is_reading(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        parts = [node.test]
        while parts:
            part = parts.pop()
            self.lower.add(part)
            parts += part.values if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.And) else []
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            above = self._is_bound(left, right, operator, (ast.Lt, ast.LtE))
            above |= self._is_bound(right, left, operator, (ast.Gt, ast.GtE))
            below = self._is_bound(left, right, operator, (ast.Gt, ast.GtE))
            below |= self._is_bound(right, left, operator, (ast.Lt, ast.LtE))
            if above or (below and node not in self.lower):
                self.lines.add(node.lineno)
        self.generic_visit(node)

    def _is_bound(self, duration: ast.expr, bound: ast.expr, operator: ast.cmpop, operators: tuple[type, ...]) -> bool:
        return isinstance(operator, operators) and self.is_duration(duration) and not self.is_duration(bound)


def _name(node: ast.AST) -> str:
    """Return the last name of an expression, without its subscripts."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return _name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def find_bounds(text: str) -> list[int]:
    """Return the lines of a module that compare a duration with a bound from above."""
    return [] if HINT.search(text) is None else sorted(Durations(ast.parse(text)).lines)


def list_bounds(*folders: Path) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for line in find_bounds(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(ROOT)}:{line} {RULE}"


def test_no_test_compares_a_duration_with_a_bound_from_above() -> None:
    plugins = [*ROOT.glob("plugins/*/tests"), ROOT / "plugins" / "podium-testing" / "src"]
    assert "\n".join(list_bounds(ROOT / "tests", *plugins)) == ""


@pytest.mark.parametrize(
    "code",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 20",
        "began = monotonic()\nassert 20 > monotonic() - began, 'it took long'",
        "began, cpu = time.monotonic(), time.process_time()\nassert time.process_time() - cpu <= LIMIT_S",
        "began_ns = time.monotonic_ns()\nassert 0 < (time.monotonic_ns() - began_ns) / 1e9 < 2 * LIMIT_S",
        "began = perf_counter()\nspent = perf_counter() - began\nassert ok and min(spent, 7) < 0.3",
        "began = perf_counter()\nif perf_counter() - began > 20:\n    pytest.fail('late')",
        "began = process_time()\nassert (process_time() - began > 0.1) == computing",
        "lost[4] = time.monotonic()\nassert time.monotonic() - lost[4] < 30",
        "began.append(time.time())\nassert time.time() - began[0] < 30",
        "def work_s():\n    began = time.time()\n    return time.time() - began\nassert work_s() / 2 < 30",
        "took_s = json.loads(printed)\nassert took_s < 30",
        "before = getrusage(0)\nassert getrusage(0).ru_utime - before.ru_utime < 0.1",
        "while time.monotonic() - (began := time.monotonic()) < 5:\n    work()",
    ],
)
def test_a_bound_on_a_duration_is_seen(code: str) -> None:
    assert find_bounds(code)


@pytest.mark.parametrize(
    "code",
    [
        "began = time.monotonic()\nassert time.monotonic() - began >= 0.5",
        "until = time.monotonic() + 60\nwhile not ended() and time.monotonic() < until:\n    work()",
        "before = time.monotonic_ns()\nemit()\nassert before <= event.emitted_ns <= time.monotonic_ns()",
        "assert len(rows) < 3 and row['loss'] < 0.1",
        "assert call.result(timeout_s=60) < 4",
    ],
)
def test_an_order_of_events_and_a_bound_from_below_are_no_bounds_from_above(code: str) -> None:
    assert find_bounds(code) == []


def test_no_server_of_a_test_keeps_it_waiting_for_half_a_second() -> None:
    """``serve_forever`` looks every half second by default whether it is to end, and each test waits for that."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in (ROOT / "tests", ROOT / "plugins")
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\w\.serve_forever\b(?!, (args|kwargs)=)(?!\()", line)
    ]
    assert found == [], "give it an interval: Thread(target=server.serve_forever, args=(0.01,))"
