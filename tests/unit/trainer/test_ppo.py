"""What PPOTrainer computes itself."""

from __future__ import annotations

from podium.telemetry import metrics
from podium.trainer.ppo import join_updates


def test_updates_are_averaged_and_the_largest_ratio_kept() -> None:
    joined = join_updates(
        [{metrics.LOSS: 1.0, metrics.RATIO_MAX: 3.0}, {metrics.LOSS: 2.0, metrics.RATIO_MAX: 2.0}, {"v": 1}]
    )
    assert joined == {metrics.LOSS: 1.5, metrics.RATIO_MAX: 3.0, "v": 1.0}
