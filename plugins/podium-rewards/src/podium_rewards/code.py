"""The reward ``code``: :func:`~podium_rewards.check_code` without options. It needs a sandbox."""

from podium_rewards.unit_tests import CodeReward

__all__ = ["code"]

code = CodeReward()
