"""Suites of packages: how they are found, refused and kept."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium_inference import suites
from podium_inference.suites import find_suite, keep_results


def prepare(task: str, program: str | None, arguments: Any) -> Any:
    if task == "unknown":
        raise ConfigError("no such task")
    return task, program, arguments


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "suites_of_test", sys.modules[__name__])  # an entry point has a name of Python's
    entries = [EntryPoint("helm", "suites_of_test:prepare", "podium.suites")]

    def list_entries(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry for entry in entries if group == entry.group and name in (None, entry.name)]

    monkeypatch.setattr("podium.functions.list_entry_points", list_entries)
    monkeypatch.setattr(suites, "list_entry_points", list_entries)


@pytest.mark.usefixtures("installed")
def test_a_suite_of_a_package_takes_the_task_and_the_arguments() -> None:
    assert find_suite("helm:a:b", "/bin/helm", ["--limit"]) == ("a:b", "/bin/helm", ["--limit"])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("helm", "expected NAME:TASK"),
        ("helm:", "expected NAME:TASK"),
        (":x", "expected NAME:TASK"),
        ("held:x", "did you mean helm.*installed are helm; .*group podium.suites.*pip install ./plugins/podium-NAME"),
        ("helm:unknown", "no such task"),
    ],
)
def test_a_suite_that_is_absent_is_refused_with_the_remedy(spec: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_suite(spec, None, ())


def test_it_is_refused_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path), "--suite", "helm:x"]) == 2
    assert "there is no suite 'helm'" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--", "--limit", "3"]) == 2
    assert "belong to --suite" in capsys.readouterr().err


def test_results_of_a_model_without_a_run_are_written_where_its_user_says(tmp_path: Path) -> None:
    record = {"suite": "helm", "task": "copy", "results": {}}
    assert keep_results(str(tmp_path), record, None) is None
    assert keep_results(str(tmp_path), record, str(tmp_path / "x.json")) == str(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["suite"] == "helm"
