"""Training on preferences between answers: the recipes ``dpo`` and ``rm`` of ``podium train``. See ``config.py``."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium_preferences.config import (
        DPOConfig as DPOConfig,
        PreferenceConfig as PreferenceConfig,
        PreferenceRun as PreferenceRun,
        RMConfig as RMConfig,
        ScorerConfig as ScorerConfig,
    )
    from podium_preferences.rows import (
        EncodedPreference as EncodedPreference,
        EncodedPreferences as EncodedPreferences,
        encode_preferences as encode_preferences,
        read_labeled as read_labeled,
        read_pair as read_pair,
    )
    from podium_preferences.scorer import Scorer as Scorer
    from podium_preferences.trainer import PreferenceTrainer as PreferenceTrainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
