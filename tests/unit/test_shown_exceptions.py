"""Exceptions of any class are shown by :mod:`podium.exceptions` alone: their own text may raise, or end the process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROAD = {"Exception", "BaseException", "SystemExit", "BaseExceptionGroup", "ExceptionGroup"}
FORMATS = {"format_exc", "format_exception", "format_exception_only", "print_exc", "print_exception"}
FORMATS |= {"TracebackException"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# The module itself, and a program that an interpreter without Podium runs.
SHOWS_THEM = ("podium/exceptions.py", "podium_verifiers/child.py", "podium_rewards/sandbox_program.py")


def names_in(node: ast.AST | None) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} if node is not None else {"Exception"}


def shown_in(handler: ast.AST, name: str | None) -> Iterator[int]:
    """The lines in which a handler shows the exception ``name`` by its own text."""
    for node in ast.walk(handler):
        match node:
            case ast.FormattedValue(value=ast.Name(id=shown)) if shown == name:
                yield node.lineno
            case ast.Call(func=ast.Name(id="str" | "repr" | "print"), args=[ast.Name(id=shown), *_]) if shown == name:
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function)) if function in FORMATS:
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=function), args=arguments, keywords=keywords) if function in LEVELS:
                shown = [argument.id for argument in arguments if isinstance(argument, ast.Name)]
                if name in shown or any(keyword.arg == "exc_info" for keyword in keywords) or function == "exception":
                    yield node.lineno


def find_shown(text: str) -> list[int]:
    """The lines of a module that show an exception of any class by its own text."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or names_in(node.type) & BROAD):
            lines.update(shown_in(node, node.name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                if names_in(argument.annotation) & BROAD if argument.annotation else False:
                    lines.update(shown_in(node, argument.arg))
    return sorted(lines)


@pytest.mark.parametrize(
    "text",
    [
        "try: f()\nexcept Exception as error: g(f'{error}')",
        "try: f()\nexcept (ValueError, BaseException) as error: g(str(error))",
        "try: f()\nexcept BaseException as error:\n    g(traceback.format_exc())",
        "try: f()\nexcept Exception as error: log.warning('%s', error)",
        "try: f()\nexcept Exception as error: log.error('failed', exc_info=error)",
        "def show(error: BaseException) -> str: return f'{type(error).__name__}: {error!r}'",
        "def show(error: Exception | None) -> str: return repr(error)",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str) -> None:
    assert find_shown(text)


def test_exceptions_of_any_class_are_shown_by_one_module() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    assert len(sources) > 200
    shown = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources
        if not str(path).endswith(SHOWS_THEM)
        for line in find_shown(path.read_text())
    }
    assert not shown
