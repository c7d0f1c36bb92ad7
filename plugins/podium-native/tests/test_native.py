"""The native engine against a training forward pass, against ``generate``, and against itself in other batches."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import EngineConfig, Finished, Request, make_engine
from podium.rollout.sampling import SamplingParams
from podium_native import NativeEngine, cache, decoder, engine
from podium_native.decoder import Decoder
from tests.unit.rollout.engines.conftest import VOCABULARY, MakeModel, compute_trained_logprobs, same

DENSE = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
FAMILIES = [*DENSE, "qwen3_moe"]
SAMPLING = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"top_k": 7, "top_p": 0.95},
    "greedy": {"temperature": 0.0},
}
CASES = list(product(FAMILIES, SAMPLING))
STOPS = tuple(range(10))


def _native(model: Any, **changes: Any) -> NativeEngine:
    return NativeEngine(EngineConfig(name="native", **changes), model)


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "sampling"), CASES)
def test_logprobs_agree_with_a_training_forward(
    make_model: MakeModel, prompts: list[list[int]], family: str, sampling: str
) -> None:
    model = make_model(family)
    trained = copy.deepcopy(model)
    params = SamplingParams(max_new_tokens=20, n=2, stop_token_ids=STOPS[:2], **SAMPLING[sampling])
    completions = _native(model).generate(prompts, params, range(20))
    for index, completion in enumerate(completions):
        expected = compute_trained_logprobs(trained, prompts[index // 2], completion, params.temperature or 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-5
        assert (completion.kept is not None) == params.filtered


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "sampling"), CASES)
def test_same_seeds_give_what_generate_gives(
    make_model: MakeModel, prompts: list[list[int]], family: str, sampling: str
) -> None:
    model = make_model(family)
    params = SamplingParams(max_new_tokens=24, n=3, stop_token_ids=STOPS[:3], **SAMPLING[sampling])
    reference = make_engine(EngineConfig(name="transformers"), copy.deepcopy(model)).generate(
        prompts, params, range(30)
    )
    for mine, theirs in zip(_native(model).generate(prompts, params, range(30)), reference, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        assert (mine.logprobs - theirs.logprobs).abs().max() < 1e-5
        assert mine.finish_reason == theirs.finish_reason
        if mine.kept is not None and theirs.kept is not None:
            assert torch.equal(mine.kept.ids, theirs.kept.ids)
            assert torch.equal(mine.kept.offsets, theirs.kept.offsets)


@pytest.mark.everyday("qwen3", "smollm3")
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_within_its_rounding(make_model: MakeModel, prompts: list[list[int]], family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    completions = _native(model).generate(prompts, SamplingParams(max_new_tokens=20, n=4), range(40))
    trained, true = (
        torch.cat(
            [compute_trained_logprobs(m, prompts[i // 4], completion, 1.0) for i, completion in enumerate(completions)]
        )
        for m in (model, exact)
    )
    mine = torch.cat([completion.logprobs for completion in completions])
    assert (mine - trained).abs().max() < (2e-2 if family in DENSE else 1e-1)  # rounding may choose another expert
    assert (mine - true).abs().mean() < 1.2 * (trained - true).abs().mean()  # rounds no more than training does


@pytest.mark.everyday("qwen3", "llama")
@pytest.mark.parametrize("family", DENSE)  # an expert's product has as many rows as tokens chose the expert
def test_a_completion_does_not_depend_on_its_batch(
    make_model: MakeModel, prompts: list[list[int]], family: str
) -> None:
    model = make_model(family)
    params = SamplingParams(max_new_tokens=40, n=4, stop_token_ids=STOPS)
    seeds = [seed * 7919 for seed in range(40)]
    together = _native(model).generate(prompts, params, seeds)
    assert len({len(completion) for completion in together}) > 5  # the refill and shrink paths are taken

    alone = SamplingParams(max_new_tokens=40, stop_token_ids=STOPS)
    engine_alone = _native(model)
    for index in (0, 13, 39):
        assert same(engine_alone.generate([prompts[index // 4]], alone, [seeds[index]]), [together[index]])

    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [seeds[4 * i + j] for i in order for j in range(4)]
    permuted = _native(model, max_sequences=18).generate([prompts[i] for i in order], params, shuffled)
    assert same(permuted, [together[4 * i + j] for i in order for j in range(4)])


@pytest.mark.everyday("5", "17")
@pytest.mark.parametrize("slots", [1, 5, 16, 17])
def test_finished_slots_are_refilled(make_model: MakeModel, prompts: list[list[int]], slots: int) -> None:
    model = make_model("qwen3")
    params = SamplingParams(max_new_tokens=30, n=3, stop_token_ids=STOPS, top_k=40)
    everything = _native(model).generate(prompts, params, range(30))
    assert same(_native(model, max_sequences=slots).generate(prompts, params, range(30)), everything)


def test_a_prompt_goes_through_the_model_once_for_all_its_completions(
    make_model: MakeModel, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_new_tokens=12, n=8, stop_token_ids=STOPS)
    native = _native(make_model("llama"), max_sequences=20, options={"prefill_tokens": 64})
    assert len(native.generate(prompts, params, range(80))) == 80
    assert native.prefilled_tokens == sum(map(len, prompts))


def test_steps_run_only_for_rows_that_are_alive(
    make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    decode = Decoder.decode

    def counting(self: Decoder, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return decode(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "decode", counting)
    params = SamplingParams(max_new_tokens=60, n=8, stop_token_ids=STOPS)
    completions = _native(make_model("qwen3"), max_sequences=80).generate(prompts, params, range(80))
    assert rows[0] == 80
    assert rows[-1] == 16
    assert len(rows) == max(map(len, completions)) - 1
    assert sum(rows) < 1.6 * sum(map(len, completions)) + 16 * 60


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_cuda_layout_of_the_cache_gives_the_same(
    make_model: MakeModel, prompts: list[list[int]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    params = SamplingParams(max_new_tokens=30, n=3, stop_token_ids=STOPS)
    expected = _native(model, max_sequences=20).generate(prompts, params, range(30))
    monkeypatch.setattr(engine, "cache_class", lambda _: cache.SdpaCache)
    got = _native(model, max_sequences=20).generate(prompts, params, range(30))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        assert (mine.logprobs - theirs.logprobs).abs().max() < 1e-5


def test_looking_for_stop_tokens_less_often_changes_nothing(
    make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3")
    params = SamplingParams(max_new_tokens=30, n=3, stop_token_ids=STOPS, top_k=50)
    expected = _native(model, max_sequences=16).generate(prompts, params, range(30))
    monkeypatch.setattr("podium_native.lanes._STEPS_BETWEEN_LOOKS", {})
    assert same(_native(model, max_sequences=16).generate(prompts, params, range(30)), expected)


def test_stop_tokens_end_a_completion_and_belong_to_it(make_model: MakeModel, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=15, n=4, stop_token_ids=STOPS)
    reasons = set()
    for completion in _native(make_model("qwen3")).generate(prompts, params, range(40)):
        *before, last = completion.token_ids.tolist()
        reasons.add(completion.finish_reason)
        assert not set(before) & set(STOPS)
        assert (completion.finish_reason == "stop") == (last in STOPS)
        assert completion.finish_reason == "stop" or len(completion) == 15
        assert not completion.token_ids.is_inference()
        assert not completion.logprobs.is_inference()
        assert completion.token_ids.untyped_storage().nbytes() == 8 * len(completion)  # no view of the whole call
    assert reasons == {"stop", "length"}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda_logprobs_agree_with_a_training_forward(
    make_model: MakeModel, prompts: list[list[int]], family: str
) -> None:
    model = make_model(family).cuda()
    params = SamplingParams(max_new_tokens=12, n=4, temperature=0.7, stop_token_ids=STOPS)
    completions = _native(copy.deepcopy(model), max_sequences=20).generate(prompts, params, range(40))
    for index, completion in enumerate(completions):
        expected = compute_trained_logprobs(model, prompts[index // 4], completion, 0.7)
        assert (completion.logprobs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("stops", [(), tuple(range(VOCABULARY))])
def test_one_token_each(make_model: MakeModel, prompts: list[list[int]], stops: tuple[int, ...]) -> None:
    new_tokens = 1 if not stops else 9
    params = SamplingParams(max_new_tokens=new_tokens, n=3, stop_token_ids=stops)
    completions = _native(make_model("qwen3"), max_sequences=4).generate(prompts, params, range(30))
    assert [len(completion) for completion in completions] == [1] * 30


@pytest.mark.parametrize("family", ["mistral", "smollm3"])
def test_later_turns_read_no_further_back_than_a_window(make_model: MakeModel, family: str) -> None:
    model = make_model(family)
    native, prompt = _native(model), [7, 3, 9] * 8
    for turn in range(3):  # each prompt extends what the engine holds
        native.submit(Request(id=turn, prompt=prompt, params=SamplingParams(max_new_tokens=14), seed=turn))
        (event,) = native.poll()
        assert isinstance(event, Finished)
        expected = compute_trained_logprobs(model, prompt, event.completion, 1.0)
        assert (event.completion.logprobs - expected).abs().max() < 1e-5
        prompt = [*prompt, *event.completion.token_ids.tolist(), 11, 12]
    assert native.prefilled_tokens == 24 + 2 * 3


def test_other_lengths_in_later_calls(make_model: MakeModel, prompts: list[list[int]]) -> None:
    model = make_model("llama")
    native = _native(model)
    long = SamplingParams(max_new_tokens=70, n=2)
    short = SamplingParams(max_new_tokens=3)
    first = native.generate(prompts, long, range(20))
    assert same(native.generate(prompts[:2], short, range(2)), _native(model).generate(prompts[:2], short, range(2)))
    assert same(native.generate(prompts, long, range(20)), first)
    native.release()
    assert same(native.generate(prompts, long, range(20)), first)
    assert native.generate([], long, []) == []


def test_fewer_slots_where_memory_is_short(make_model: MakeModel, prompts: list[list[int]]) -> None:
    model = make_model("qwen3")
    params = SamplingParams(max_new_tokens=30, n=4)
    position = 2 * 2 * 2 * 32 * 4  # keys and values, layers, kv heads, head_dim, float32
    tight = _native(model, cache_gib=20 * 64 * position / 2**30)
    assert same(tight.generate(prompts, params, range(40)), _native(model).generate(prompts, params, range(40)))
    assert tight._lanes.cache is not None
    assert tight._lanes.cache.lanes == 16
    with pytest.raises(ConfigError, match=r"cache_gib.* too little"):
        _native(model, cache_gib=1e-4).generate(prompts, params, range(40))


def test_a_broken_model_is_named(make_model: MakeModel, prompts: list[list[int]]) -> None:
    model = make_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(GenerationError, match="token 0 of completion 0 of prompt 0 is nan"):
        _native(model).generate(prompts, SamplingParams(max_new_tokens=4), range(10))


@pytest.mark.parametrize(
    ("prompt", "seeds", "message"),
    [
        ([], 1, "prompt 1 is empty"),
        ([1, VOCABULARY], 1, f"prompt 1 has token {VOCABULARY}, outside"),
        ([1, -2], 1, "prompt 1 has token -2, outside"),
        ([1] * 120, 1, "prompt 1 has 120 tokens.* exceeds the model's 128 positions"),
        ([1], 2, "2 prompts with n=1 need 2 seeds.* got 3"),
    ],
)
@pytest.mark.parametrize("name", ["native", "transformers"])
def test_wrong_requests_are_named(
    make_model: MakeModel, name: Any, prompt: list[int], seeds: int, message: str
) -> None:
    made = make_engine(EngineConfig(name=name), make_model("qwen3"))
    with pytest.raises(ConfigError, match=message):
        made.generate([[1, 2], prompt], SamplingParams(max_new_tokens=10), range(seeds + 1))


@pytest.mark.parametrize("name", ["native", "transformers"])
def test_an_output_layer_in_float32_rounds_no_logits(
    make_model: MakeModel, prompts: list[list[int]], name: str
) -> None:
    """Under weights in bfloat16 the log-probability is that of the hidden state that the layer read."""
    model = make_model("qwen2").bfloat16().requires_grad_(False)
    states, apart = list[torch.Tensor](), dict[bool, float]()

    def remember(hidden: torch.Tensor, dense: Any) -> torch.Tensor:
        states.append(hidden.float())
        return apply(hidden, dense)

    apply = decoder.multiply
    for wide in (False, True):
        made = make_engine(EngineConfig(name=name, options={"float32_output": wide}), model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "multiply", remember)
            hook = model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0][:, -1].float()))
            made.submit(Request(id="one", prompt=tuple(prompts[0]), params=SamplingParams(max_new_tokens=1), seed=1))
            (done,) = made.poll()
            assert isinstance(done, Finished)
            hook.remove()
        logits = states[-1][:1].double() @ model.lm_head.weight.double().T
        expected = logits.log_softmax(-1)[0, int(done.completion.token_ids[0])]
        apart[wide] = abs(float(expected) - float(done.completion.logprobs[0]))
    assert apart[True] < 1e-6
    assert apart[False] > 1e-5


@pytest.mark.parametrize("family", DENSE)
def test_requests_that_need_no_bits_are_drawn_in_fewer_rows(
    make_model: MakeModel, prompts: list[list[int]], family: str
) -> None:
    """One to four of them take as many rows as they are; one request beside them that is exact has all its bits."""
    made, params = _native(make_model(family)), SamplingParams(max_new_tokens=12)
    rows: list[int] = []
    decode = decoder.Decoder.decode

    def count_rows(self: Any, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return decode(self, tokens, *args)

    def draw(count: int, *, exact: bool, also_exact: bool = False) -> list[Any]:
        rows.clear()
        for number in range(count):
            made.submit(Request(id=number, prompt=prompts[number], params=params, seed=number, exact=exact,
                                reuse_completions=False))  # fmt: skip
        if also_exact:
            made.submit(Request(id="exact", prompt=prompts[9], params=params, seed=9, reuse_completions=False))
        events: dict[Any, Any] = {}
        while len(events) < count + also_exact:
            for event in made.poll():
                assert isinstance(event, Finished), event
                events[event.id] = event.completion
        return [events[name] for name in sorted(events, key=str)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.Decoder, "decode", count_rows)
        for count, expected in ((1, 1), (2, 2), (4, 4), (5, 16)):
            loose = draw(count, exact=False)
            assert {*rows} == {expected}
            strict = draw(count, exact=True)
            assert {*rows} == {16}
            for mine, right in zip(loose, strict, strict=True):
                assert torch.equal(mine.token_ids, right.token_ids)
                assert torch.allclose(mine.logprobs, right.logprobs, atol=1e-5)
        (alone,) = draw(0, exact=True, also_exact=True)
        *_, beside = draw(2, exact=False, also_exact=True)
        assert {*rows} == {16}
    assert same([beside], [alone])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_free_lane_writes_no_nan(make_model: MakeModel, family: str) -> None:
    """A lane stands behind a long text, while others decode short ones that its window does not reach."""
    made = _native(make_model(family))
    long, short = list(range(1, 20)) * 5, [4, 5]
    for prompts in ([long] * 16, [short], [long, short] * 8):
        for completion in made.generate(prompts, SamplingParams(max_new_tokens=8), range(len(prompts))):
            assert completion.logprobs.isfinite().all()
