"""Masks and biases of single requests: what is drawn under them, and what a trainer makes of the record."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.data.masks import mask_columns, pack_ids, unpack_masks
from podium.errors import ConfigError, DataError, GenerationError
from podium.rollout.engines import EngineConfig, Failed, Request, make_engine
from podium.rollout.sampling import Completion, RequestParams, SamplingParams
from podium.training.micro_batches import cut
from podium.training.scoring import score_tokens
from podium_agents.service.constraints import Constraint
from podium_testing.engines import (
    VOCABULARY,
    completion_of,
    compute_trained_logprobs,
    drain,
    prompts_of,
    request,
    tiny_model,
)

ENGINES = ("native", "transformers")
STOP = 3


class Residues:
    """A grammar: the ids go through all residues of ``modulus``, one after the other, and may end after ``least``."""

    def __init__(self, modulus: int, least: int = 4, dead: int | None = None, stuck: int | None = None) -> None:
        self.modulus, self.least, self.dead, self.stuck = modulus, least, dead, stuck

    def begin(self, stop_token_ids: Sequence[int]) -> _Counting:
        return _Counting(self, stop_token_ids)


class _Counting:
    def __init__(self, grammar: Residues, stops: Sequence[int]) -> None:
        self.grammar, self.stops, self.ids = grammar, stops, list[int]()

    def allowed(self) -> bytes:
        count, grammar = len(self.ids), self.grammar
        if count == grammar.dead:
            raise GenerationError("nothing goes on here")
        ids = {id for id in range(VOCABULARY) if id % grammar.modulus == count % grammar.modulus} - {*self.stops}
        return pack_ids(ids | ({*self.stops} if count >= grammar.least else set()), VOCABULARY)

    def accept(self, token_id: int) -> None:
        assert token_id in ids_of(self.allowed()), f"{token_id} was drawn after {self.ids}"
        if len(self.ids) == self.grammar.stuck:
            raise GenerationError("nothing goes on here")
        self.ids.append(token_id)


def ids_of(mask: bytes) -> set[int]:
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)[None]
    return {*unpack_masks(packed, VOCABULARY)[0].nonzero()[:, 0].tolist()}


def engine_over(name: str, model: Any, **config: Any) -> Any:
    return make_engine(EngineConfig(name=name, **config), model)


def params(**values: Any) -> SamplingParams:
    kind = RequestParams if "min_p" in values else SamplingParams
    return kind(**{"max_new_tokens": 14, "stop_token_ids": (STOP,), **values})


CONSTRAINTS = {
    "ban": Constraint(banned=(5, 9, 40)),
    "only": Constraint(only=(STOP, 7, 11, 12, 60)),
    "bias": Constraint(bias={4: 3.0, 50: -2.5, 96: 5.0}),
    "grammar": Constraint(grammar=Residues(3)),
    "all": Constraint(grammar=Residues(2), banned=(8, 20), bias={10: 2.0}),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "min-p": {"min_p": 0.2},
    "min-p and top-k": {"min_p": 0.05, "top_k": 9, "top_p": 0.9},
}


def requests_of(prompts: Sequence[Sequence[int]]) -> list[Request]:
    found: list[Request] = []
    for constraint in (None, *CONSTRAINTS.values()):
        for sampling in SAMPLING.values():
            number = len(found)
            prompt = prompts[number % len(prompts)]
            found.append(request(number, prompt, params(**sampling), constraint=constraint))
    return found


def as_batch(prompt: Sequence[int], completion: Completion, temperature: float) -> Batch:
    """What a session's row becomes."""
    count, start = len(completion), len(prompt)
    tokens = Jagged.from_rows([torch.cat([torch.tensor(prompt), completion.token_ids])])
    columns: dict[str, Any] = {
        fields.TOKENS: tokens,
        fields.LOSS_MASK: tokens.like(torch.arange(start + count) >= start),
    }
    if completion.kept is not None:
        sizes = torch.cat([torch.zeros(start, dtype=torch.int64), completion.kept.offsets.diff()])
        columns |= {fields.KEPT_SIZES: tokens.like(sizes), fields.KEPT_IDS: Jagged.from_rows([completion.kept.ids])}
    else:
        columns |= mask_columns([[b""] * start + list(completion.masks or [b""] * count)], tokens)
    return Batch(columns, {"temperature": temperature})


def trained(model: Any, batch: Batch) -> Tensor:
    (micro,) = cut(batch, 1000, packed=False)
    with torch.no_grad():
        return score_tokens(model, batch, micro).logprobs


def drawn(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    engine.submit(*requests)
    done = drain(engine)
    return [completion_of(done[one.id]) for one in requests]


@pytest.mark.everyday("0-native", "0-transformers")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_the_trainer_gives_each_token_the_logprob_it_was_drawn_with(name: str, seed: int) -> None:
    model, requests = tiny_model(seed), requests_of(prompts_of())
    unmasked_differs = 0
    for one, completion in zip(requests, drawn(engine_over(name, copy.deepcopy(model)), requests), strict=True):
        if isinstance(one.constraint, Constraint) and one.constraint.bias:
            continue  # training refuses it
        batch = as_batch(one.prompt, completion, one.params.temperature)
        assert (trained(model, batch) - completion.logprobs).abs().max() <= 1e-5, (one.params, one.constraint)
        assert (completion.masks is not None) == (one.constraint is not None)
        assert (completion.kept is not None) == one.params.filtered
        if completion.masks is not None and completion.kept is None:
            bare = batch.select(fields.TOKENS, fields.LOSS_MASK)
            unmasked_differs += bool((trained(model, bare) - completion.logprobs).abs().max() > 1e-3)
    assert unmasked_differs >= 8, "a trainer that knows no masks must be seen"


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_drawn_lies_within_the_recorded_masks(name: str) -> None:
    requests = requests_of(prompts_of())
    for one, completion in zip(requests, drawn(engine_over(name, tiny_model(1)), requests), strict=True):
        ids = completion.token_ids.tolist()
        grammar = one.constraint.grammar if isinstance(one.constraint, Constraint) else None
        guide = grammar.begin((STOP,)) if grammar else None
        for position, token in enumerate(ids):
            mask = None if completion.masks is None else ids_of(completion.masks[position])
            assert mask is None or token in mask
            if guide is not None:
                assert mask is not None
                assert mask == ids_of(guide.allowed()) - {*one.constraint.banned}  # type: ignore[union-attr]
                guide.accept(token)  # type: ignore[attr-defined]
            if completion.kept is not None and mask is not None:
                assert {*completion.kept.at(position).tolist()} <= mask
        if guide is not None:
            assert completion.finish_reason == ("stop" if ids[-1] == STOP else "length")
            assert len(ids) > 4 or ids[-1] != STOP


@pytest.mark.parametrize("name", ENGINES)
def test_a_bias_and_min_p_give_the_distribution_that_they_mean(name: str) -> None:
    model, prompt = tiny_model(2), prompts_of()[0]
    bias = {4: 3.0, 50: -2.5, 96: 5.0}
    asked = request(1, prompt, params(temperature=0.8, min_p=0.1, max_new_tokens=1), constraint=Constraint(bias=bias))
    (completion,) = drawn(engine_over(name, copy.deepcopy(model)), [asked])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    for token, value in bias.items():
        logits[token] += value
    probabilities = (logits / 0.8).softmax(0)
    inside = probabilities >= 0.1 * probabilities.max()
    assert completion.kept is not None
    assert sorted(completion.kept.at(0).tolist()) == inside.nonzero()[:, 0].tolist()
    share = probabilities[completion.token_ids[0]] / probabilities[inside].sum()
    assert float(completion.logprobs[0]) == pytest.approx(float(share.log()), abs=1e-5)


@pytest.mark.everyday("native")
@pytest.mark.parametrize("name", ENGINES)
def test_seeded_results_do_not_depend_on_what_is_drawn_beside_them(name: str) -> None:
    requests = requests_of([prompts_of()[3]])
    together = drawn(engine_over(name, tiny_model(0)), requests)
    crowded = drawn(engine_over(name, tiny_model(0), max_sequences=16), list(reversed(requests)))
    alone = engine_over(name, tiny_model(0))
    for one, mine, theirs in zip(requests, together, reversed(crowded), strict=True):
        (single,) = drawn(alone, [one])
        for other in (single, theirs):
            assert other.token_ids.tolist() == mine.token_ids.tolist()
            assert other.masks == mine.masks
            assert torch.allclose(other.logprobs, mine.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_without_a_way_on_fails_its_own_request_alone(name: str, stream: bool) -> None:
    engine = engine_over(name, tiny_model(0))
    grammars = [Residues(3, dead=0), Residues(3, dead=2), Residues(3, stuck=0), Residues(3, stuck=3)]
    dead = [
        request(number, prompts_of()[number], constraint=Constraint(grammar=grammar), stream=stream)
        for number, grammar in enumerate(grammars)
    ]
    fine = request(9, prompts_of()[3])
    engine.submit(*dead, fine)
    done = drain(engine)
    for one in dead:
        last = done[one.id][-1]
        assert isinstance(last, Failed)
        assert "nothing goes on here" in str(last.error)
    assert (
        completion_of(done[9]).token_ids.tolist()
        == drawn(engine_over(name, tiny_model(0)), [fine])[0].token_ids.tolist()
    )
    (again,) = drawn(engine, [request(10, prompts_of()[0], constraint=CONSTRAINTS["grammar"])])
    assert len(again) > 4


def test_a_mask_that_allows_nothing_is_an_error_and_no_nan() -> None:
    engine = engine_over("native", tiny_model(0))
    impossible = Constraint(grammar=Residues(2), only=(5,))  # the first id has residue 0
    engine.submit(request(1, prompts_of()[0], constraint=impossible))
    (last,) = drain(engine)[1]
    assert isinstance(last, Failed)
    assert "no token is allowed here" in str(last.error)


def test_masks_go_on_with_new_weights() -> None:
    first, second = tiny_model(0), tiny_model(1)
    engine = engine_over("native", copy.deepcopy(first))
    asked = request(1, prompts_of()[2], params(max_new_tokens=40), constraint=Constraint(grammar=Residues(3, least=99)))
    engine.submit(asked)
    for _ in range(5):
        engine.poll(timeout_s=0)
    engine.refresh(1, dict(second.state_dict()))
    completion = completion_of(drain(engine)[1])
    assert {*completion.versions.tolist()} == {0, 1}
    for version, model in enumerate((first, second)):
        expected = compute_trained_logprobs(model, asked.prompt, completion, 1.0)
        assert ((completion.logprobs - expected).abs()[completion.versions == version] <= 1e-5).all()
    assert all(token % 3 == at % 3 for at, token in enumerate(completion.token_ids.tolist()))


def test_an_engine_that_records_no_masks_refuses_them() -> None:
    engine = engine_over("native", tiny_model(0))
    type(engine).constrains, before = False, type(engine).constrains
    try:
        changes: dict[str, Any]
        for changes in ({"constraint": CONSTRAINTS["ban"]}, {"params": params(min_p=0.1)}):
            with pytest.raises(ConfigError, match=r"use engine\.name native or transformers"):
                engine.submit(request(1, [5], **changes))
    finally:
        type(engine).constrains = before


def test_columns_of_masks_survive_a_choice_of_rows_and_say_when_they_do_not_fit() -> None:
    model, prompt = tiny_model(0), prompts_of()[0]
    engine = engine_over("native", copy.deepcopy(model))
    asked = [request(n, prompt, params(), constraint=list(CONSTRAINTS.values())[n % 2 * 3]) for n in range(4)]
    completions = drawn(engine, asked)
    whole = Batch.concat([as_batch(prompt, completion, 1.0) for completion in completions])
    for rows in ([2, 0], [1], [3, 2, 1]):
        (micro,) = cut(part := whole.take(torch.tensor(rows)), 1000, packed=False)
        with torch.no_grad():
            scores = score_tokens(model, part, micro).logprobs
        per_token = dict(zip(micro.index.tolist(), scores.tolist(), strict=True))
        offsets = part.jagged(fields.TOKENS).offsets.tolist()
        for place, row in enumerate(rows):
            for at, value in enumerate(completions[row].logprobs.tolist()):
                assert per_token[offsets[place] + len(prompt) + at] == pytest.approx(value, abs=1e-5)
    other = whole.with_columns({fields.MASK_BITS: Jagged.from_rows([torch.zeros(5, dtype=torch.uint8)] * 4)})
    (micro,) = cut(other, 1000, packed=False)
    with pytest.raises(DataError, match="mask_bits has rows of"):
        score_tokens(model, other, micro)
