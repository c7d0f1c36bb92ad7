"""Verifiable rewards: functions from a completion and its example to a score, run where they can be killed."""

from podium.rewards.config import Grade, RewardConfig
from podium.rewards.grader import Grader
from podium.rewards.resolve import NAMED_REWARDS, RewardFn, resolve_reward

__all__ = ["NAMED_REWARDS", "Grade", "Grader", "RewardConfig", "RewardFn", "resolve_reward"]
