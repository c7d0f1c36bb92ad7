"""Losses, advantage estimators and corrections that single papers propose."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_algorithms.turns import Turns as Turns, find_turns as find_turns
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
