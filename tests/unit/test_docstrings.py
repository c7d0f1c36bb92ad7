"""The examples in the docstrings of all modules run as they are printed."""

from __future__ import annotations

import doctest
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import podium

ROOT = Path(podium.__file__).parents[2]
SOURCES = (ROOT / "src", *sorted(ROOT.glob("plugins/*/src")))
EXTRAS = {"podium_agents.environments.mcp": "mcp"}
"""Packages that need an extra, and the library by which the extra is known."""


def list_modules_with_examples() -> list[str]:
    files = [(source, file) for source in SOURCES for file in sorted(source.rglob("*.py"))]
    parts = [
        file.relative_to(source).with_suffix("").parts
        for source, file in files
        if ">>>" in file.read_text(encoding="utf-8")
    ]
    return [".".join(names[:-1] if names[-1] == "__init__" else names) for names in parts]


@pytest.mark.parametrize("name", list_modules_with_examples())
def test_the_examples_of_a_module_run(name: str) -> None:
    for package, library in EXTRAS.items():
        if name.startswith(package) and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_an_example_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_example.py").write_text('"""\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert doctest.testmod(importlib.import_module("wrong_example")).failed == 1
