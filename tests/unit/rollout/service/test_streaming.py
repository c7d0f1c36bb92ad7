"""Pieces of an answer as they come: nothing is sent that is not in the whole, and a long answer stays cheap."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from podium.rollout.engines.stops import before_stop, ends_now
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.service import Answer, Service, cut_at_stop
from podium_agents.service.session_recording import Sampled
from podium_serve import streaming
from podium_serve.bodies import CompletionRequest
from podium_serve.pieces import Delta
from tests.unit.rollout.service.scripted import LOOK, USER, scripted
from tests.unit.rollout.tasks.test_encode import byte_tokenizer
from tests.unit.rollout.test_templates import FAMILIES, TOOLS, Family, tokenizer_of


@pytest.fixture(autouse=True)
def look_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides which tokens come in one piece."""
    monkeypatch.setattr(streaming, "_PAUSE_S", 0.0)
    monkeypatch.setattr(streaming, "_SLOW_S", math.inf)


async def pieces(
    service: Service, tokens: bool = False, late: bool = False, **request: Any
) -> tuple[list[Delta], Answer]:
    deltas: list[Delta] = []
    asked = service.chat(ChatRequest(messages=[USER], **request))
    async for _, piece in streaming.stream_answers(service, asked, tokens=tokens, late=late):
        if isinstance(piece, Answer):
            return deltas, piece
        deltas.append(piece)
    raise AssertionError


@pytest.mark.each_value
@pytest.mark.parametrize("tools", [None, [LOOK]])
@pytest.mark.parametrize("stop", [[], ["a very long text that ends answers"], ["</s>", "\n\n"]])
@pytest.mark.parametrize(
    "said",
    [
        "<think>hm, is 1 < 2?</think>It is so.",
        "<think>so</thi and so</think>It is </think>.",
        "<think>never closed </thin",
        "short",
        "a very long text that ends answers, and more",
        'I look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    ],
)
def test_the_pieces_of_any_answer_are_its_whole(said: str, stop: list[str], tools: Any) -> None:
    service, _, _ = scripted(f"{said}<|im_end|>")
    deltas, answer = asyncio.run(pieces(service, stop=stop, tools=tools))
    assert "".join(delta.reasoning for delta in deltas) == answer.message.get("reasoning_content", "")
    assert "".join(delta.content for delta in deltas) == (answer.message["content"] or "")


@pytest.mark.each_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("stop", "tools"), [([], None), ([], [LOOK]), (["a very long text that ends answers"], None)])
@pytest.mark.parametrize(
    "said",
    [
        "It is so, and  it stays so.\n\n",
        "<think>hm, is 1 < 2?</think>It is so.",
        "<think>so</thi and so</think>It is </think>.",
        "",
        'I look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>',
        "so <b>bold a very long text that ends answers, and more",
    ],
)
def test_each_token_is_in_the_piece_in_which_its_text_begins(
    said: str, stop: list[str], tools: Any, late: bool
) -> None:
    service, _, _ = scripted(f"{said}<|im_end|>")
    deltas, answer = asyncio.run(pieces(service, tokens=True, late=late, stop=stop, tools=tools))
    starts = [*(delta.start for delta in deltas), answer.start]
    for delta, stop_at in pairwise([*deltas, answer]):
        assert delta.sampled is not None and len(delta.sampled.ids) == len(delta.sampled.logprobs) == stop_at.start
        assert list(delta.sampled.ids) == list(answer.sampled.ids)[: stop_at.start]
    assert starts == sorted(starts) and starts[0] == 0
    assert not late or len(deltas) <= 2
    for delta in deltas:
        if delta.content and "<" not in said:
            assert delta.sampled is not None
            text = service.decode(delta.sampled.ids[delta.start :], special=True)
            assert text == delta.content, "one token is one character here"
    if not tools and said:
        rest = service.decode(answer.sampled.ids[answer.start :])
        assert not rest.strip() or rest in stop[0]


FRAGMENTS = (
    *(
        "It is",
        " so",
        "  ",
        "\n",
        "\r\n",
        "\u00a0",
        "é",
        "🙂",
        "1 < 2",
        "{",
        "[1]",
        "to=",
        " to=functions.look",
        "analysis",
    ),
    *(
        "<think>",
        "</think>",
        "<thi",
        "</",
        "<",
        "<|",
        "<|sta",
        "<|im_start|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
    ),
    *("<tool_call>", "</tool_call>", "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "json"),
    *('{"name": "look", "arguments": {"x": "a"}}', '{"x": "a"}', "<|return|>", "final", "commentary"),
)


FORMS = [
    pytest.param(family, tools, id=f"{family.name}-{'tools' if tools else 'plain'}")
    for family in FAMILIES
    for tools in [None, *([TOOLS] if family.tools else [])]
]


def draw_answer(family: Family, dice: random.Random) -> list[int]:
    """The ids of messages, calls and reasoning as a family writes them, broken ones, and fragments in any order."""
    arguments = dice.choice(['{"x": "a"}', '{"x": '])
    call = family.call.replace("NAME", "look").replace("ARGS", arguments) + family.end_of_call
    opener = "<|start|>assistant" if family.name == "gpt_oss" else ""
    parts = [family.thought.format("hm"), family.text.format(" It is so.\r\n"), call, call, call]
    parts = [dice.choice(parts) for _ in range(dice.randint(0, 4))]
    if family.name == "gpt_oss":
        others = [
            "<|channel|>analysis to=functions.look<|message|>{}<|call|>",
            " to=functions.look<|message|>{}<|call|>",
        ]
        parts = [dice.choice([part, part, part, *others]) for part in parts]
    for _ in range(dice.choice([0, 0, 1, 3, 9])):
        parts.insert(dice.randint(0, len(parts)), dice.choice(FRAGMENTS))
    text = "".join(part + dice.choice(["", opener, "<|end|>" + opener]) * bool(opener) for part in parts)
    ids = tokenizer_of(family).encode(text, add_special_tokens=False)
    return [*ids[: dice.choice([len(ids), len(ids), dice.randint(0, len(ids))])]]


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("family", "tools"), FORMS)
def test_what_is_certain_at_any_token_begins_the_answer_that_ends_at_any_later_one(
    family: Family, tools: Any, count: int
) -> None:
    """A stream looks at any token, and an answer may be cut at any one, so that all pairs of them are tried."""
    dice = random.Random(f"{family.name}{bool(tools)}")
    service, _, _ = scripted(tokenizer=tokenizer_of(family))
    request = {"tools": tools, "parallel_tool_calls": False} if tools and dice.random() < 0.5 else {"tools": tools}
    for _ in range(count):
        question = service.chat(ChatRequest(messages=[USER], **request))
        ids = draw_answer(family, dice)
        longest = Delta()
        for stop in range(len(ids) + 1):
            certain = streaming._certain(service, question, ids[:stop])
            longest = Delta(
                max(longest.content, certain.content, key=len), max(longest.reasoning, certain.reasoning, key=len)
            )
            sampled = service._cut(question, Sampled(ids[:stop], [0.0] * stop, [0] * stop, "length"))
            message = service._answer(question, sampled).message
            text = repr(service.decode(ids[:stop], special=True))
            assert (message["content"] or "").startswith(longest.content), text
            assert message.get("reasoning_content", "").startswith(longest.reasoning), text


@pytest.mark.parametrize(("family", "tools"), FORMS)
def test_the_pieces_of_an_answer_of_any_family_join_to_its_message(family: Family, tools: Any) -> None:
    whole_text = family.thought.format("Easy.") + family.text.format("The answer is 4.") + family.end
    call = family.call.replace("NAME", "look").replace("ARGS", '{"x": "a"}') + (family.end_of_call or family.end)
    for answer_text in [whole_text, family.text.format("4 or 5"), *([call] if tools and family.tools else [])]:
        tokenizer = tokenizer_of(family)
        service, _, _ = scripted(answer_text, tokenizer=tokenizer)
        deltas, answer = asyncio.run(pieces(service, tools=tools))
        assert "".join(delta.reasoning for delta in deltas) == answer.message.get("reasoning_content", "")
        assert "".join(delta.content for delta in deltas) == (answer.message["content"] or "")
        assert ("tool_calls" in answer.message) == (answer_text == call)
        assert answer_text != whole_text or len(deltas) > 5, "the text comes while it is drawn"


@pytest.mark.parametrize(
    ("sampled", "content"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>fin", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", ""),
        ("<|channel|>final<|message|>4<|end|><|start|>assistant<|channel|>commentary to=functions.look", "4"),
        (" to=functions.look<|channel|>comm", ""),
        (" to=functions.look", ""),
        ("Four.", "Four."),
        ("Four.<|end|><|start|>assistant<|channel|>fin", "Four."),
        ("to=5 <b>", "to=5 <b>"),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_a_header_that_a_cut_left_unfinished_is_no_content(sampled: str, content: str, tools: Any) -> None:
    (family,) = (family for family in FAMILIES if family.name == "gpt_oss")
    service, _, _ = scripted(sampled, tokenizer=tokenizer_of(family))
    deltas, answer = asyncio.run(pieces(service, tools=tools))
    assert answer.message["content"] == content == "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("name", ["content", "reasoning"])
def test_an_answer_that_does_not_begin_with_what_was_sent_ends_the_stream_with_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _, _ = scripted("<think>hm, so</think>It is so.<|im_end|>")
    monkeypatch.setattr(
        streaming, "_certain", lambda *_: Delta("It was") if name == "content" else Delta(reasoning="It was")
    )
    with pytest.raises(Refusal, match=f"has sent 'It was' at the end of its {name}.*send the request again") as refused:
        asyncio.run(pieces(service))
    assert refused.value.status == 500


def test_a_character_of_several_tokens_comes_with_all_of_them() -> None:
    service, source, _ = scripted()
    tokenizer = byte_tokenizer()
    service.tokenizer = tokenizer
    ids = tokenizer.encode("a日🙂 b", add_special_tokens=False)
    source.answers.append(ids)
    request = CompletionRequest(prompt="ab", max_tokens=99, logprobs=1)

    async def stream() -> list[Delta | Answer]:
        asked = service.ask([1], request, 99, stop=None)
        return [piece async for _, piece in streaming.stream_texts(service, [asked], tokens=True)]

    *deltas, answer = asyncio.run(stream())
    texts = {}
    for delta in deltas:
        assert isinstance(delta, Delta) and delta.sampled is not None
        texts[delta.content] = tokenizer.decode(list(delta.sampled.ids[delta.start :]))
    assert all(text == tokens or text.strip() == tokens.strip() for text, tokens in texts.items()), texts
    assert {"日", "🙂"} <= set("".join(texts)) and answer.start == len(ids)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("stops", [[], ["END"], ["é"]])
def test_texts_come_in_pieces_that_are_their_whole(stops: list[str], tokens: bool) -> None:
    said = ["one two  three END four", "a line\n and an EN", " "]
    service, _, tokenizer = scripted(*said)
    request = CompletionRequest(prompt="ab", n=len(said), max_tokens=99, stop=stops)
    asked = replace(service.ask(tokenizer.encode("ab"), request, 99, stop=None), stops=request.stops)

    async def streamed() -> dict[int, list[Delta | Answer]]:
        found: dict[int, list[Delta | Answer]] = {}
        async for number, piece in streaming.stream_texts(service, [asked], tokens=tokens):
            found.setdefault(number, []).append(piece)
        return found

    for number, pieces in asyncio.run(streamed()).items():
        *texts, whole = pieces
        assert isinstance(whole, Answer)
        text = "".join(piece.content for piece in texts if isinstance(piece, Delta))
        assert text == before_stop(service.decode(whole.sampled.ids), stops)
        assert number or len(texts) > 5, "the text comes while it is drawn"


def test_an_answer_of_thousands_of_tokens_is_not_decoded_again_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2000
    service, _, _ = scripted("abcdefghij" * (count // 10) + "STOP and more<|im_end|>")
    decoded: list[int] = []
    decode = service.decode
    monkeypatch.setattr(service, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    asked = service.chat(ChatRequest(messages=[USER], stop=["STOP", "never"]))
    drawn = asyncio.run(service.draw(asked))
    assert len(drawn.ids) == count + len("STOP")
    assert sum(decoded) < 60 * count


def test_a_stop_text_is_found_at_its_last_token_whatever_bytes_come() -> None:
    tokenizer, dice = byte_tokenizer(), random.Random(7)
    stops = ["日本", "🙂!", " two", "aé"]

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    found = 0
    for _ in range(200):
        text = "".join(dice.choice(["日", "本", "🙂", "!", " two", " ", "a", "é", "x" * 9]) for _ in range(30))
        noise = [dice.randrange(len(tokenizer)) for _ in range(5)]
        ids = [*noise, *tokenizer.encode(text, add_special_tokens=False)]
        whole = next((n for n in range(1, len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), None)
        new = dice.choice((1, 3))
        seen = next((n for n in range(new, len(ids) + 1, new) if ends_now(ids[:n], new, stops, decode)), None)
        if whole is not None and whole <= len(ids) // new * new:
            found += 1
            assert seen == -(-whole // new) * new
        drawn = cut_at_stop(Sampled(ids, [0.0] * len(ids), [0] * len(ids), "length"), stops, decode)
        assert (len(drawn.ids), drawn.finish_reason) == ((whole, "stop") if whole else (len(ids), "length"))
    assert found > 100
