"""What PPOTrainer computes itself."""

from __future__ import annotations

import pytest

from podium.algorithms import AlgorithmConfig
from podium.errors import PodiumError
from podium.telemetry import metrics
from podium.trainer import GRPOConfig
from podium.trainer.ppo import join_updates
from podium.trainer.step_watch import StepWatch


def test_updates_are_averaged_and_the_largest_ratio_kept() -> None:
    joined = join_updates(
        [{metrics.LOSS: 1.0, metrics.RATIO_MAX: 3.0}, {metrics.LOSS: 2.0, metrics.RATIO_MAX: 2.0}, {"v": 1}]
    )
    assert joined == {metrics.LOSS: 1.5, metrics.RATIO_MAX: 3.0, "v": 1.0}


def test_a_limit_of_the_mismatch_below_what_is_noted_ends_the_run() -> None:
    config = GRPOConfig(algorithm=AlgorithmConfig(max_mismatch=0.01))
    watch = StepWatch(config)
    watch.check_mismatch({metrics.MISMATCH_MEAN: 0.005}, 2)
    with pytest.raises(PodiumError, match=r"step 3: .* differ by 0\.02 nats .*max_mismatch = 0\.01"):
        watch.check_mismatch({metrics.MISMATCH_MEAN: 0.02}, 3)
