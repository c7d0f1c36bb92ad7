"""The vLLM engine beyond the contract that all engines keep: `make test-vllm` has an environment with vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import Aborted, Engine, EngineConfig, Failed, Finished, Request, Tokens, make_engine
from podium.rollout.engines.stops import count_to_stop
from podium.rollout.sampling import Completion, RequestParams, SamplingParams
from podium_vllm import engine as engine_module
from podium_vllm.engine import VllmEngine, VllmOptions
from tests.unit.rollout.engines.conftest import MakeModel, compute_trained_logprobs, make_model

__all__ = ["make_model"]  # a fixture

INSTALLED = importlib.util.find_spec("vllm") is not None
CONFIG = EngineConfig(name="vllm", cache_gib=0.25, max_sequences=16)

# vLLM is loud, and its build for CPUs complains of what it lacks.
with_vllm = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_where_it_is_missing_the_error_says_how_to_get_it(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"engine.name = 'vllm': vllm is not installed: pip install 'vllm>=0\.32'"):
        make_engine(CONFIG, make_model("qwen3"))


def test_options_are_typed() -> None:
    assert EngineConfig(name="vllm", options={"max_model_len": 99}).read_options(VllmOptions).max_model_len == 99
    with pytest.raises(ConfigError, match=r"'vllm': unknown key engine.options.enforce_eagr .*options.enforce_eager\?"):
        EngineConfig(name="vllm", options={"enforce_eagr": True}).read_options(VllmOptions)


@pytest.fixture
def vllm_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that reach a vLLM, which is not there, on a machine of two accelerators."""
    calls: list[dict[str, Any]] = []
    fake: Any = ModuleType("vllm")
    fake.LLM = lambda **arguments: calls.append(arguments) or SimpleNamespace(llm_engine=None)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((40 - 20 * device.index) << 30, 80 << 30))
    return calls


def start(model: Any, cache_gib: float | None = None, **options: Any) -> Any:
    config = EngineConfig(cache_gib=cache_gib, options=options)
    assert VllmEngine.model_device(config, torch.device("cuda")).type == ("cpu" if options else "cuda")
    return engine_module._make_engine(config, model, torch.bfloat16)


def test_several_accelerators_go_to_vllms_own_executor(make_model: MakeModel, vllm_calls: list[dict[str, Any]]) -> None:
    """The weights stay on the CPU; memory is that of the fullest accelerator, and the cache is spread as well."""
    start(make_model("qwen3"), tensor_parallel_size=2)
    start(make_model("qwen3"), tensor_parallel_size=2, cache_gib=8.0)
    start(make_model("qwen3"), cache_gib=8.0)
    assert [call.get("tensor_parallel_size") for call in vllm_calls] == [2, 2, None]
    assert [call.get("distributed_executor_backend") for call in vllm_calls] == ["mp", "mp", None]
    assert [call["kv_cache_memory_bytes"] for call in vllm_calls] == [5 << 30, 4 << 30, 8 << 30]
    assert [call.get("gpu_memory_utilization") for call in vllm_calls] == [pytest.approx(0.9 * 0.25)] * 2 + [None]
    assert [call["enforce_eager"] for call in vllm_calls] == [False, False, True]
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_what_cannot_be_spread_is_refused(make_model: MakeModel, vllm_calls: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4: this process sees 2 acc.*pool\(\[1\], gpus=4\)"):
        start(make_model("qwen3"), tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3: the model has 4 attention heads and 2 heads"):
        start(make_model("qwen3"), tensor_parallel_size=3)
    assert not vllm_calls


def test_routing_biases_go_to_vllm_as_weights_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are buffers of a model that transformers loads, and vLLM starts without any values of its own."""
    loaded: dict[str, torch.Tensor] = {}

    def collect(function: Any, args: Any = ()) -> None:
        if function is engine_module._take_weights:
            loaded.update(args[0])

    vllm = SimpleNamespace(
        collective_rpc=collect,
        reset_prefix_cache=lambda **_: True,
        model_config=SimpleNamespace(max_model_len=64),
    )
    monkeypatch.setattr(engine_module, "_make_engine", lambda *_: vllm)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 16, "head_dim": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts))
    biases = model.model.layers[0].mlp.gate.e_score_correction_bias
    biases.copy_(torch.tensor([3.0, -3.0, 1.0, 0.0]))
    VllmEngine(CONFIG, model)
    assert {name: tensor.shape for name, tensor in loaded.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert torch.equal(loaded["model.layers.0.mlp.gate.e_score_correction_bias"], biases)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Any]]:
    """What ``engine`` keeps for the whole module, since starting vLLM takes seconds."""
    made: dict[str, Any] = {}
    yield made
    made.clear()


@pytest.fixture
def engine(engines: dict[str, Any], make_model: MakeModel) -> Engine:
    """Generates with a model of its own."""
    if "shared" not in engines:
        engines["shared"] = make_engine(CONFIG, make_model("qwen3", seed=7))
    return engines["shared"]


def check(completions: list[Completion], model: Any, prompts: list[list[int]], params: SamplingParams) -> None:
    """The log-probabilities are those of the model."""
    for index, completion in enumerate(completions):
        trained = compute_trained_logprobs(model, prompts[index // params.n], completion, params.temperature or 1.0)
        assert (completion.logprobs - trained).abs().max() < 1e-4


def last_events(engine: Any, **asked: SamplingParams) -> dict[Any, Any]:
    """What becomes of requests, by id, that are asked beside one another."""
    for id, params in asked.items():
        engine.submit(Request(id=id, prompt=[1, 2], params=params, seed=0))
    last: dict[Any, Any] = {}
    while events := engine.poll():
        last |= {event.id: event for event in events}
    return last


class TestWithVllm:
    pytestmark = with_vllm

    @pytest.mark.parametrize("top_k", [0, 5])
    def test_a_completion_ends_with_the_token_that_completes_a_text(self, engine: Engine, top_k: int) -> None:
        prompts = [[1, 2, 3], [4, 5]]
        params = RequestParams(max_new_tokens=24, n=4, top_k=top_k)
        completions = engine.generate(prompts, params, range(8))
        engine.decode = lambda ids: "".join(f"<{id}>" for id in ids)
        stops = tuple({f"{completion.token_ids[6]}><{completion.token_ids[7]}" for completion in completions[:3]})
        ended = engine.generate(prompts, replace(params, stop=stops), range(8))
        for first, second in zip(completions, ended, strict=True):
            count = count_to_stop(first.token_ids.tolist(), stops, engine.decode) or len(first)
            assert second.token_ids.tolist() == first.token_ids[:count].tolist()
            assert (second.finish_reason, bool(second.stop)) == (("stop", True) if count < 24 else ("length", False))
            assert (second.kept is None) == (first.kept is None)
            if second.kept is not None:
                assert len(second.kept.offsets) == count + 1
        assert sum(completion.finish_reason == "stop" for completion in ended) >= 3
        check(ended, engine.model, prompts, params)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_logprobs_agree_before_and_after_new_weights(
        self, family: str, make_model: MakeModel, prompts: list[list[int]]
    ) -> None:
        """With an output layer of its own (llama, qwen2) and with one that is tied to the embedding (qwen3)."""
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}  # vLLM's attention for CPUs takes no smaller ones
        first, second, initial = (make_model(family, seed=seed, **heads) for seed in (0, 1, 0))
        state = torch.get_rng_state()
        engine = make_engine(CONFIG, initial)
        assert torch.equal(torch.get_rng_state(), state), "vLLM seeds generators, those of the process as well"
        params = SamplingParams(max_new_tokens=20, n=2, temperature=0.7, stop_token_ids=tuple(range(10)))
        for version, model in enumerate([first, second, first]):
            if version:
                engine.refresh(version, model.state_dict())
            completions = engine.generate(prompts, params, range(20))
            check(completions, model, prompts, params)
            assert {version} == {number for completion in completions for number in completion.versions.tolist()}
            assert {completion.finish_reason for completion in completions} == {"stop", "length"}
            for completion in completions:
                assert (completion.finish_reason == "stop") == (int(completion.token_ids[-1]) < 10)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_new_tokens=12, top_k=5),
            SamplingParams(max_new_tokens=12, top_p=0.8),
            SamplingParams(max_new_tokens=12, top_p=0.8, top_k=7, temperature=1.3),
            SamplingParams(max_new_tokens=12, temperature=0),
        ],
        ids=["top-k", "top-p", "both", "greedy"],
    )
    def test_kept_sets_are_those_that_tokens_were_drawn_from(
        self, params: SamplingParams, engine: Any, prompts: list[list[int]]
    ) -> None:
        completions = engine.generate(prompts, params, range(10))
        check(completions, engine.model, prompts, params)
        for completion in completions:
            assert (completion.kept is not None) == params.filtered
            if completion.kept is not None:
                sizes = completion.kept.offsets.diff()
                assert not params.top_k or int(sizes.max()) <= params.top_k
                assert all(token in completion.kept.at(at) for at, token in enumerate(completion.token_ids))

    def test_a_kept_set_that_cannot_be_listed_is_an_error(
        self, engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("podium_vllm.engine.MOST_KEPT", 4)
        with pytest.raises(GenerationError, match=r"sampling\.top_p=0\.99 .* keep more than \d tokens"):
            engine.generate(prompts, SamplingParams(max_new_tokens=4, top_p=0.99), range(10))
        engine.generate(prompts, SamplingParams(max_new_tokens=4), range(10))

    def test_a_kept_set_that_cannot_be_listed_fails_its_request_alone(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("podium_vllm.engine.MOST_KEPT", 4)
        last = last_events(
            engine, wide=SamplingParams(max_new_tokens=4, top_p=0.99), plain=SamplingParams(max_new_tokens=4)
        )
        assert isinstance(last["plain"], Finished)
        assert isinstance(last["wide"], Failed)
        assert "cannot list" in str(last["wide"].error)
        assert not engine._drawing

    def test_a_temperature_that_vllm_would_raise_or_refuse_fails_its_request_alone(self, engine: Any) -> None:
        temperatures = {"cold": 0.001, "warm": 0.5, "warmest": 2.0, "hot": 2.5}
        params = {
            id: SamplingParams(max_new_tokens=3, temperature=temperature) for id, temperature in temperatures.items()
        }
        last = last_events(engine, **params)
        for id, temperature in temperatures.items():
            if "warm" in id:
                assert isinstance(last[id], Finished)
            else:
                assert isinstance(last[id], Failed)
                assert f"temperature is {temperature}; the engine vllm takes 0, or a temperature from 0.01 to 2" in str(
                    last[id].error
                )

    def test_weights_come_in_between_two_tokens(
        self, engine: Any, make_model: MakeModel, prompts: list[list[int]]
    ) -> None:
        """Tokens before have the log-probabilities of the old weights, those after of the new, over all positions."""
        old, new = make_model("qwen3", seed=2), make_model("qwen3", seed=3)
        engine.refresh(11, old.state_dict())
        params = SamplingParams(max_new_tokens=30)
        for index, prompt in enumerate(prompts):
            engine.submit(Request(id=index, prompt=prompt, params=params, seed=index, stream=True))
        streamed: dict[Any, list[int]] = {index: [] for index in range(len(prompts))}
        done: dict[Any, Completion] = {}
        while len(streamed[0]) < 8:
            for event in engine.poll():
                streamed[event.id] += event.token_ids
        engine.refresh(12, new.state_dict())
        engine.abort(3)
        while events := engine.poll():
            for event in events:
                if isinstance(event, Tokens):
                    streamed[event.id] += event.token_ids
                    assert event.version == 12
                elif isinstance(event, Finished):
                    done[event.id] = event.completion
                else:
                    assert event == Aborted(3)
        assert sorted(done) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        for index, completion in done.items():
            assert completion.token_ids.tolist() == streamed[index]
            assert len(completion) == 30
            for version, model in ((11, old), (12, new)):
                mask = completion.versions == version
                assert mask.sum() >= 7
                trained = compute_trained_logprobs(model, prompts[index], completion, 1.0)
                assert (completion.logprobs - trained)[mask].abs().max() < 1e-4

    def test_weights_come_in_parts(self, engine: Any, make_model: MakeModel, prompts: list[list[int]]) -> None:
        model = make_model("qwen3", seed=4)
        params = SamplingParams(max_new_tokens=8)
        engine.gate.close()
        for name, tensor in model.named_parameters():
            for start in range(0, len(tensor), 40):
                engine.load(name, start, tensor[start : start + 40])
        engine.loaded()
        engine.gate.open(21)
        check(engine.generate(prompts, params, range(10)), model, prompts, params)
        assert torch.equal(engine.rows("model.norm.weight", 3, 9), model.model.norm.weight[3:9])

    def test_weights_that_vllm_does_not_take_are_noticed(
        self, engine: Any, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(max_new_tokens=4)
        with monkeypatch.context() as patch:
            patch.setattr(engine._engine, "collective_rpc", lambda *_, **__: [])
            engine.refresh(31, make_model("qwen3", seed=5).state_dict())
        for _ in range(2):
            with pytest.raises(GenerationError, match="does not compute with the weights of version 31"):
                engine.generate([[1, 2, 3]], params, [0])
        engine.refresh(32)
        assert len(engine.generate([[1, 2, 3]], params, [0])) == 1

    def test_the_cache_takes_a_share_of_what_is_free(
        self, make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And another dtype is vLLM's own conversion, without a copy of the model."""
        monkeypatch.setattr("podium_vllm.engine.free_memory_bytes", lambda _: 2**30)
        model = make_model("qwen3")
        engine: Any = make_engine(EngineConfig(name="vllm", dtype="bfloat16"), model)
        assert engine._engine.vllm_config.cache_config.kv_cache_memory_bytes == 2**28
        assert engine.model is model
        (completion,) = engine.generate(prompts[:1], SamplingParams(max_new_tokens=20), [0])
        assert (completion.logprobs - compute_trained_logprobs(model, prompts[0], completion, 1.0)).abs().mean() < 0.05
