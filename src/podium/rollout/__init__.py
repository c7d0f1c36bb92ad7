"""From prompts to completions: data and chat formatting, sampling, and the engines that generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.rollout.engines import Engine as Engine, EngineConfig as EngineConfig, make_engine as make_engine
    from podium.rollout.sampling import Completion as Completion, KeptSet as KeptSet, SamplingParams as SamplingParams
    from podium.rollout.tasks import (
        DataConfig as DataConfig,
        EncodedPrompts as EncodedPrompts,
        Example as Example,
        PromptStream as PromptStream,
        encode_pairs as encode_pairs,
        encode_prompts as encode_prompts,
        load_examples as load_examples,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
