"""Sampling parameters know when they filter."""

from __future__ import annotations

from podium.rollout.sampling import SamplingParams


def test_filtering_is_known_from_the_parameters() -> None:
    assert not SamplingParams(max_new_tokens=1).filtered
    assert SamplingParams(max_new_tokens=1, top_k=3).filtered
    assert SamplingParams(max_new_tokens=1, top_p=0.9).filtered
    assert not SamplingParams(max_new_tokens=1, top_p=0.9, temperature=0).filtered
