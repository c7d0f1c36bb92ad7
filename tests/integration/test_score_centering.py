"""Score centering in runs: what the engine records reaches the loss, and is refused where nothing is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.telemetry import metrics
from podium.trainer import GRPOConfig
from tests.integration.training import metrics_rows, tiny, train


def settings_of(folder: Path, head: int = 4, **sections: Any) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {"eval": {"items": 0}, "algorithm": {"options": {"score_centering": head}}}
    return tiny(GRPOConfig, folder, **{**values, **sections})


def test_a_run_centers_by_what_its_engine_recorded(tmp_path: Path) -> None:
    """Generator and trainer agree, so that nothing is added beyond rounding."""
    centered, plain = (
        metrics_rows(train(settings_of(tmp_path / str(head), head, run={"steps": 2}))) for head in (4, 0)
    )
    for row, before in zip(centered, plain, strict=True):
        assert 0 < row["mismatch/drift_rest"] < 1 and row["mismatch/drift"] < 1e-3
        assert row[metrics.GRAD_NORM] == pytest.approx(before[metrics.GRAD_NORM], rel=1e-2)
        assert "mismatch/drift" not in before


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"sampling": {"top_k": 3}}, r"sampling\.top_k or top_p"),
        ({"environment": {"name": "tests.integration.worlds:add_up"}, "reward": {}}, r"environment\.name"),
    ],
)
def test_runs_that_record_no_probable_tokens_are_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"score_centering = 4 with {why}"):
        settings_of(tmp_path, **sections)
