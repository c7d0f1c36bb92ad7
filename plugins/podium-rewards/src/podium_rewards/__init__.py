"""Rewards that ask a model or a service, run code against unit tests, compare formulas, or judge a text's shape."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_rewards.chat_judge import Judge as Judge, judge as judge
    from podium_rewards.format_rewards import (
        check_choice as check_choice,
        check_format as check_format,
        limit_length as limit_length,
        limit_repetition as limit_repetition,
    )
    from podium_rewards.remote import RemoteReward as RemoteReward, ask_service as ask_service
    from podium_rewards.unit_tests import CodeReward as CodeReward, check_code as check_code
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
