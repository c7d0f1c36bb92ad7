"""Contract: generation engines. An engine's author subclasses :class:`EngineContract` and names the engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.data.adapters import Adapter
from podium.data.masks import unpack_masks
from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import Aborted, Engine, EngineConfig, Event, Failed, Finished, Request, Tokens, make_engine
from podium.rollout.engines.gate import WeightGate
from podium.rollout.engines.journal import Drawn
from podium.rollout.sampling import Completion, RequestParams, SamplingParams

__all__ = ["EngineContract", "EngineTarget", "compute_trained_logprobs", "tiny_model"]

VOCABULARY = 97
BLOCKED_S = 60.0
"""After this many seconds, a call in another thread counts as blocked. Any other call takes milliseconds."""
PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=(1, 2, 3))
SAMPLING: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"top_k": 7, "top_p": 0.95},
}


def tiny_model(seed: int = 0, model_type: str = "qwen3", **fields: Any) -> Any:
    """A model of two layers with random weights, 97 tokens and 128 positions.

    Args:
        seed: Decides the weights.
        model_type: The architecture, by its name in transformers.
        fields: Fields of its configuration that differ from those here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far from their defaults, so that each of them matters
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.05)
    return model


def compute_trained_logprobs(
    model: Any, prompt: Sequence[int], completion: Completion, temperature: float, without: Sequence[int] = ()
) -> Tensor:
    """Log-probabilities of a completion by one forward pass over the whole sequence, as a trainer computes them. The
    ids ``without`` have none."""
    sequence = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=model.device)
    with torch.no_grad():
        logits = model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu() / temperature
    logits[:, list(without)] = float("-inf")
    if completion.kept is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for position in range(len(completion)):
            outside[position, completion.kept.at(position)] = False
        logits = logits.masked_fill(outside, float("-inf"))
    for position, mask in enumerate(completion.masks or ()):
        if mask:
            allowed = unpack_masks(torch.frombuffer(bytearray(mask), dtype=torch.uint8)[None], logits.shape[1])[0]
            logits[position, ~allowed] = float("-inf")
    return torch.log_softmax(logits, -1).gather(1, completion.token_ids.unsqueeze(1)).squeeze(1)


TEXTS = ("bca", "aab", "dd")
"""Texts that begin and end within tokens and across them."""


def write_pairs(ids: Sequence[int]) -> str:
    """A text of two letters for each token."""
    return "".join("abcd"[id % 4] + "abcd"[id // 4 % 4] for id in ids)


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
        self,
        models: Mapping[int, Any],
        prompt: Sequence[int],
        completion: Completion,
        params: SamplingParams,
        without: Sequence[int] = (),
    ) -> None:
        """Each token has the log-probability that a training forward pass gives it with its version's weights."""
        versions = set(completion.versions.tolist())
        assert versions <= set(models), f"tokens are said to be of versions {versions}; the engine had {set(models)}"
        for version, model in models.items():
            expected = compute_trained_logprobs(model, prompt, completion, params.temperature or 1.0, without)
            off = (completion.logprobs - expected).abs()[completion.versions == version]
            assert (off <= self.tolerance).all(), (
                f"log-probabilities are up to {off.max():.2g} off those of training with weights {version}; return "
                f"those of the distribution that the token was drawn from, after temperature, top-k and top-p: {params}"
            )


class _EventfulGate(WeightGate):
    """A gate that calls functions of the test at forward passes of the test's choice.

    Attributes:
        before: By number of the pass, from 1 on: called when the engine is about to begin the pass.
        during: Likewise: called while the pass runs.
    """

    def __init__(self, refusal: str = "") -> None:
        super().__init__(refusal)
        self.before: dict[int, Callable[[], None]] = {}
        self.during: dict[int, Callable[[], None]] = {}
        self._begun = 0

    def __enter__(self) -> None:
        self._begun += 1
        self.before.get(self._begun, lambda: None)()
        super().__enter__()
        self.during.get(self._begun, lambda: None)()

    def restart_count(self) -> None:
        """Call the next pass the first."""
        self._begun = 0


def with_eventful_gate(target: EngineTarget, model: nn.Module, **changes: Any) -> tuple[Engine, _EventfulGate]:
    """The engine over ``model``, and its gate, which tells the test of each forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("podium.rollout.engines.base.WeightGate", _EventfulGate)
        engine = target.make(model, **changes)
    assert isinstance(engine.gate, _EventfulGate), "the constructor of Engine makes the gate; call it and keep its gate"
    engine.gate.restart_count()
    return engine, engine.gate


def call_in_thread(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` in another thread, and return when it has returned."""
    name = getattr(function, "__name__", str(function))
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    thread.join(BLOCKED_S)
    assert not thread.is_alive(), f"{name}() waits for the engine; it must return although the engine is at work"


def prompts_of(count: int = 8) -> list[list[int]]:
    """Prompts of 2 to 29 tokens."""
    source = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 30, (count,), generator=source).tolist()
    return [torch.randint(4, VOCABULARY - 1, (length,), generator=source).tolist() for length in lengths]


def request(id: int | str, prompt: Sequence[int], params: SamplingParams = PARAMS, **changes: Any) -> Request:
    """A request whose seed is its id, where that is a number."""
    return Request(**{"id": id, "prompt": prompt, "params": params, "seed": id, **changes})


def drain(engine: Engine, events: Sequence[Event] = ()) -> dict[Any, list[Event]]:
    """``events`` and all that come until nothing is in flight, by request."""
    events_by_request: dict[Any, list[Event]] = {}
    new = list(events)
    while new or (new := engine.poll()):
        for event in new:
            events_by_request.setdefault(event.id, []).append(event)
        new = []
    return events_by_request


def completion_of(events: Sequence[Event]) -> Completion:
    """The completion in the one event of a request."""
    last = events[-1]
    assert len(events) == 1, f"a request without stream has one event, its last, and this one has {events}"
    assert isinstance(last, Finished), f"a request that nothing disturbed ends with Finished, not with {last}"
    return last.completion


def cut(drawn: Drawn, length: int) -> Drawn:
    """The first tokens."""
    kept = None if drawn.kept is None else drawn.kept[:length]
    return Drawn(drawn.token_ids[:length], drawn.logprobs[:length], drawn.versions[:length], kept)


def check_same(mine: Completion, theirs: Completion, when: str) -> None:
    """Both have the same tokens."""
    ids, expected = mine.token_ids.tolist(), theirs.token_ids.tolist()
    assert ids == expected, f"a completion depends on more than its prompt and seed: {when} it is {ids}, not {expected}"


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
        requests: list[Request] = []
        for sampling in SAMPLING.values():
            params = SamplingParams(max_new_tokens=10 + len(requests) % 7, stop_token_ids=(1, 2), **sampling)
            for prompt in prompts:
                requests.append(request(len(requests), prompt, params))
                try:
                    engine.submit(requests[-1])
                except ConfigError as refusal:
                    assert params.filtered, f"only top-k and top-p may be refused, not {params}: {refusal}"
                    requests.pop()
        done = drain(engine)
        for one in requests:
            completion = completion_of(done[one.id])
            target.check({0: model}, one.prompt, completion, one.params)
            kept = completion.kept
            assert (kept is not None) == one.params.filtered, "kept sets come with top-k and top-p, and only then"
            for position, token in enumerate(completion.token_ids.tolist() if kept else ()):
                assert kept is None or token in kept.at(position), f"token {position} is not in its own kept set"

    def test_a_completion_depends_on_its_prompt_and_its_seed_alone(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0)), prompts_of()
        params = SamplingParams(max_new_tokens=12, n=3, stop_token_ids=(1, 2, 3))
        together = engine.generate(prompts, params, range(24))
        different = {tuple(completion.token_ids.tolist()) for completion in together}
        assert len(different) == 24, "completions of different seeds are equal: draw each by the seed of its request"
        order = [5, 2, 7, 0, 1, 3, 6, 4]
        shuffled = engine.generate([prompts[i] for i in order], params, [3 * i + j for i in order for j in range(3)])
        alone = [engine.generate([prompts[index // 3]], PARAMS, [index])[0] for index in (0, 11, 23)]
        expected = [*(together[3 * i + j] for i in order for j in range(3)), *(together[i] for i in (0, 11, 23))]
        for mine, theirs in zip([*shuffled, *alone], expected, strict=True):
            check_same(mine, theirs, "alone or in another order")
            assert (mine.logprobs - theirs.logprobs).abs().max() <= target.tolerance, "other requests changed logprobs"
        assert engine.generate([], params, []) == []
        with pytest.raises(ConfigError, match="2 prompts with n=3 need 6 seeds"):
            engine.generate(prompts[:2], params, range(5))

    def test_a_completion_ends_with_its_first_stop_token_or_its_length(self, target: EngineTarget) -> None:
        params = SamplingParams(max_new_tokens=12, n=4, stop_token_ids=tuple(range(10)))
        for completion in target.make(target.model(0)).generate(prompts_of(), params, range(32)):
            *before, last = completion.token_ids.tolist()
            assert not set(before) & set(range(10)), f"{before} goes on after a stop token"
            assert completion.finish_reason == ("stop" if last < 10 else "length"), f"the last token is {last}"
            assert completion.finish_reason == "stop" or len(completion) == 12, "no stop token, and not max_new_tokens"
            assert len(completion.logprobs) == len(completion.versions) == len(completion), "one of each for each token"
            assert not completion.logprobs.is_inference(), "no loss takes inference tensors: clone them outside"

    def test_a_completion_ends_with_the_token_that_completes_one_of_its_texts(self, target: EngineTarget) -> None:
        engine, prompts, seeds = target.make(target.model(0), max_sequences=5), prompts_of(), range(16)
        engine.decode = write_pairs
        for sampling in SAMPLING.values():
            params = RequestParams(max_new_tokens=24, n=2, stop_token_ids=(3,), **sampling)
            try:
                completions = engine.generate(prompts, params, seeds)
            except ConfigError:
                assert params.filtered, "only top-k and top-p may be refused"
                continue
            try:
                stopped = engine.generate(prompts, replace(params, stop=TEXTS), seeds)
            except ConfigError as error:
                assert "texts" in str(error), "a refusal names what is refused"
                return
            for seed, (completion, cut) in enumerate(zip(completions, stopped, strict=True)):
                texts = [write_pairs(completion.token_ids[: count + 1].tolist()) for count in range(len(completion))]
                ends = [count + 1 for count, text in enumerate(texts) if any(stop in text for stop in TEXTS)]
                length = ends[0] if ends else len(completion)
                ids = cut.token_ids.tolist()
                assert ids == completion.token_ids[:length].tolist(), f"{ids} does not end with one of {TEXTS}"
                assert len(cut.logprobs) == len(cut.versions) == length, "one of each for each token"
                assert (cut.kept is None) == (completion.kept is None), "kept sets are lost"
                assert cut.kept is None or len(cut.kept.offsets) == length + 1, "one kept set for each token"
                assert cut.finish_reason == ("stop" if ends else completion.finish_reason)
                assert (cut.stop in TEXTS and cut.stop in texts[length - 1]) if ends else cut.stop == ""
                engine.submit(Request(id=seed, prompt=prompts[seed // 2], params=replace(params, stop=TEXTS),
                                      seed=seed, stream=seed % 2 == 0))  # fmt: skip
            for seed, events in drain(engine).items():
                check_same(completion_of(events[-1:]), stopped[seed], "asked for by itself")
                tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
                assert tokens == (stopped[seed].token_ids.tolist() if seed % 2 == 0 else []), "more than the completion"

    def test_ids_that_stand_for_no_text_are_never_drawn(self, target: EngineTarget) -> None:
        first, second = target.model(0), target.model(1)
        engine, without = target.make(copy.deepcopy(first)), [7, 20, *range(60, VOCABULARY)]
        engine.restrict(60, (7, 20))
        for version, model in enumerate((first, second)):
            if version:
                engine.refresh(1, dict(second.state_dict()))
            for number, sampling in enumerate(SAMPLING.values()):
                params = SamplingParams(max_new_tokens=12, **sampling)
                try:
                    completions = engine.generate(prompts_of(), params, range(8 * number, 8 * number + 8))
                except ConfigError:
                    assert params.filtered, "only top-k and top-p may be refused"
                    continue
                for prompt, completion in zip(prompts_of(), completions, strict=True):
                    ids = {*completion.token_ids.tolist()}
                    ids |= set() if completion.kept is None else {*completion.kept.ids.tolist()}
                    assert not ids & {*without}, f"{ids & {*without}} are drawn or kept, and text_ids leaves them out"
                    target.check({version: model}, prompt, completion, params, without)

    def test_the_next_turn_of_a_conversation_goes_on_after_the_first(self, target: EngineTarget) -> None:
        model = target.model(0)
        engine, prompt = target.make(copy.deepcopy(model)), prompts_of()[3] + prompts_of()[4]
        for turn in range(3):
            engine.submit(request(turn, prompt))
            completion = completion_of(drain(engine)[turn])
            target.check({0: model}, prompt, completion, PARAMS)
            prompt = [*prompt, *completion.token_ids.tolist(), 40 + turn, 50]

    def test_a_completion_that_another_engine_began_is_continued(self, target: EngineTarget) -> None:
        model, prompts = target.model(0), prompts_of()
        engine = target.make(copy.deepcopy(model))
        for name in ("plain", "top-k"):
            params = SamplingParams(max_new_tokens=12, stop_token_ids=(1, 2, 3), **SAMPLING[name])
            try:
                completions = engine.generate(prompts, params, range(8))
            except ConfigError:
                assert params.filtered, "only top-k and top-p may be refused"
                continue
            begun = {seed: cut(Drawn.of(completion), 2 * seed) for seed, completion in enumerate(completions) if seed}
            for seed, mine in enumerate(engine.generate(prompts, params, range(8), begun=begun)):
                ids, prefix_ids = mine.token_ids.tolist(), begun[seed].token_ids if seed else []
                assert ids[: len(prefix_ids)] == prefix_ids, "the tokens that were drawn before come first"
                assert len(ids) <= 12, "max_new_tokens counts the tokens that were drawn before"
                assert mine.finish_reason == ("stop" if ids[-1] in (1, 2, 3) else "length"), f"the last is {ids[-1]}"
                target.check({0: model}, prompts[seed], mine, params)

    # -- requests ----------------------------------------------------------------------------------------------------

    def test_what_is_drawn_so_far_begins_the_completion(self, target: EngineTarget) -> None:
        engine = target.make(target.model(0), max_sequences=4)
        for index, prompt in enumerate(prompts_of()):
            engine.submit(request(index, prompt))
        reported: list[tuple[Any, Drawn]] = []
        events: list[Event] = []
        for _ in range(6):
            events += engine.poll(timeout_s=0)
            reported += engine.drawn()
        done = drain(engine, events)
        for id, draft in reported:
            complete = Drawn.of(completion_of(done[id]))
            assert cut(complete, len(draft)) == draft, f"drawn() told {draft} of request {id}, which became {complete}"

    def test_requests_arrive_at_any_time_and_from_any_thread(self, target: EngineTarget) -> None:
        engine, gate = with_eventful_gate(target, target.model(0), max_sequences=4)
        prompts = prompts_of()
        expected = engine.generate(prompts, PARAMS, range(8))
        events: list[Event] = []
        for index in range(4):
            engine.submit(request(index, prompts[index]))
            events += engine.poll(timeout_s=0)

        def submit_late(*indices: int) -> None:
            for index in indices:
                call_in_thread(engine.submit, request(index, prompts[index]))

        gate.restart_count()
        gate.during[2] = lambda: submit_late(4, 5)
        gate.before[3] = lambda: submit_late(6, 7)
        beside = engine.generate(prompts, PARAMS, range(8))  # the events of the others are kept for poll
        done = drain(engine, events)
        for index in range(8):
            assert index in done, f"request {index} came while generate() was at work, and has no event"
            check_same(completion_of(done[index]), expected[index], "submitted while others were in flight")
            check_same(beside[index], expected[index], "generated while others were in flight")
        assert engine.poll() == engine.poll(timeout_s=0.01) == [], "events came although nothing was in flight"

    def test_streamed_tokens_are_those_of_the_completion(self, target: EngineTarget) -> None:
        engine = target.make(target.model(0))
        for index, prompt in enumerate(prompts_of()):
            engine.submit(request(index, prompt, stream=index % 2 == 0))
        for index, events in drain(engine).items():
            *tokens, last = events
            assert isinstance(last, Finished), f"the last event of a request is Finished, not {last}"
            streamed = [event for event in tokens if isinstance(event, Tokens)]
            assert len(streamed) == len(tokens), f"only Tokens come before the last event, not {tokens}"
            assert index % 2 == 0 or not tokens, "a request without stream got Tokens"
            if index % 2 == 0:
                completion = last.completion
                assert [token for event in streamed for token in event.token_ids] == completion.token_ids.tolist()
                logprobs = [logprob for event in streamed for logprob in event.logprobs]
                assert logprobs == pytest.approx(completion.logprobs.tolist())
                assert {event.version for event in streamed} == {0}, "Tokens have a version that the engine never had"

    def test_requests_of_a_higher_priority_begin_first(self, target: EngineTarget) -> None:
        engine = target.make(target.model(0), max_sequences=1)
        for index, priority in enumerate((0, 1, 5, 1, 0)):
            engine.submit(request(index, prompts_of()[index], priority=priority))
        assert list(drain(engine)) == [2, 1, 3, 0, 4], "begin a higher priority first, and equal ones as they came"

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
        done = drain(engine, first)
        assert set(done) == set(range(8)), f"events came for requests {sorted(done)} of 0 to 7"
        for index, events in done.items():
            if index in (0, begun):
                assert events == [Aborted(index)], f"Aborted is the only event of an aborted request, not {events}"
            else:
                check_same(completion_of(events), expected[index], "beside an aborted request")
        engine.submit(request(0, prompts[0]))
        check_same(completion_of(drain(engine)[0]), expected[0], "under the id of an aborted request")

    def test_an_aborted_request_draws_no_more_and_its_id_is_free(self, target: EngineTarget) -> None:
        engine, prompts = target.make(target.model(0), max_sequences=1), prompts_of()
        long, short = SamplingParams(max_new_tokens=90), SamplingParams(max_new_tokens=4)
        (expected,) = engine.generate([prompts[1]], short, [1])
        engine.submit(request("again", prompts[0], long, seed=0, stream=True))
        engine.poll(timeout_s=0)
        engine.abort("again")
        engine.submit(request("again", prompts[1], short, seed=1, stream=True))
        events: list[Event] = []
        for _ in range(20):  # each is one call of advance at most
            events += engine.poll(timeout_s=0)
        streamed = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        stale = "the second request of an id got events of the first, which was aborted: forget requests in drop(ids)"
        assert streamed == expected.token_ids.tolist()[: len(streamed)], stale
        reason = "4 tokens took over 20 calls of advance: a request that was aborted draws on; end it in drop(ids)"
        last = events[-1] if events else None
        assert isinstance(last, Finished), reason
        check_same(last.completion, expected, "under the id of an aborted request")

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
        assert set(drain(engine)) == {0}, "a request that was refused has no events"

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
        done = drain(engine)
        for index in safe:
            engine.submit(request(index, prompts[index]))
        after = drain(engine)
        for index in safe:
            check_same(completion_of(done[index]), healthy[index], "beside logits that are no numbers")
            check_same(completion_of(after[index]), healthy[index], "after logits that were no numbers")
            (failed,) = done[f"bad {index}"]
            assert isinstance(failed, Failed), f"logits that are no numbers must fail their request, not {failed}"
            assert isinstance(failed.error, GenerationError)
            assert f"request 'bad {index}'" in str(failed.error), "the error names the request"

    # -- weights -----------------------------------------------------------------------------------------------------

    def test_new_weights_are_drawn_from_and_named(self, target: EngineTarget) -> None:
        first, second, prompts = target.model(0), target.model(1), prompts_of()
        engine = target.make(first)
        before = copy.deepcopy(first)

        def check(version: int, model: Any) -> None:
            assert engine.version == version, f"refresh({version}) left version {engine.version}"
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

    def test_adapters_are_added_once_to_their_base_in_place_of_earlier_ones(self, target: EngineTarget) -> None:
        base, prompts = target.model(0), prompts_of()
        engine = target.make(target.model(1))
        engine.refresh(1, base.state_dict())
        embeddings = {id(base.get_input_embeddings().weight), id(base.get_output_embeddings().weight)}
        weights = {name: weight.detach().clone() for name, weight in base.named_parameters() if weight.ndim == 2
                   and id(weight) not in embeddings}  # fmt: skip
        for version, names in ((2, [*weights][::2]), (3, [*weights][1::2]), (4, [*weights])):
            adapters = [Adapter(name, f"{name}.down", f"{name}.up", scale=2.0) for name in [*weights]]
            tensors, expected = dict(weights), copy.deepcopy(base)
            for at, adapter in enumerate(adapters):
                rows, columns = weights[adapter.weight].shape
                source = torch.Generator().manual_seed(100 * version + at)
                matter = 1.0 if adapter.weight in names else 0.0
                tensors[adapter.down] = torch.randn(2, columns, generator=source)
                tensors[adapter.up] = torch.randn(rows, 2, generator=source) * 0.02 * matter
                with torch.no_grad():
                    expected.get_parameter(adapter.weight).add_(2.0 * tensors[adapter.up] @ tensors[adapter.down])
            with engine.gate.changing(version):
                engine.load_adapters(adapters, tensors)
                engine.loaded()
            for prompt, completion in zip(prompts, engine.generate(prompts, PARAMS, range(8)), strict=True):
                target.check({version: expected}, prompt, completion, PARAMS)

    def test_new_weights_may_come_while_requests_are_in_flight(self, target: EngineTarget) -> None:
        models = {version: target.model(version) for version in (0, 1)}
        engine, gate = with_eventful_gate(target, copy.deepcopy(models[0]), max_sequences=2)
        prompts = prompts_of()
        # Before the third pass: an engine that draws token by token has drawn some tokens of the first two requests. An
        # engine that draws a batch in a pass has drawn two batches of four.
        gate.before[3] = lambda: call_in_thread(engine.refresh, 1, models[1].state_dict())
        for index, prompt in enumerate(prompts):
            engine.submit(request(index, prompt))
        done = drain(engine)
        versions: list[int] = []
        for index, prompt in enumerate(prompts):
            completion = completion_of(done[index])
            target.check(models, prompt, completion, PARAMS)
            mine = completion.versions.tolist()
            assert mine == sorted(mine), f"the versions of a completion's tokens never fall: {mine}"
            versions += mine
        assert set(versions) == {0, 1}, (
            f"tokens are of versions {set(versions)}, and new weights came before the engine's third forward pass; run "
            "each forward pass, or each batch of at most max_sequences requests, within `with self.gate:`"
        )

    def test_weights_that_came_in_part_are_not_drawn_from(self, target: EngineTarget) -> None:
        model = target.model(0)
        engine, prompt = target.make(copy.deepcopy(model)), prompts_of()[0]
        with pytest.raises(OSError, match="cut"), engine.gate.changing(1):
            raise OSError("cut")
        engine.submit(request(0, prompt))
        ((failed,),) = drain(engine).values()
        assert isinstance(failed, Failed), "read the weights within `with self.gate:`, which refuses parts of weights"
        with pytest.raises(GenerationError, match=r"version 1 arrived only in part \(cut\)"):
            engine.generate([prompt], PARAMS, [0])
        engine.refresh(1, model.state_dict())
        (completion,) = engine.generate([prompt], PARAMS, [0])
        target.check({1: model}, prompt, completion, PARAMS)
