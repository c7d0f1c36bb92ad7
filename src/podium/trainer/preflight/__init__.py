"""Checks before a run starts: what would otherwise fail, or go wrong silently, in the middle of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.trainer.preflight.checks import (
        check_columns as check_columns,
        check_given as check_given,
        check_lengths as check_lengths,
        names_of_given as names_of_given,
        with_stop_tokens as with_stop_tokens,
    )
    from podium.trainer.preflight.plan import describe_plan as describe_plan
    from podium.trainer.preflight.settings import check_placement as check_placement, check_settings as check_settings
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
