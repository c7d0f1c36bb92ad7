"""What sessions record under the chat templates of six families: the ids that the model was asked and answered.

The templates are our own writing. They behave as the families' do: where the system prompt goes, what is dropped from
the history, how calls of tools and their results are written. What the "model" samples is drawn at random: text, calls
of tools, broken ones, halves of characters, special tokens in the midst, answers that are cut off.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.admission import Admission
from podium_agents.service.chat_format import ChatFormat
from podium_agents.service.request_bodies import ChatRequest
from podium_agents.service.service import Answer, Service
from podium_agents.service.session_recording import Sampled, Session
from tests.unit.rollout.tasks.test_encode import byte_tokenizer

TURNS = 1700  # of each family, 10,200 in all
RULES = SamplingParams(max_new_tokens=64)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for name in ("look", "move_to")
]


@dataclass(frozen=True)
class Family:
    """A template: its special tokens, how it writes a call of a tool, and with what an answer ends."""

    name: str
    special: Sequence[str]
    call: str  # with NAME and ARGS
    end: str
    end_of_call: str = ""
    thought: str = "<think>\n{}\n</think>\n\n"
    text: str = "{}"
    tools: bool = True
    splits: bool = False  # it writes a history otherwise once it goes on, in conversations with tools or reasoning
    words: tuple[tuple[str, str], ...] = ()  # what stands in the template in place of what


HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
CHATML = ("<|im_start|>", "<|im_end|>")
FAMILIES = [
    Family("qwen2_5", CHATML, HERMES, "<|im_end|>"),
    Family("qwen3", CHATML, HERMES, "<|im_end|>", splits=True),
    Family(
        "llama3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        *('{"name": "NAME", "parameters": ARGS}', "<|eot_id|>"),
    ),
    Family("gemma", ("<start_of_turn>", "<end_of_turn>"), "", "<end_of_turn>", tools=False),
    Family(
        "mistral",
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        *('[TOOL_CALLS] [{"name": "NAME", "arguments": ARGS, "id": "abcdefghi"}]', "</s>"),
        text=" {}",
        splits=True,
    ),
    Family(
        "gpt_oss",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
        "<|return|>",
        end_of_call="<|call|>",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        splits=True,
    ),
]
WORDS = (
    "the fox",
    "jumps",
    "över",
    "a dog",
    "日本",
    "\n\nagain",
    "12 + 7 = 19",
    "🙂",
    "  two  spaces ",
    "{}",
    "<b>",
    "[1]",
)


@cache
def tokenizer_of(family: Family) -> Any:
    template = (Path(__file__).parent / "templates" / f"{family.name}.jinja").read_text()
    for old, new in family.words:
        assert old in template
        template = template.replace(old, new)
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*family.special]})  # type: ignore[arg-type]
    return tokenizer


@dataclass
class Dice:
    """Draws answers at random, and keeps what it was asked and what it drew."""

    family: Family
    dice: random.Random
    plain: bool = False  # whether all answers are as the template would write them
    tools: bool = True  # whether tools are called
    said: list[str] = field(default_factory=list)  # what is not drawn at random, in this order
    log: list[tuple[list[int], Sampled]] = field(default_factory=list)
    positions: int | None = None
    in_flight: int = 0
    waiting: int = 0
    version: int = 0
    prompt_tokens: None = None
    admission: Admission = field(default_factory=Admission)

    def end_session(self, name: str) -> None:
        self.admission.end(name)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Any = None,
        constraint: Any = None,
        exact: bool = True,
    ) -> AsyncGenerator[Sampled]:
        fixed = self.said.pop(0) if self.said else ""
        ids = self._ids(fixed) if fixed else self._drawn()
        await asyncio.sleep(0)
        cut = not self.plain and not fixed and self.dice.random() < 0.1
        ids = ids[: self.dice.randint(1, len(ids))] if cut else ids
        logprobs = [-self.dice.random() for _ in ids]
        versions = [self.dice.randint(0, 3) for _ in ids]
        drawn = Sampled(ids, logprobs, versions, "length" if cut else "stop")
        self.log.append(([*prompt], drawn))
        yield drawn

    async def score(
        self, ids: Sequence[int], *, first: int = 1, top: int = 0, temperature: float = 1.0, session: str = ""
    ) -> Any:
        raise NotImplementedError

    def _drawn(self) -> list[int]:
        tokenizer, dice, family = tokenizer_of(self.family), self.dice, self.family
        kind = dice.choice(("text", "text", "call", "thought", "noise", "broken"))
        if self.plain:
            kind = dice.choice(("text", "call"))
        said = dice.choice(WORDS).strip() if self.plain else dice.choice(WORDS)
        if kind == "noise":
            return [dice.randrange(len(tokenizer)) for _ in range(dice.randint(1, 12))]
        if kind == "call" and family.tools and self.tools:
            arguments = json.dumps({"x": said}, ensure_ascii=not self.plain)
            name = dice.choice(("look", "move_to", "nothing") if not self.plain else ("look",))
            text = family.call.replace("NAME", name).replace("ARGS", arguments) + (family.end_of_call or family.end)
        elif kind == "broken" and family.tools:
            text = family.call.replace("NAME", "look").replace("ARGS", '{"x": ') + family.end
        else:
            thought = family.thought.format("hm " + said) if kind == "thought" else ""
            text = thought + family.text.format(said) + family.end
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return tokenizer_of(self.family).encode(text, add_special_tokens=False)


def by_template(family: Family) -> ChatFormat:
    return ChatFormat(ChatEncoder(tokenizer_of(family), DataConfig()), tokenizer_of(family))


def make(
    family: Family, seed: int, plain: bool = False, form_of: Callable[[Family], ChatFormat] = by_template
) -> tuple[Service, Dice, ChatFormat]:
    tokenizer, source = tokenizer_of(family), Dice(family, random.Random(seed), plain)
    form = form_of(family)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in (family.end, family.end_of_call) if end]
    service = Service(
        source, form, tokenizer, model="m", context=1 << 20, stop_token_ids=ends, most_tokens=1 << 60, rules=RULES
    )
    return service, source, form


async def ask(service: Service, name: str, messages: list[Any], tools: Any) -> Answer:
    request = ChatRequest(messages=json.loads(json.dumps(messages)), tools=tools)
    return await service.answer(service.chat(request, name))


def as_a_client_returns(message: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """What a client sends back of an answer: some drop the reasoning, some strip the text, some write JSON anew, some
    add fields, name calls anew, or send the text in parts."""
    said = json.loads(json.dumps(message))
    if dice.random() < 0.5:
        said.pop("reasoning_content", None)
    if dice.random() < 0.3 and said.get("content"):
        said["content"] = said["content"].strip()
    if dice.random() < 0.3:
        said |= dice.choice(ADDED)
    if thought := message.get("reasoning_content", ""):
        blocks = [{"type": "thinking", "thinking": thought, "signature": "x"}]
        said |= dice.choice([{"thinking_blocks": blocks}, {"reasoning_details": [{"text": thought}]}, {}])
    if dice.random() < 0.2 and said.get("content"):
        said["content"] = [{"type": "text", "text": said["content"], "cache_control": {"type": "ephemeral"}}]
        if "reasoning_content" in said:
            said["content"].insert(0, {"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
    renames = dice.random() < 0.2
    for number, call in enumerate(said.get("tool_calls", ())):
        if renames:
            call |= {"id": f"toolu_{number:03}", "index": number}
        if dice.random() < 0.5:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=1)
    return said


ADDED: list[dict[str, Any]] = [
    {"id": "msg_1", "status": "completed", "phase": "commentary"},
    {"refusal": None, "audio": None, "function_call": None, "annotations": [], "name": "clerk"},
]


async def converse(service: Service, family: Family, name: str, dice: random.Random, turns: int) -> None:
    """A conversation with results of tools, edits of the history, answers asked twice, and sub-agents."""
    tools = TOOLS if family.tools and dice.random() < 0.6 else None
    opening = [{"role": "system", "content": "Be brief."}] if dice.random() < 0.4 else []
    messages: list[Any] = [*opening, {"role": "user", "content": dice.choice(WORDS)}]
    done = 0
    while done < turns:
        answer = await ask(service, name, messages, tools)
        done += 1
        if dice.random() < 0.15:  # the same prompt again, and the conversation goes on with the second answer
            answer = await ask(service, name, messages, tools)
            done += 1
        message = as_a_client_returns(dict(answer.message), dice)
        if dice.random() < 0.1:
            message["content"] = "What an agent has made of it."
            message.pop("tool_calls", None)
        messages.append(message)
        if calls := message.get("tool_calls", ()):
            if family.name == "llama3" and len(calls) > 1:
                return
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": dice.choice(WORDS)} for call in calls]
        else:
            messages.append({"role": "user", "content": dice.choice(WORDS)})
        if dice.random() < 0.05:  # the history is summarized
            messages = [*opening, {"role": "user", "content": "So far: " + dice.choice(WORDS)}]
        if dice.random() < 0.1:  # a sub-agent
            await ask(service, name, [{"role": "user", "content": "Sub: " + dice.choice(WORDS)}], tools)
            done += 1


def differences(session: Session, log: Sequence[tuple[list[int], Sampled]]) -> list[str]:
    """What the rows of a session have otherwise than the model was asked and answered."""
    found: list[str] = []
    trained = Counter[int]()
    for row in session.rows:
        sampled = [False] * len(row.ids)
        for turn in row.turns:
            prompt, drawn = log[turn.call]
            span = slice(turn.start, turn.stop)
            trained[turn.call] += 1
            sampled[span] = [True] * (turn.stop - turn.start)
            if row.ids[: turn.start] != prompt:
                found.append(f"call {turn.call}: the row has another prompt than the model read")
            if (row.ids[span], row.logprobs[span], row.versions[span]) != (
                list(drawn.ids),
                list(drawn.logprobs),
                list(drawn.versions),
            ):
                found.append(f"call {turn.call}: the row has other tokens than were sampled")
        if sampled != row.sampled:
            found.append("tokens are trained that were not sampled, or the other way round")
    if trained != Counter(range(len(log))):
        found.append(f"calls are not trained once each: {trained}")
    return found


async def simulate(
    family: Family, turns: int, seed: int, form_of: Callable[[Family], ChatFormat] = by_template
) -> tuple[int, int, list[str]]:
    """Live sessions until ``turns`` are over. Returns their number, the splits and the differences."""
    dice = random.Random(seed)
    done, splits, found = 0, 0, list[str]()
    while done < turns:
        service, source, _ = make(family, dice.randrange(1 << 30), form_of=form_of)
        session = service.open_session("s", 1)
        await converse(service, family, "s", dice, dice.randint(2, 12))
        done, splits = done + len(source.log), splits + session.splits
        found += differences(session, source.log)
    return done, splits, found


@pytest.mark.everyday("qwen3-170", "llama3-170", "gpt_oss-170")
@pytest.mark.parametrize("count", [TURNS // 10, pytest.param(TURNS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_was_sampled_is_trained_as_it_was_sampled(family: Family, count: int) -> None:
    turns, splits, found = asyncio.run(simulate(family, count, 1))
    assert turns >= count
    assert found == []
    if not family.splits:
        assert splits == 0


@pytest.mark.everyday("qwen3")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_test_finds_a_history_that_is_tokenized_again(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken session, which writes what was sampled anew from its text, is found by the same comparison."""
    record = Session.record

    def again(self: Session, prompt: Any, drawn: Sampled, messages: Any = (), **of: Any) -> Any:
        tokenizer = tokenizer_of(family)
        ids = tokenizer.encode(tokenizer.decode(drawn.ids), add_special_tokens=False)
        size = len(ids)
        other = Sampled(ids, [*drawn.logprobs, *[0.0] * size][:size], [*drawn.versions, *[0] * size][:size], "stop")
        return record(self, prompt, other, messages, **of)

    monkeypatch.setattr(Session, "record", again)
    _, _, found = asyncio.run(simulate(family, 200, 1))
    assert found


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_bridged_prompt_is_what_the_template_writes_for_the_whole_conversation(family: Family, seeds: range) -> None:
    """Where all answers are as the template writes them, ids that go on and ids of the whole text are the same."""

    async def live(seed: int) -> tuple[int, int]:
        dice = random.Random(seed)
        service, source, form = make(family, seed, plain=True)
        service.open_session("s", 1)
        tools = TOOLS if family.tools and dice.random() < 0.5 else None
        source.tools = tools is not None
        messages: list[Any] = [{"role": "user", "content": "the fox"}]
        equal = 0
        for turn in range(6):
            answer = await ask(service, "s", messages, tools)
            if source.log[-1][0] != form.prompt(messages, tools or ()):
                both = (source.log[-1][0], form.prompt(messages, tools or ()))
                texts = [tokenizer_of(family).decode(ids) for ids in both]
                raise AssertionError(f"turn {turn}: {texts[0]!r} is not {texts[1]!r}")
            equal += 1
            messages.append(dict(answer.message))
            calls = answer.message.get("tool_calls", ())
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a tree"} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": "a dog"})
        return equal, len(service.sessions["s"].rows)

    found = [asyncio.run(live(seed)) for seed in seeds]
    assert sum(equal for equal, _ in found) == 6 * len(seeds)
    if not family.splits:
        assert all(rows == 1 for _, rows in found)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.tools], ids=lambda family: family.name)
def test_a_call_is_read_as_the_family_writes_it(family: Family) -> None:
    _, _, form = make(family, 0)
    tokenizer = tokenizer_of(family)
    prompt = form.prompt([{"role": "user", "content": "the fox"}], TOOLS)
    text = family.call.replace("NAME", "look").replace("ARGS", '{"x":  "a \\"b\\" é"}') + (
        family.end_of_call or family.end
    )
    reply = form.parse(prompt, tokenizer.encode(text, add_special_tokens=False), TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("look", {"x": 'a "b" é'})]
    assert reply.content.strip() == ""
    reply = form.parse(prompt, tokenizer.encode(text, add_special_tokens=False))
    assert not reply.tool_calls, "nothing is a call where there are no tools"
    thought = family.thought.format("hm") + family.text.format("Yes.") + family.end
    reply = form.parse(prompt, tokenizer.encode(thought, add_special_tokens=False), TOOLS)
    assert ((reply.reasoning or "").strip(), reply.content.strip()) == ("hm", "Yes.")


@pytest.mark.parametrize(
    "arguments", ['{"x": "\\ud800"}', '"{\\"x\\": \\"\\\\ud800\\"}"', '{"x": 1' + "0" * 5000 + "}"]
)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.tools], ids=lambda family: family.name)
def test_what_could_not_be_read_again_is_no_call(family: Family, arguments: str) -> None:
    """Half of a surrogate pair, and a number of more digits than Python reads, are text and trained as any other."""

    async def live() -> Session:
        service, source, _ = make(family, 0)
        call = family.call.replace("NAME", "look").replace("ARGS", arguments)
        source.said = [call + (family.end_of_call or family.end), family.text.format("Yes.") + family.end]
        session, messages = service.open_session("s", 1), list[Any]([{"role": "user", "content": "the fox"}])
        answer = await ask(service, "s", messages, TOOLS)
        assert "tool_calls" not in answer.message
        json.dumps(answer.message, ensure_ascii=False).encode()
        await ask(service, "s", [*messages, dict(answer.message), messages[0]], TOOLS)
        assert differences(session, source.log) == []
        return session

    assert len(asyncio.run(live()).calls) == 2
