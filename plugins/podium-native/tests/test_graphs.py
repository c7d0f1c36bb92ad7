"""Decode steps of static shape: recorded on a CPU by a tape, which keeps addresses as a CUDA graph does."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.draw import draw
from podium.rollout.sampling import Completion, SamplingParams
from podium.training.offload import Offload
from podium_native import NativeEngine
from podium_native.cache import GemmCache, KVCache, SdpaCache
from podium_native.decoder import Decoder
from podium_native.graphs import DecodeGraphs, Step, StepResult, bucket
from podium_native.parameters import read_weights
from tests.unit.rollout.engines.conftest import MakeModel, compute_trained_logprobs

from . import tape

PARAMS = SamplingParams(max_new_tokens=9, stop_token_ids=(3, 50))


class Recordings:
    """How many steps were recorded."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Step, device: torch.device) -> Step:
        self.count += 1
        return tape.record(step, device)


def engine_with_graphs(model: Any, **config: Any) -> tuple[NativeEngine, Recordings]:
    engine = NativeEngine(EngineConfig(name="native", options={"cuda_graphs": True}, **config), model)
    recordings = Recordings()
    assert engine._graphs is not None
    engine._graphs._record = recordings
    engine._graphs.clear()
    return engine, recordings


def check(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.logprobs - other.logprobs).abs().max() < 1e-5
        assert one.finish_reason == other.finish_reason
        assert (one.kept is None) == (other.kept is None)
        if one.kept is not None and other.kept is not None:
            assert torch.equal(one.kept.ids, other.kept.ids)


@pytest.mark.everyday("qwen3", "llama")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_recorded_steps_draw_what_the_loop_draws(make_model: MakeModel, prompts: list[list[int]], family: str) -> None:
    """Ten requests of unlike lengths in at most four lanes, which fall free and are filled one by one."""
    loop = NativeEngine(EngineConfig(name="native", max_sequences=4), make_model(family))
    graphs, recordings = engine_with_graphs(make_model(family), max_sequences=4)
    for temperature in (1.0, 0.7, 0.0):
        params = replace(PARAMS, temperature=temperature)
        check(graphs.generate(prompts, params, range(10)), loop.generate(prompts, params, range(10)))
    assert {rows for rows, _, _ in graphs._graphs._steps} <= {1, 2, 4}  # type: ignore[union-attr]
    assert recordings.count <= 9


def test_draws_that_ask_the_device_come_after_the_graph(make_model: MakeModel, prompts: list[list[int]]) -> None:
    loop = NativeEngine(EngineConfig(name="native"), make_model("qwen3"))
    graphs, recordings = engine_with_graphs(make_model("qwen3"))
    for changes in ({"top_p": 0.8}, {"top_k": 5}):
        params = replace(PARAMS, **changes)  # type: ignore[arg-type]
        check(graphs.generate(prompts, params, range(10)), loop.generate(prompts, params, range(10)))
    assert {params for _, _, params in graphs._graphs._steps} == {None}  # type: ignore[union-attr]
    assert 0 < recordings.count <= 5


def test_what_free_lanes_remember_is_not_overwritten(make_model: MakeModel, prompts: list[list[int]]) -> None:
    """A second turn needs only what is new in it, as without graphs, after other rows were decoded beside its lane."""
    found: list[tuple[list[Completion], int]] = []
    for engine in (
        NativeEngine(EngineConfig(name="native"), make_model("qwen3")),
        engine_with_graphs(make_model("qwen3"))[0],
    ):
        long = [prompt for prompt in prompts if len(prompt) > 17]
        first = engine.generate(long, SamplingParams(max_new_tokens=2), range(len(long)))
        engine.generate([prompts[0]] * len(long), SamplingParams(max_new_tokens=12), range(len(long)))
        turns = [[*prompt, *one.token_ids.tolist(), 7] for prompt, one in zip(long, first, strict=True)]
        found.append((engine.generate(turns, PARAMS, range(len(long))), engine.prefilled_tokens))
    check(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("layout", [GemmCache, SdpaCache])
def test_rows_that_pad_a_step_change_no_other_row(make_model: MakeModel, layout: type[KVCache]) -> None:
    with torch.inference_mode():
        decoder = Decoder(read_weights(make_model("mistral")))
        decoder.reserve(64)
        found: list[Tensor] = []
        for rows, fill in ((3, 0), (4, 0), (8, 1), (8, 60)):
            cache, graphs, numbers = layout(decoder.weights, 8, 64), DecodeGraphs(tape.record), torch.full((8,), 0.5)
            drawn: Tensor | None = None
            for position in range(3):
                tokens = torch.tensor([5, 9, 4, *[fill] * 5])
                positions = torch.tensor([position, position, position, *[fill] * 5])
                inputs = tokens[:rows], positions[:rows], numbers[:rows].double()
                drawn = graphs.step(decoder, cache, inputs, position + 1, SamplingParams(max_new_tokens=1)).logprobs_A
            assert drawn is not None
            found.append(drawn[:3].clone())
            assert len(graphs) == 1
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphs_stay_valid_while_weights_are_written_in_place(make_model: MakeModel, family: str) -> None:
    """qwen3 has norms of queries and keys, of which the engine reads copies."""
    model, other = make_model(family), make_model(family, seed=1)
    engine, recordings = engine_with_graphs(model)
    engine.generate([[1, 2]], PARAMS, [3])
    recorded = recordings.count
    for name, tensor in other.state_dict().items():
        engine.load(name, 0, tensor)
    engine.refresh(1)
    (completion,) = engine.generate([[1, 2]], PARAMS, [3])
    assert (completion.logprobs - compute_trained_logprobs(other, [1, 2], completion, 1.0)).abs().max() < 1e-5
    assert recordings.count == recorded > 0


def test_graphs_are_recorded_anew_where_weights_have_moved(make_model: MakeModel) -> None:
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    engine, recordings = engine_with_graphs(model)
    engine.generate([[1, 2]], PARAMS, [3])
    before = recordings.count
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    engine.refresh(1)
    (completion,) = engine.generate([[1, 2]], PARAMS, [3])
    assert (completion.logprobs - compute_trained_logprobs(other, [1, 2], completion, 1.0)).abs().max() < 1e-5
    assert recordings.count > before

    before = recordings.count
    resting = Offload(lambda: list(model.parameters()))  # nobody tells the engine
    resting.sleep()
    held = [torch.empty(parameter.numel()) for parameter in model.parameters()]
    resting.wake()
    (again,) = engine.generate([[1, 2]], PARAMS, [3])
    assert torch.equal(again.token_ids, completion.token_ids)
    assert recordings.count > before
    del held

    engine.release()
    assert engine._graphs is not None
    assert len(engine._graphs) == 0


def test_the_draw_over_a_large_vocabulary_asks_the_device_nothing() -> None:
    logits = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(0))
    numbers, held = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), logits.clone()

    def step() -> StepResult:
        drawn = draw(held, SamplingParams(max_new_tokens=1, temperature=0.7), numbers)
        return StepResult(None, drawn.ids_B, drawn.logprobs_B)

    replay = tape.record(step, held.device)
    held.copy_(logits.roll(1, 0))
    numbers.copy_(torch.tensor([0.9, 0.1, 0.5]))
    _, ids, logprobs = replay()
    expected = draw(logits.roll(1, 0), SamplingParams(max_new_tokens=1, temperature=0.7), numbers)
    assert ids is not None
    assert logprobs is not None
    assert torch.equal(ids, expected.ids_B)
    assert torch.equal(logprobs, expected.logprobs_B)


def test_the_tape_refuses_what_a_graph_cannot_record() -> None:
    values = torch.arange(3.0)
    for asked in (lambda: float(values.sum()), lambda: values.nonzero(), lambda: torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="a graph cannot record"):
            tape.record(asked, values.device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "most", "least", "expected"),
    [(0, 64, 1, 0), (1, 64, 1, 1), (3, 64, 1, 4), (16, 64, 1, 16), (17, 48, 1, 32), (33, 48, 1, 48), (5, 512, 128, 128),
     (129, 512, 128, 256), (5, 96, 128, 96)],
)  # fmt: skip
def test_the_smallest_bucket_that_fits_is_taken(size: int, most: int, least: int, expected: int) -> None:
    assert bucket(size, most, least) == expected


def test_graphs_on_a_cpu_are_asked_for_by_an_option_and_refused_with_experts(make_model: MakeModel) -> None:
    plain: Any = make_engine(EngineConfig(name="native"), make_model("qwen3"))
    assert plain._graphs is None
    with pytest.raises(ConfigError, match=r"engine\.options\.cuda_graphs: the model has experts"):
        NativeEngine(EngineConfig(name="native", options={"cuda_graphs": True}), make_model("qwen3_moe"))
