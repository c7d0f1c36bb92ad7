"""A text of several parts shows values, and not the names of values: each part with a placeholder is an f-string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\{([a-z_]\w*)[^{}]*\}")
CONVERTED = re.compile(r"\{[a-z_][\w.]*![ras]\}")


def find_placeholders(text: str) -> Iterator[int]:
    """The lines of a module with a text that shows the placeholder of a value."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr) or ast.unparse(node)[2:].startswith("import "):  # a program
            continue
        names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        for part in node.values:
            if isinstance(part, ast.Constant):
                named = {match[1] for match in PLACEHOLDER.finditer(str(part.value))} & names
                if named or CONVERTED.search(str(part.value)):
                    yield part.lineno


@pytest.mark.parametrize(
    "text",
    [
        'f"the text has {sign!r}; take " "it out, or put {sign!r} in quotes"',
        'f"{name} is missing: " "expected {name} beside it"',
        'f"{count:,} rows" " of {self.path!r}"',
        'f"a mapping: {{name!r}}"',
    ],
)
def test_the_check_finds_what_it_looks_for(text: str) -> None:
    assert [*find_placeholders(text)]


def test_no_text_shows_the_placeholder_of_a_value() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    assert len(sources) > 200
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in sources for line in find_placeholders(path.read_text())]
