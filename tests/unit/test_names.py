"""The lint step on names finds what it counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "names.py"


@pytest.fixture
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names_lint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["src", "plugins/podium-words/src/podium_words"])
def test_vague_names_and_participles_are_found(
    names: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "module.py").write_text("def _told(rows):\n    for one in rows:\n        found = one\n")
    assert names.main(tmp_path, lists=False) == 1
    output = capsys.readouterr().out
    assert "1000.0 of 1,000 assignments" in output
    assert "100.0 % of the functions" in output
    assert [line.split()[-1] for line in output.splitlines()[2:]] == ["one", "found", "_told"]


def test_nouns_verbs_and_properties_pass(names: ModuleType, tmp_path: Path) -> None:
    source = "class Run:\n    @property\n    def finished(self):\n        row = seed_all()\n        return row\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text(source + "\ndef seed_all():\n    settings = {}\n    return settings\n")
    assert names.main(tmp_path, lists=False) == 0
