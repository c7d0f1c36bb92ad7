"""The reward ``code``: :func:`~podium.rewards.check_code` without options. It needs a sandbox."""

from podium.rewards.unit_tests import CodeReward

__all__ = ["code"]

code = CodeReward()
