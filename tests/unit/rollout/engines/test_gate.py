"""New weights while completions are drawn: never half of them, and each token says which it came from."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import Engine, EngineConfig, make_engine
from podium.rollout.engines.gate import WeightGate
from podium.rollout.sampling import SamplingParams
from podium_native.decoder import Decoder

from .conftest import MakeModel, compute_trained_logprobs

SAMPLING = {"plain": {}, "top-k": {"top_k": 7, "temperature": 0.7}}


class Swapping:
    """Writes ``weights`` from a thread of its own, during the forward pass in which it is told to."""

    def __init__(self, engine: Engine, at: dict[int, tuple[int, dict[str, torch.Tensor]]]) -> None:
        self.engine, self.at, self.passes = engine, at, 0
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.passes += 1
        if self.passes not in self.at:
            return
        thread = threading.Thread(target=self.engine.refresh, args=self.at[self.passes])
        thread.start()
        self.threads.append(thread)
        while not self.engine.gate.closed:  # from now on the next pass waits
            pass

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def check(engine: Engine, models: dict[int, Any], prompts: list[list[int]], params: SamplingParams) -> set[int]:
    """Every token has the log-probability that a training forward pass with its version's weights gives it."""
    seen: set[int] = set()
    mixed = 0
    completions = engine.generate(prompts, params, range(len(prompts) * params.n))
    for index, completion in enumerate(completions):
        prompt = prompts[index // params.n]
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        for version, model in models.items():
            own = completion.versions == version
            expected = compute_trained_logprobs(model, prompt, completion, params.temperature)
            assert torch.equal(own, own & ((completion.logprobs - expected).abs() < 1e-5))
        seen |= set(completion.versions.tolist())
        mixed += len(completion.versions.unique()) > 1
    assert bool(mixed) == (engine.__class__.__name__ == "NativeEngine")
    return seen


def hooked(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, hook: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def calling(*args: Any, **kwargs: Any) -> Any:
        hook()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, calling)


@pytest.mark.everyday("17-llama-plain", "17-qwen3-top-k")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("slots", [17, 128])
def test_new_weights_come_in_between_two_tokens(
    make_model: MakeModel,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sampling: str,
    slots: int,
) -> None:
    """With 17 slots completions wait, and prompts are seen ahead of their turn; with 128 all are under way."""
    models = {version: make_model(family, seed=version) for version in (0, 3, 4)}
    config = EngineConfig(name="native", max_sequences=slots, options={"prefill_tokens": 128})
    engine = make_engine(config, copy.deepcopy(models[0]))
    swaps = Swapping(engine, {4: (3, models[3].state_dict()), 12: (4, models[4].state_dict())})
    hooked(monkeypatch, Decoder, "decode", swaps)
    params = SamplingParams(max_new_tokens=24, n=3, stop_token_ids=(1, 2, 3), **SAMPLING[sampling])
    assert check(engine, models, prompts, params) == {0, 3, 4}
    swaps.join()
    assert engine.version == 4


def test_transformers_takes_new_weights_between_two_batches(
    make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {version: make_model("qwen3", seed=version) for version in (0, 3)}
    own = copy.deepcopy(models[0])
    engine = make_engine(EngineConfig(name="transformers", max_sequences=10), own)
    swaps = Swapping(engine, {4: (3, models[3].state_dict())})
    hooked(monkeypatch, own, "forward", swaps)
    params = SamplingParams(max_new_tokens=12, n=2)
    assert check(engine, models, prompts, params) == {0, 3}
    swaps.join()


def test_what_came_in_part_is_drawn_from_no_more(make_model: MakeModel, prompts: list[list[int]]) -> None:
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(EngineConfig(), copy.deepcopy(model))
    params = SamplingParams(max_new_tokens=4)
    before = engine.generate(prompts, params, range(10))

    def broken(version: int) -> None:
        with engine.gate.changing(version):
            name, value = next(iter(other.named_parameters()))
            engine.load(name, 0, value)
            raise OSError("the line broke")

    with pytest.raises(OSError, match="the line broke"):
        broken(6)
    with pytest.raises(GenerationError, match=r"version 6 arrived only in part \(the line broke\); sync again"):
        engine.generate(prompts, params, range(10))
    assert engine.version == 0
    engine.refresh(6, model.state_dict())
    again = engine.generate(prompts, params, range(10))
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in before]
    with pytest.raises(ConfigError, match="missing"):
        engine.refresh(7, {})
    assert engine.version == 6  # nothing was touched
    engine.generate(prompts, params, range(10))


def test_the_gate_waits_for_passes_and_keeps_the_next_ones_out() -> None:
    gate, order = WeightGate(), []
    gate.__enter__()
    closing = threading.Thread(target=lambda: (gate.close(), order.append("closed")))
    closing.start()
    while not gate.closed:
        pass

    def draw() -> None:
        with gate:
            order.append(f"pass of {gate.version}")

    drawing = threading.Thread(target=draw)
    drawing.start()
    order.append("pass ends")
    gate.__exit__(None, None, None)
    closing.join()
    assert order == ["pass ends", "closed"]
    gate.open(9)
    drawing.join()
    assert order[-1] == "pass of 9"
    assert gate.changes == 1
