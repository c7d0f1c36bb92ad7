"""Verifiable rewards: functions from a completion and its example to a score, run where they can be killed."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.rewards.columns import reads as reads
    from podium.rewards.config import Grade as Grade, RewardConfig as RewardConfig
    from podium.rewards.grader import Grader as Grader
    from podium.rewards.resolve import (
        NAMED_REWARDS as NAMED_REWARDS,
        RewardFn as RewardFn,
        Rewards as Rewards,
        resolve_reward as resolve_reward,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
