"""docs/algorithms.md and the worked examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import podium.algorithms
from podium.algorithms import ESTIMATORS, AlgorithmConfig

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
MODULES = [module.name for module in pkgutil.walk_packages(podium.algorithms.__path__, "podium.algorithms.")]


def test_the_estimator_of_the_document_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block is saved under the name the text gives it, the second goes on from it and ends in its output."""
    estimator, trial = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "best_of_group.py").write_text(estimator)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(estimator + trial, "docs/algorithms.md", "exec"), names)
    printed = trial.rstrip().rsplit("\n# ", 1)[1]
    assert capsys.readouterr().out.strip() == printed


def test_the_document_knows_every_setting_and_estimator() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in ESTIMATORS if f"| `{name}` |" not in text] == []
    explained_elsewhere = {"advantage", "gamma", "lam", "epochs", "minibatches"}
    assert [name for name in vars(AlgorithmConfig()) if name not in text and name not in explained_elsewhere] == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), raise_on_error=False).failed == 0


def test_public_names() -> None:
    assert len(set(podium.algorithms.__all__)) == len(podium.algorithms.__all__)
    assert all(hasattr(podium.algorithms, name) for name in podium.algorithms.__all__)
