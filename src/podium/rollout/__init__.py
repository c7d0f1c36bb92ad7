"""From prompts to completions: data and chat formatting, sampling, and the engines that generate."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.rollout.engines import Engine, EngineConfig, make_engine
    from podium.rollout.sampling import Completion, KeptSet, SamplingParams
    from podium.rollout.tasks import (
        DataConfig,
        EncodedPrompts,
        Example,
        PromptStream,
        encode_pairs,
        encode_prompts,
        load_examples,
    )

__all__ = [
    "Completion",
    "DataConfig",
    "EncodedPrompts",
    "Engine",
    "EngineConfig",
    "Example",
    "KeptSet",
    "PromptStream",
    "SamplingParams",
    "encode_pairs",
    "encode_prompts",
    "load_examples",
    "make_engine",
]

_HOMES = {
    "podium.rollout.engines": ("Engine", "EngineConfig", "make_engine"),
    "podium.rollout.sampling": ("Completion", "KeptSet", "SamplingParams"),
    "podium.rollout.tasks": (
        *("DataConfig", "EncodedPrompts", "Example", "PromptStream"),
        *("encode_pairs", "encode_prompts", "load_examples"),
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: data can be loaded without torch, engines without data."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'podium.rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
