"""Every engine of Podium's own keeps the contract; a further one only adds its name. Broken ones do not."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from podium.data.adapters import Adapter
from podium.functions import load_function
from podium.rollout.engines import Engine, EngineConfig, Event, Finished, Request, Tokens, find_engines
from podium.rollout.engines.requests import RequestId
from podium.rollout.sampling import Completion, SamplingParams
from podium_native import NativeEngine
from podium_testing.engines import EngineContract, EngineTarget, tiny_model

WITH_VLLM = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # its build for CPUs warns of what it lacks
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
NATIVE: dict[str, dict[str, Any]] = {  # what other families have that Qwen3 has not
    "mistral": {"sliding_window": 9},
    "qwen3_moe": EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
}
ENGINES = [
    EngineTarget("native"),
    pytest.param(EngineTarget("native", options={"cuda_graphs": True}), id="graphs"),
    *(
        pytest.param(EngineTarget("native", model=partial(tiny_model, model_type=family, **fields)), id=family)
        for family, fields in NATIVE.items()
    ),
    EngineTarget("transformers"),
    pytest.param(EngineTarget("vllm", tolerance=1e-4, cache_gib=0.25), marks=WITH_VLLM),
]


# The page on engines shows this one.
EXAMPLE = cast("type[Engine]", load_function("examples/custom_engine.py:PlainEngine", key="engine.name"))


def test_no_engine_of_podiums_own_is_left_out() -> None:
    own = {
        name
        for name, entry in find_engines().items()
        if entry.module.partition(".")[0] in ("podium", "podium_native", "podium_vllm")
    }
    assert {str(getattr(one, "values", (one,))[0]) for one in ENGINES} == own


@pytest.fixture(scope="module", params=[*ENGINES, EngineTarget(EXAMPLE)], ids=str)
def target(request: pytest.FixtureRequest) -> EngineTarget:
    return request.param


class TestEngines(EngineContract):
    pass


class Broken(NativeEngine):
    """An engine with one mistake: ``spoil`` changes what it reports."""

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        events = super().advance(interrupted)
        finished = [event for event in events if isinstance(event, Finished)]
        others = [event for event in events if not isinstance(event, Finished)]
        completions = self.spoil([event.completion for event in finished])
        return others + [Finished(event.id, one) for event, one in zip(finished, completions, strict=True)]

    def spoil(self, completions: list[Completion]) -> list[Completion]:
        return completions


class WrongLogprobs(Broken):
    """Forgets to renormalize after the temperature."""

    def spoil(self, completions: list[Completion]) -> list[Completion]:
        return [dataclasses.replace(one, logprobs=one.logprobs * 1.001) for one in completions]


class SwappedCompletions(Broken):
    def spoil(self, completions: list[Completion]) -> list[Completion]:
        return completions[::-1]


class WrongVersions(Broken):
    """Names the weights that it was made with."""

    def spoil(self, completions: list[Completion]) -> list[Completion]:
        return [dataclasses.replace(one, versions=torch.zeros_like(one.versions)) for one in completions]


class OldWeights(Broken):
    """Says that it took new weights, and does not."""

    def load(self, name: str, start: int, values: Tensor) -> None:
        pass


class OldKeys(Broken):
    """Goes on with keys and values of other weights."""

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        self._lanes._begin_version = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]


class SameSeed(Broken):
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        waiting = self.waiting.take(len(self.waiting))
        self.waiting.push(dataclasses.replace(request, seed=7) for request in waiting)
        return super().advance(interrupted)


class Deaf(Broken):
    """Takes no request while it draws."""

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        self.at_work = threading.RLock()

    def submit(self, *requests: Request) -> None:
        with self.at_work:
            super().submit(*requests)

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        with self.at_work:
            return super().advance(interrupted)


class AbortsAll(Broken):
    """Loses another request with the one that is aborted."""

    def drop(self, ids: Collection[RequestId]) -> None:
        others = [id for id in self._in_flight if id not in ids]
        super().drop({*ids, *others[:1]})
        self.waiting.drop(others[:1])

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        if not self.waiting and not self._lanes.live:
            raise RuntimeError("nothing is left of what is in flight")  # instead of waiting for ever
        return super().advance(interrupted)


class DropsNothing(Broken):
    """Goes on with a request that was aborted."""

    def drop(self, ids: Collection[RequestId]) -> None:
        pass


class DropsEventsOnly(Broken):
    """Goes on with a request that was aborted, under an id that nobody knows."""

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        self.private: dict[RequestId, RequestId] = {}

    def drop(self, ids: Collection[RequestId]) -> None:
        for id in ids:
            self.private.pop(id, None)

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        waiting = self.waiting.take(len(self.waiting))
        self.private |= {one.id: object() for one in waiting if one.id not in self.private.values()}
        self.waiting.push(dataclasses.replace(one, id=self.private.get(one.id, one.id)) for one in waiting)
        public = {private: id for id, private in self.private.items()}
        events = super().advance(interrupted)
        return [dataclasses.replace(event, id=public[event.id]) for event in events if event.id in public]


class FirstComeFirstServed(Broken):
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        waiting = self.waiting.take(len(self.waiting))
        self.waiting.push(
            dataclasses.replace(request, priority=0) for request in sorted(waiting, key=lambda one: str(one.id))
        )
        return super().advance(interrupted)


class DeafToStops(Broken):
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        waiting = self.waiting.take(len(self.waiting))
        deaf = [dataclasses.replace(one, params=dataclasses.replace(one.params, stop_token_ids=())) for one in waiting]
        self.waiting.push(deaf)
        return super().advance(interrupted)


class Mute(Broken):
    """Streams nothing."""

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        return [event for event in super().advance(interrupted) if not isinstance(event, Tokens)]


class Unchecked(Broken):
    def check(self, subject: str, prompt: Sequence[int], params: SamplingParams) -> None:
        pass


class WithoutAdapters(Broken):
    """Draws from the base."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        """Nothing is taken."""


class AddsTwice(Broken):
    """Adds each adapter as often as it is told of it, which is twice."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        super().load_adapters([adapter for adapter in adapters for _ in range(2)], tensors)


class WithoutScale(Broken):
    """Forgets the factor of the adapters."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        super().load_adapters([adapter._replace(scale=1.0) for adapter in adapters], tensors)


class KeepsAdapters(Broken):
    """Adds new adapters to what it draws from, and not to the base."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        held = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        super().load_adapters(adapters, {**tensors, **{adapter.weight: held[adapter.weight] for adapter in adapters}})


class ForgetsOne(Broken):
    """Loses the last adapter."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        super().load_adapters(adapters[:-1], tensors)


BROKEN: dict[type[Broken], str] = {
    WrongLogprobs: "test_logprobs_are_those_of_training_also_beside_other_sampling",
    SwappedCompletions: "test_a_completion_depends_on_its_prompt_and_its_seed_alone",
    SameSeed: "test_a_completion_depends_on_its_prompt_and_its_seed_alone",
    Deaf: "test_requests_arrive_at_any_time_and_from_any_thread",
    DeafToStops: "test_a_completion_ends_with_its_first_stop_token_or_its_length",
    Mute: "test_streamed_tokens_are_those_of_the_completion",
    FirstComeFirstServed: "test_requests_of_a_higher_priority_begin_first",
    AbortsAll: "test_an_abort_ends_one_request_and_no_other",
    DropsNothing: "test_an_aborted_request_draws_no_more_and_its_id_is_free",
    DropsEventsOnly: "test_an_aborted_request_draws_no_more_and_its_id_is_free",
    Unchecked: "test_a_bad_request_is_refused_by_its_name_and_harms_no_other",
    WrongVersions: "test_new_weights_are_drawn_from_and_named",
    OldWeights: "test_new_weights_are_drawn_from_and_named",
    WithoutAdapters: "test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones",
    AddsTwice: "test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones",
    WithoutScale: "test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones",
    KeepsAdapters: "test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones",
    ForgetsOne: "test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones",
    OldKeys: "test_new_weights_may_come_while_requests_are_in_flight",
}


@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_a_broken_engine_fails(engine: type[Broken], monkeypatch: pytest.MonkeyPatch) -> None:
    check = getattr(EngineContract(), BROKEN[engine])
    check(EngineTarget(Broken))
    if engine is Deaf:
        monkeypatch.setattr("podium_testing.engines.BLOCKED_S", 0.5)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(EngineTarget(engine))
