"""docs/data.md does what it says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, load_examples
from tests.warm_python import run_python

PAGE = (Path(__file__).parents[4] / "docs" / "data.md").read_text()


def test_the_example_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    ((name, code),) = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(code)
    done = run_python(name, cwd=tmp_path)
    first, second = done.stdout.splitlines()
    assert f"```\n{first}\n```" in PAGE
    assert re.fullmatch(r"'\d\d [+-] \d\d = ' '-?\d+' \[\d+(, \d+)*\]", second)


def test_the_error_shown_is_the_error_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('\n{"prompt": "1", "answer": "1"}\n')
    with pytest.raises(DataError) as caught:
        load_examples("train.jsonl", DataConfig(prompt_column="promt"))
    assert f"```\n{caught.value}\n```" in PAGE


def test_every_setting_is_on_the_page() -> None:
    assert all(field.name in PAGE for field in dataclasses.fields(DataConfig) if field.name != "train_split")
