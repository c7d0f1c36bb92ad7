"""Environments of other projects. Each test needs its project, and says so where it is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.environments.resolve import resolve_environment
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.training import MODEL, metrics_rows, tiny
from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of


@pytest.mark.parametrize("opponent", ["self", "random"])
def test_a_game_of_textarena_is_played(opponent: str, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    tokenizer_of(FAMILIES[0]).save_pretrained(tmp_path / "tokenizer")
    shape = {**MODEL["config"], "max_position_embeddings": 4096}
    config = tiny(
        GRPOConfig,
        tmp_path,
        model={"config": shape, "tokenizer": str(tmp_path / "tokenizer")},
        data={"train": ""},
        environment={"name": "textarena", "options": {"env": "TicTacToe-v0", "opponent": opponent}},
        run={"steps": 1},
        sampling={"max_new_tokens": 8},
        eval={"items": 2},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert row[metrics.SESSIONS_FAILED] == 0
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert -1 <= row[metrics.REWARD_MEAN] <= 1
    assert "reward_parts/invalid" in row


def test_a_game_that_textarena_does_not_have_is_refused() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=r"environment.options.env = 'TikTakToe-v0'"):
        resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TikTakToe-v0"}))


def test_a_project_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    try:
        import textarena  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install textarena"):
            resolve_environment(EnvironmentConfig(name="textarena", options={"env": "TicTacToe-v0"}))
    else:
        pytest.skip("textarena is installed")
