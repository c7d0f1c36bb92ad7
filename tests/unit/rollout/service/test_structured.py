"""Structured output: random models and schemas, three kinds of tokenizers, and what a trainer makes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.models import char_tokenizer
from podium.rollout.sampling import SamplingParams
from podium_agents.service.grammars import Grammars, token_bytes
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.service import Answer, Service
from tests.unit.rollout.service.engine import random_service
from tests.unit.rollout.service.scripted import USER
from tests.unit.rollout.service.spelling import KINDS, make_tokenizer
from tests.unit.rollout.service.test_masked_requests import recorded_logprobs, trained_logprobs

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "né"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "out", "schema": schema, "strict": True}}


def answers(service: Service, *requests: dict[str, Any]) -> list[Answer]:
    """The answers to requests that are drawn together."""

    async def ask() -> list[Answer]:
        asked = [service.chat(ChatRequest(**{"messages": [USER], "max_tokens": 400, **r})) for r in requests]
        return await asyncio.gather(*map(service.answer, asked))

    return asyncio.run(ask())


def refusal(service: Service, **request: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        answers(service, request)
    return refused.value


def random_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 5},
        {"type": "integer", "minimum": -20, "maximum": 5000},
        {"type": "boolean"},
        {"enum": ["yes", "no", 3, None]},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"const": {"fixed": [1]}},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    ]
    if not depth or dice.random() < 0.3:
        return dice.choice(leaves)
    if dice.random() < 0.3:
        return {"type": "array", "items": random_schema(dice, depth - 1), "minItems": 1, "maxItems": 3}
    names = dice.sample(["place", "n", "x y", 'quote"d', "deep"], 3)
    properties = {name: random_schema(dice, depth - 1) for name in names}
    required = names[: dice.randrange(4)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.everyday("bytes-transformers", "pieces-native")
@pytest.mark.parametrize(
    ("kind", "name"),
    list(itertools.product(KINDS, ("native", "transformers"))),
)
def test_every_finished_answer_is_what_its_schema_says_however_it_is_batched(kind: str, name: str) -> None:
    service, dice = random_service(make_tokenizer(kind), name=name), random.Random(kind)
    schemas = [random_schema(dice) for _ in range(6)]
    requests = [{"response_format": json_schema(schema), "seed": at} for at, schema in enumerate(schemas)]
    together = answers(service, *requests)
    for schema, answer in zip(schemas, together, strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message["content"]), schema)
    assert sum(answer.finish_reason == "stop" for answer in together) >= 3
    for at in (0, 3):
        (alone,) = answers(service, requests[at])
        assert (alone.message, alone.sampled.ids) == (together[at].message, together[at].sampled.ids)


RULES: dict[str, Any] = {"characters": {}, "bytes": {"temperature": 0.7}, "pieces": {"top_k": 12}}


@pytest.mark.everyday("pieces-rules8")
@pytest.mark.parametrize(("kind", "rules"), list(itertools.product(KINDS, RULES.values())))
def test_the_trainer_agrees_with_the_wire_under_every_schema(kind: str, rules: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=120, stop_token_ids=(), **rules)
    dice, differs = random.Random(kind), 0
    for seed in range(3):
        service = random_service(make_tokenizer(kind), seed=seed, rules=params)
        service.open_session("s", seed=seed)

        async def talk(service: Service = service) -> None:
            messages: list[Any] = []
            for _ in range(3):
                messages.append(USER)
                wish: dict[str, Any] = {}
                if dice.random() < 0.8:
                    wish["response_format"] = json_schema(random_schema(dice))
                answer = await service.answer(service.chat(ChatRequest(messages=messages, **wish), "s"))
                messages.append(dict(answer.message))

        asyncio.run(talk())
        session = service.close_session("s")
        assert session is not None
        for row in session.rows:
            kept = bool(rules.get("top_k"))
            got = trained_logprobs(service, row, params.temperature, kept=kept)
            assert got == pytest.approx(recorded_logprobs(row), abs=1e-5)
            bare = trained_logprobs(service, row, params.temperature, masked=False, kept=False)
            differs += bare != pytest.approx(recorded_logprobs(row), abs=1e-3)
    assert differs >= 2, "a trainer that knows no masks must be seen"


@pytest.mark.everyday("bytes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_regex_a_choice_and_a_grammar_over_text_and_ids(kind: str) -> None:
    service = random_service(make_tokenizer(kind))
    wishes = {
        "regex": (r"[0-9]{2,4}(/[a-z]{1,9})?", re.compile(r"[0-9]{2,4}(/[a-z]{1,9})?")),
        "choice": (["yes", "no", 'it "is"', "né"], re.compile('yes|no|it "is"|né')),
        "grammar": ('start: "a" part*\npart: "b" /[0-9]/', re.compile(r"a(b[0-9])*")),
        "json": (json.dumps({"type": "integer"}), re.compile(r"-?[0-9]+")),
        "json_object": (True, re.compile(r"\{.*\}", re.DOTALL)),
    }
    if kind == "characters":
        wishes["choice"] = (["yes", "no", 'it "is"'], re.compile('yes|no|it "is"'))
    for name, (value, pattern) in wishes.items():
        drawn = answers(service, *({"structured_outputs": {name: value}, "seed": seed} for seed in range(4)))
        finished = [answer.message["content"] for answer in drawn if answer.finish_reason == "stop"]
        assert all(pattern.fullmatch(text) for text in finished), (name, finished)
        assert finished or name == "json_object"


def test_an_answer_that_is_cut_off_says_so_and_a_finished_one_has_only_the_stop_left() -> None:
    tokenizer = make_tokenizer("bytes")
    service = random_service(tokenizer)
    (cut,) = answers(service, {"response_format": json_schema(PERSON), "max_tokens": 6})
    assert (cut.finish_reason, len(cut.sampled.ids)) == ("length", 6)
    (whole,) = answers(service, {"structured_outputs": {"choice": ["yes"]}})
    assert (whole.message["content"], whole.finish_reason) == ("yes", "stop")
    assert whole.sampled.ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert whole.sampled.logprobs[-1] == 0, "nothing else was left to draw"
    (plain,) = answers(service, {"response_format": {"type": "text"}, "max_tokens": 5})
    assert plain.sampled.masks is None


EMPTY = {"type": "integer", "minimum": 5, "maximum": 3}
MANY = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}}
SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("request_fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type = 'xml': this service knows text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing"),
        ({"response_format": json_schema([])}, f"{SCHEMA}: a JSON schema is an object"),
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": {"items": {"type": "foo"}}}})},
            f"{SCHEMA}.properties.a.items: Invalid type: foo",
        ),
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": {"not": {"type": "null"}}}})},
            f'{SCHEMA}.properties.a: Unimplemented keys: ["not"]',
        ),
        (
            {"response_format": json_schema({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]})},
            f"{SCHEMA}.anyOf.1: Pointer '/$defs/x' does not exist",
        ),
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": EMPTY}, "required": ["a"]})},
            f"{SCHEMA}.properties.a: Unsatisfiable schema: minimum (5) is greater than maximum (3)",
        ),
        ({"response_format": json_schema(False)}, f"{SCHEMA}: Unsatisfiable schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: invalid regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is a list of texts"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of these"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern: this service"),
        ({"structured_outputs": {"grammar": "begin: /a/"}}, "structured_outputs.grammar: "),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "both name a form"),
        ({"structured_outputs": {"choice": ["né"]}}, "structured_outputs.choice: the vocabulary has no tokens for"),
        (
            {"response_format": json_schema({"type": "object", "properties": {"a": {"enum": ["b", "é"]}}})},
            f"{SCHEMA}.properties.a.enum.1: the vocabulary has no tokens for '\"é\"'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(request_fields: dict[str, Any], said: str) -> None:
    refused = refusal(random_service(make_tokenizer("characters")), **request_fields)
    assert (refused.status, said in refused.message) == (400, True), refused.message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.everyday("counts", "deep")
@pytest.mark.parametrize(
    "request_fields",
    [
        {"structured_outputs": {"regex": "(a{1000}){1000}"}},
        {"response_format": json_schema(nested(400))},
        *(
            {"structured_outputs": {"regex": "((a?){100}a{100}){50}"}},
            {"response_format": json_schema({"enum": [f"value {n}" * 4 for n in range(20_000)]})},
            {"response_format": json_schema(MANY)},
        ),
    ],
    ids=["counts", "deep", "optional", "enum", "properties"],
)  # fmt: skip
def test_a_hostile_schema_is_refused_and_others_are_answered_meanwhile(request_fields: dict[str, Any]) -> None:
    service = random_service(make_tokenizer("bytes"))
    order: list[str] = []

    async def hostile() -> None:
        with pytest.raises(Refusal):
            await service.answer(service.chat(ChatRequest(messages=[USER], **request_fields)))
        order.append("hostile")

    async def both() -> None:
        first = asyncio.create_task(hostile())
        await asyncio.sleep(0)
        await service.answer(service.chat(ChatRequest(messages=[USER], max_tokens=5)))
        order.append("other")
        await first

    asyncio.run(both())
    assert sorted(order) == ["hostile", "other"]
    if "regex" in str(request_fields):
        assert order == ["other", "hostile"], "what takes seconds keeps nobody else waiting"


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    refused = refusal(random_service(make_tokenizer("bytes")), response_format={"type": "json_object"})
    assert "structured output needs llguidance, which is not installed: pip install" in refused.message
    (answer,) = answers(random_service(make_tokenizer("bytes")), {"max_tokens": 3})
    assert len(answer.sampled.ids) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    tokens = token_bytes(tokenizer)
    for text in ('{"name": "look"}', "the fox, 12", "né  日本 x" if kind != "characters" else "x  y"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokens[token_id] for token_id in ids).decode().strip() == text
    assert not any(tokens[token_id] for token_id in tokenizer.all_special_ids)


def test_a_vocabulary_that_ends_amid_the_grammar_is_an_error_and_no_end() -> None:
    with pytest.raises(ConfigError, match="the vocabulary has no tokens for"):
        Grammars(char_tokenizer("ab")).compile('start: "abc"')
    guide = Grammars(char_tokenizer("abx")).compile('start: "a" ("bcd" | "x")').begin((2,))
    guide.accept(4)
    assert guide.allowed()[0] >> 5 & 1 or guide.allowed()[0] >> 6 & 1


def test_requests_that_want_the_same_grammar_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service, trials = random_service(make_tokenizer("bytes")), list[Any]()
    find_errors = Grammars.find_errors

    def count(grammars: Grammars, texts: Any) -> list[str]:
        trials.append(texts)
        return find_errors(grammars, texts)

    monkeypatch.setattr(Grammars, "find_errors", count)
    wish = {"response_format": json_schema(PERSON), "max_tokens": 5}
    answers(service, *[wish] * 6)
    answers(service, wish)
    assert len(trials) == 1
    with pytest.raises(Refusal):
        answers(service, *[{"structured_outputs": {"regex": "("}}] * 3)
