"""Records and configuration refuse what they cannot mean."""

from __future__ import annotations

from typing import Any

import pytest

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "sampling.max_new_tokens is 0; expected at least 1"),
        ({"temperature": -0.1}, "sampling.temperature is -0.1"),
        ({"temperature": float("nan")}, "sampling.temperature is nan"),
        ({"temperature": float("inf")}, "sampling.temperature is inf"),
        ({"top_p": 0.0}, "sampling.top_p is 0.0; expected above 0 and at most 1"),
        ({"top_p": 1.1}, "sampling.top_p is 1.1"),
        ({"top_k": -1}, "sampling.top_k is -1"),
        ({"n": 0}, "sampling.n is 0"),
    ],
)
def test_sampling_names_the_wrong_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**{"max_new_tokens": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "nativ"}, "engine.name is 'nativ'; expected one of auto, native, transformers"),
        ({"slots": 0}, "engine.slots is 0"),
        ({"prefill_tokens": 0}, "engine.prefill_tokens is 0"),
        ({"cache_gib": 0.0}, "engine.cache_gib is 0.0"),
        ({"dtype": "fp8"}, "engine.dtype is 'fp8'; expected null or one of float32"),
    ],
)
def test_engine_names_the_wrong_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_filtering_is_known_from_the_parameters() -> None:
    assert not SamplingParams(max_new_tokens=1).filtered
    assert SamplingParams(max_new_tokens=1, top_k=3).filtered
    assert SamplingParams(max_new_tokens=1, top_p=0.9).filtered
    assert not SamplingParams(max_new_tokens=1, top_p=0.9, temperature=0).filtered
