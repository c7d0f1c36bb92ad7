"""A resume without what the script gave the run is refused, not silently another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.given import check_given, names_of_given
from podium.workers import Policy
from tests.integration.training import metrics_rows, tiny


def longer(completion: str, row: Mapping[str, Any]) -> float:
    return float(len(completion))


class Mine(Policy):
    pass


def test_names_are_those_of_functions_classes_and_bound_classes(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path)
    here = f"{__name__}."
    assert names_of_given(None, "exact", None) == {}
    assert names_of_given(longer, "exact", {"policy": Mine}) == {
        "policy": f"{here}Mine",
        "reward": f"{here}longer",
        "reward.name": "exact",
    }
    assert names_of_given(None, "exact", {"policy": Mine.bind(model=config.model)}) == {"policy": f"{here}Mine"}


def test_what_is_missing_is_named_unless_something_else_was_said() -> None:
    had = {"policy": "m.Mine", "reward": "m.longer", "reward.name": "exact"}
    check_given({}, {}, "exact")
    check_given(had, {**had, "reward": "m.another"}, "exact")
    check_given(had, {"policy": "m.Mine"}, "my_rewards.py:longer")
    with pytest.raises(ConfigError, match=r"its own policy \(m\.Mine\), reward \(m\.longer\) from Python"):
        check_given(had, {}, "exact")
    with pytest.raises(ConfigError, match=r"its own reward \(m\.longer\).*or name a reward with reward\.name"):
        check_given(had, {"policy": "m.Other"}, "exact")


def test_a_run_with_a_function_is_not_resumed_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    PPOTrainer(config, cluster="inline", reward=longer, show=False).fit()
    run = tmp_path / "runs" / "run"
    assert main(["train", "grpo", "--resume", str(run), "--run.steps", "2", "--backend", "inline"]) == 2
    assert f"this run was given its own reward ({__name__}.longer) from Python" in capsys.readouterr().err
    again = tiny(GRPOConfig, tmp_path, run={"steps": 2, "resume": str(run)}, eval={"items": 0})
    PPOTrainer(again, cluster="inline", reward=longer, show=False).fit()
    assert [row["step"] for row in metrics_rows(run)] == [1, 2]
