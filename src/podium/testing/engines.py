"""Contract: generation engines. An engine's author subclasses :class:`EngineContract` and names the engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import Aborted, Engine, EngineConfig, Event, Failed, Finished, Request, Tokens, make_engine
from podium.rollout.sampling import Completion, SamplingParams

__all__ = ["EngineContract", "EngineTarget", "tiny_model", "trained_logprobs"]

VOCABULARY = 97
PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=(1, 2, 3))
SAMPLING: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"top_k": 7, "top_p": 0.95},
}


def tiny_model(seed: int = 0) -> Any:
    """A Qwen3 of two layers with random weights, 97 tokens and 128 positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far from their defaults, so that each of them matters
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.05)
    return model


def trained_logprobs(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> Tensor:
    """Log-probabilities of a completion by one forward pass over the whole sequence, as a trainer computes them."""
    sequence = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=model.device)
    with torch.no_grad():
        logits = model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu() / temperature
    if completion.kept is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for position in range(len(completion)):
            outside[position, completion.kept.at(position)] = False
        logits = logits.masked_fill(outside, float("-inf"))
    return torch.log_softmax(logits, -1).gather(1, completion.token_ids.unsqueeze(1)).squeeze(1)


class EngineTarget:
    """The engine under test.

    Args:
        engine: Name of an installed engine, or its class.
        tolerance: How far log-probabilities may be from those of a training forward pass in float32.
        model: Makes a model that the engine runs, from a seed. It has 97 tokens and 128 positions.
        config: Values of ``EngineConfig``.
    """

    def __init__(
        self,
        engine: str | type[Engine],
        *,
        tolerance: float = 1e-5,
        model: Callable[[int], Any] = tiny_model,
        **config: Any,
    ) -> None:
        self.engine, self.tolerance, self.model, self.config = engine, tolerance, model, config

    def __str__(self) -> str:
        return self.engine if isinstance(self.engine, str) else self.engine.__name__

    def make(self, model: nn.Module, **changes: Any) -> Engine:
        """The engine over ``model``."""
        values = {**self.config, **changes}
        if isinstance(self.engine, str):
            return make_engine(EngineConfig(name=self.engine, **values), model)
        return self.engine(EngineConfig(**values), model)

    def check(
        self, models: Mapping[int, Any], prompt: Sequence[int], completion: Completion, params: SamplingParams
    ) -> None:
        """Each token has the log-probability that a training forward pass gives it with its version's weights."""
        assert set(completion.versions.tolist()) <= set(models)
        for version, model in models.items():
            expected = trained_logprobs(model, prompt, completion, params.temperature or 1.0)
            own = completion.versions == version
            assert ((completion.logprobs - expected)[own].abs() <= self.tolerance).all()


def prompts_of(count: int = 8) -> list[list[int]]:
    """Prompts of 2 to 29 tokens."""
    source = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 30, (count,), generator=source).tolist()
    return [torch.randint(4, VOCABULARY - 1, (length,), generator=source).tolist() for length in lengths]


def request(id: int | str, prompt: Sequence[int], params: SamplingParams = PARAMS, **changes: Any) -> Request:
    """A request whose seed is its id, where that is a number."""
    return Request(**{"id": id, "prompt": prompt, "params": params, "seed": id, **changes})


def drained(engine: Engine) -> dict[Any, list[Event]]:
    """All events until nothing is in flight, by request."""
    events: dict[Any, list[Event]] = {}
    while new := engine.poll():
        for event in new:
            events.setdefault(event.id, []).append(event)
    return events


def completion_of(events: Sequence[Event]) -> Completion:
    """The completion in the one event of a request."""
    (event,) = events
    assert isinstance(event, Finished)
    return event.completion


class EngineContract:
    """What every engine must do. Subclass it in a test module that has a fixture ``target``:

    >>> @pytest.fixture(scope="module", params=[EngineTarget("mine")], ids=str)
    ... def target(request):
    ...     return request.param
    >>> class TestMine(EngineContract):
    ...     pass
    """

    # -- completions -------------------------------------------------------------------------------------------------

    def test_logprobs_are_those_of_training_also_beside_other_sampling(self, target: EngineTarget) -> None:
        model, prompts = target.model(0), prompts_of()
        engine = target.make(copy.deepcopy(model))
        asked: list[Request] = []
        for sampling in SAMPLING.values():
            params = SamplingParams(max_new_tokens=10 + len(asked) % 7, stop_token_ids=(1, 2), **sampling)
            for prompt in prompts:
                asked.append(request(len(asked), prompt, params))
                try:
                    engine.submit(asked[-1])
                except ConfigError as refusal:
                    assert params.filtered, refusal  # only kept sets may be more than an engine can record
                    asked.pop()
        done = drained(engine)
        for one in asked:
            completion = completion_of(done[one.id])
            target.check({0: model}, one.prompt, completion, one.params)
            assert (completion.kept is not None) == one.params.filtered
            for position, token in enumerate(completion.token_ids.tolist() if completion.kept else ()):
                assert token in completion.kept.at(position)  # pyright: ignore[reportOptionalMemberAccess]

    def test_a_completion_depends_on_its_prompt_and_its_seed_alone(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0)), prompts_of()
        params = SamplingParams(max_new_tokens=12, n=3, stop_token_ids=(1, 2, 3))
        together = engine.generate(prompts, params, range(24))
        assert len({tuple(completion.token_ids.tolist()) for completion in together}) == 24
        order = [5, 2, 7, 0, 1, 3, 6, 4]
        shuffled = engine.generate([prompts[i] for i in order], params, [3 * i + j for i in order for j in range(3)])
        alone = [engine.generate([prompts[index // 3]], PARAMS, [index])[0] for index in (0, 11, 23)]
        expected = [*(together[3 * i + j] for i in order for j in range(3)), *(together[i] for i in (0, 11, 23))]
        for mine, theirs in zip([*shuffled, *alone], expected, strict=True):
            assert torch.equal(mine.token_ids, theirs.token_ids)
            assert (mine.logprobs - theirs.logprobs).abs().max() <= target.tolerance
        assert engine.generate([], params, []) == []
        with pytest.raises(ConfigError, match="2 prompts with n=3 need 6 seeds"):
            engine.generate(prompts[:2], params, range(5))

    def test_a_completion_ends_with_its_first_stop_token_or_its_length(self, target: EngineTarget) -> None:
        params = SamplingParams(max_new_tokens=12, n=4, stop_token_ids=tuple(range(10)))
        for completion in target.make(target.model(0)).generate(prompts_of(), params, range(32)):
            *before, last = completion.token_ids.tolist()
            assert not set(before) & set(range(10))
            assert completion.finish_reason == ("stop" if last < 10 else "length")
            assert completion.finish_reason == "stop" or len(completion) == 12
            assert len(completion.logprobs) == len(completion.versions) == len(completion)
            assert not completion.logprobs.is_inference()  # else no loss could use it

    def test_the_next_turn_of_a_conversation_goes_on_after_the_first(self, target: EngineTarget) -> None:
        model = target.model(0)
        engine, prompt = target.make(copy.deepcopy(model)), prompts_of()[3] + prompts_of()[4]
        for turn in range(3):
            engine.submit(request(turn, prompt))
            completion = completion_of(drained(engine)[turn])
            target.check({0: model}, prompt, completion, PARAMS)
            prompt = [*prompt, *completion.token_ids.tolist(), 40 + turn, 50]

    # -- requests ----------------------------------------------------------------------------------------------------

    def test_requests_arrive_at_any_time_and_from_any_thread(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0), max_sequences=4), prompts_of()
        expected = engine.generate(prompts, PARAMS, range(8))
        done: dict[Any, list[Event]] = {}
        for index in range(4):
            engine.submit(request(index, prompts[index]))
            for event in engine.poll(timeout_s=0):
                done.setdefault(event.id, []).append(event)
        threads = [
            threading.Thread(target=engine.submit, args=(request(index, prompts[index]),)) for index in range(4, 8)
        ]
        for thread in threads:
            thread.start()
        beside = engine.generate(prompts, PARAMS, range(8))  # the events of the others are kept for poll
        for thread in threads:
            thread.join()
        for id, events in drained(engine).items():
            done.setdefault(id, []).extend(events)
        for index in range(8):
            assert torch.equal(completion_of(done[index]).token_ids, expected[index].token_ids)
            assert torch.equal(beside[index].token_ids, expected[index].token_ids)
        assert engine.poll() == engine.poll(timeout_s=0.01) == []

    def test_streamed_tokens_are_those_of_the_completion(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0)), prompts_of()
        for index, prompt in enumerate(prompts):
            engine.submit(request(index, prompt, stream=index % 2 == 0))
        for index, events in drained(engine).items():
            *tokens, last = events
            assert isinstance(last, Finished)
            streamed = [event for event in tokens if isinstance(event, Tokens)]
            assert len(streamed) == len(tokens)
            if index % 2 == 0:
                ids, logprobs = last.completion.token_ids.tolist(), last.completion.logprobs.tolist()
                assert [token for event in streamed for token in event.token_ids] == ids
                assert [logprob for event in streamed for logprob in event.logprobs] == pytest.approx(logprobs)
                assert {event.version for event in streamed} == {0}
            else:
                assert not tokens

    def test_requests_of_a_higher_priority_begin_first(self, target: EngineTarget) -> None:
        engine = target.make(target.model(0), max_sequences=1)
        for index, priority in enumerate((0, 1, 5, 1, 0)):
            engine.submit(request(index, prompts_of()[index], priority=priority))
        assert list(drained(engine)) == [2, 1, 3, 0, 4]

    def test_an_abort_ends_one_request_and_no_other(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0), max_sequences=4), prompts_of()
        expected = engine.generate(prompts, PARAMS, range(8))
        for index, prompt in enumerate(prompts):
            engine.submit(request(index, prompt))
        engine.abort(0)  # before it has begun
        first = engine.poll(timeout_s=0)  # engines that serve batch by batch may have finished some
        begun = next(index for index in (3, 7) if index not in {event.id for event in first})
        for id in (begun, begun, "unknown"):
            engine.abort(id)
        done = drained(engine)
        for event in reversed(first):
            done.setdefault(event.id, []).insert(0, event)
        assert set(done) == set(range(8))
        for index, events in done.items():
            if index in (0, begun):
                assert events == [Aborted(index)]
            else:
                assert torch.equal(completion_of(events).token_ids, expected[index].token_ids)
        engine.submit(request(0, prompts[0]))  # the id is free again
        assert torch.equal(completion_of(drained(engine)[0]).token_ids, expected[0].token_ids)

    def test_a_bad_request_is_refused_by_its_name_and_harms_no_other(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0)), prompts_of()
        engine.submit(request(0, prompts[0]))
        bad = {
            "is empty": [],
            f"has token {VOCABULARY}, outside": [5, VOCABULARY],
            "has token -2, outside": [5, -2],
            "has 120 tokens.* exceeds the model's 128 positions": [5] * 120,
        }
        for message, prompt in bad.items():
            with pytest.raises(ConfigError, match=f"request 'bad' {message}"):
                engine.submit(request("bad", prompt, seed=1))
            with pytest.raises(ConfigError, match=f"prompt 1 {message}"):
                engine.generate([[5], prompt], PARAMS, [0, 1])
        with pytest.raises(ConfigError, match="request 0 is in flight"):
            engine.submit(request(0, prompts[1]))
        assert set(drained(engine)) == {0}

    def test_logits_that_are_no_numbers_fail_their_request_alone(self, target: EngineTarget) -> None:
        model, prompts, poison = target.model(0), prompts_of(), VOCABULARY - 1
        healthy = target.make(copy.deepcopy(model)).generate(prompts, PARAMS, range(8))
        with torch.no_grad():
            model.get_input_embeddings().weight[poison] = float("nan")
        engine = target.make(model)
        safe = [index for index in range(8) if poison not in healthy[index].token_ids]
        assert len(safe) > 3
        for index in safe:
            engine.submit(request(index, prompts[index]))
            engine.submit(request(f"bad {index}", [*prompts[index], poison], seed=index))
        done = drained(engine)
        for index in safe:
            assert torch.equal(completion_of(done[index]).token_ids, healthy[index].token_ids)
            (failed,) = done[f"bad {index}"]
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, GenerationError)
            assert f"request 'bad {index}'" in str(failed.error)
        for index in safe:  # what the failed ones left behind harms nobody
            engine.submit(request(index, prompts[index]))
        done = drained(engine)
        assert all(torch.equal(completion_of(done[i]).token_ids, healthy[i].token_ids) for i in safe)

    # -- weights -----------------------------------------------------------------------------------------------------

    def test_new_weights_are_drawn_from_and_named(self, target: EngineTarget) -> None:
        first, second, prompts = target.model(0), target.model(1), prompts_of()
        engine = target.make(first)
        before = copy.deepcopy(first)

        def check(version: int, model: Any) -> None:
            assert engine.version == version
            for prompt, completion in zip(prompts, engine.generate(prompts, PARAMS, range(8)), strict=True):
                target.check({version: model}, prompt, completion, PARAMS)

        check(0, before)
        engine.refresh(3, second.state_dict())
        check(3, second)
        first.load_state_dict(before.state_dict())
        engine.refresh(4)  # reads the model that it was made with
        check(4, before)
        with pytest.raises(ConfigError, match="missing"):
            engine.refresh(5, {})
        name, weight = next(iter(second.state_dict().items()))
        with pytest.raises(ConfigError, match=name):
            engine.check_weights({**{n: w.shape for n, w in second.state_dict().items()}, name: (*weight.shape, 1)})
        check(4, before)

    def test_new_weights_may_come_while_requests_are_in_flight(self, target: EngineTarget) -> None:
        models = {version: target.model(version) for version in (0, 1)}
        engine, prompts = target.make(copy.deepcopy(models[0]), max_sequences=2), prompts_of()
        for index, prompt in enumerate(prompts):
            engine.submit(request(index, prompt))
        done = {event.id: [event] for event in engine.poll()}
        coming = threading.Thread(target=engine.refresh, args=(1, models[1].state_dict()))
        coming.start()
        done |= {event.id: [event] for event in engine.poll()}
        coming.join()
        done |= drained(engine)
        versions: set[int] = set()
        for index, prompt in enumerate(prompts):
            completion = completion_of(done[index])
            target.check(models, prompt, completion, PARAMS)
            assert completion.versions.tolist() == sorted(completion.versions.tolist())
            versions |= set(completion.versions.tolist())
        assert versions == {0, 1}

    def test_weights_that_came_in_part_are_not_drawn_from(self, target: EngineTarget) -> None:
        model = target.model(0)
        engine, prompt = target.make(copy.deepcopy(model)), prompts_of()[0]
        with pytest.raises(OSError, match="cut"), engine.gate.changing(1):
            raise OSError("cut")
        engine.submit(request(0, prompt))
        ((failed,),) = drained(engine).values()
        assert isinstance(failed, Failed)
        with pytest.raises(GenerationError, match=r"version 1 came only in part \(cut\)"):
            engine.generate([prompt], PARAMS, [0])
        engine.refresh(1, model.state_dict())
        (completion,) = engine.generate([prompt], PARAMS, [0])
        target.check({1: model}, prompt, completion, PARAMS)
