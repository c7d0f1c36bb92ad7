"""A run whose agents ask what else is probable (``top_logprobs``): what is trained is what is trained without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium import Cluster
from podium.telemetry import metrics
from tests.integration.test_environments import config_of
from tests.integration.training import losses, metrics_rows, train


@pytest.mark.parametrize("layout", ["colocated", pytest.param("split", marks=pytest.mark.exhaustive)])
def test_agents_that_ask_for_probable_tokens_train_the_same(layout: str, tmp_path: Path, preloaded: Cluster) -> None:
    figures: list[Any] = []
    for count in (0, 3):
        sections = {"run": {"steps": 2}, "eval": {"items": 0}, "placement": {"layout": layout}}
        run = train(config_of("alternatives", tmp_path / str(count), options={"count": count}, **sections), preloaded)
        assert [row[metrics.SESSIONS_FAILED] for row in metrics_rows(run)] == [0, 0]
        figures.append((losses(run), [row[metrics.REWARD_MEAN] for row in metrics_rows(run)]))
    assert figures[0] == figures[1]
