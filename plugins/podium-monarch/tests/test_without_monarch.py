"""What can be known of the backend ``monarch`` without Monarch."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import podium
from podium.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_it_imports_only_what_the_docs_call_stable() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    stable = page[page.index("### What stays as it is") : page.index("Everything else may change")]
    for path in (ROOT / "plugins" / "podium-monarch" / "src").rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("podium."):
                assert f"`{statement.module}`" in stable, statement.module
                is_listed = statement.module not in ("podium.runtime.backend", "podium.errors")
                assert not is_listed or [name.name for name in statement.names if f"`{name.name}`" not in stable] == []


@pytest.mark.skipif(
    importlib.util.find_spec("podium_monarch") is None or importlib.util.find_spec("monarch") is not None,
    reason="torchmonarch is installed, or podium-monarch is not",
)
def test_monarch_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"torchmonarch is not installed: pip install 'torchmonarch<0\.8,>=0\.7'"):
        podium.connect("monarch")
