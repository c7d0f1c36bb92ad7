"""The vLLM engine, where vLLM is installed; elsewhere, what it says."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.vllm import VllmEngine
from podium.rollout.sampling import SamplingParams

from .conftest import MakeModel, trained_logprobs

INSTALLED = importlib.util.find_spec("vllm") is not None


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_where_it_is_missing_the_error_says_how_to_get_it(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"engine.name is 'vllm'.*pip install 'podium\[vllm\]'"):
        make_engine(EngineConfig(name="vllm"), make_model("qwen3"))


def test_tensors_that_come_in_parts_are_handed_over_whole() -> None:
    engine: Any = object.__new__(VllmEngine)  # without vLLM: only what it does with what it is sent
    handed: dict[str, torch.Tensor] = {}
    engine._shapes, engine._large, engine._changed = {"small": (2,), "tall": (5, 3)}, {}, set()
    engine._hand_over = handed.update
    engine._llm = SimpleNamespace(reset_prefix_cache=lambda: None)
    small, tall = torch.randn(2), torch.randn(5, 3)
    for name, start, values in (("tall", 3, tall[3:]), ("small", 0, small), ("tall", 0, tall[:3])):
        engine.load(name, start, values)
    engine.loaded()
    assert torch.equal(handed["small"], small)
    assert torch.equal(handed["tall"], tall)
    engine.load("tall", 0, torch.zeros(3, 3))  # the rest has not changed
    engine.loaded()
    assert torch.equal(handed["tall"], torch.cat([torch.zeros(3, 3), tall[3:]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not INSTALLED, reason="vllm is not installed: pip install 'podium[vllm]'")
def test_logprobs_agree_before_and_after_new_weights(
    make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "1")
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(EngineConfig(name="vllm", cache_gib=0.5, slots=16), model)
    params = SamplingParams(max_new_tokens=20, n=2, temperature=0.7, stop_token_ids=tuple(range(10)))

    def check(expected: object, version: int) -> None:
        completions = engine.generate(prompts, params, range(20))
        for index, completion in enumerate(completions):
            trained = trained_logprobs(expected, prompts[index // 2], completion, 0.7)
            assert (completion.logprobs - trained).abs().max() < 1e-4
            assert set(completion.versions.tolist()) == {version}
            assert (completion.finish_reason == "stop") == (int(completion.token_ids[-1]) < 10)
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}

    check(model, 0)
    engine.refresh(1, other.state_dict())
    check(other, 1)
    engine.refresh(2)
    check(model, 2)
    with pytest.raises(ConfigError, match="does not record the kept sets"):
        engine.generate(prompts, SamplingParams(max_new_tokens=4, top_k=3), range(10))
