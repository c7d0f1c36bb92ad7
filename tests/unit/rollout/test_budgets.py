"""Sessions that end by what they have used: answers, tokens, calls of tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.rollout.environments import EnvironmentConfig, SessionLimits
from podium.rollout.sampling import SamplingParams
from podium_agents import Client, ContextFull, Task
from podium_agents.environments.runner import Episode, live
from podium_agents.service.service import Service
from tests.unit.rollout.service.scripted import LOOK, scripted

ANSWER = "A very long answer.<|im_end|>"
LENGTH = len("A very long answer.") + 1
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def lived(play: Any, *answers: str, **options: Any) -> Episode:
    """One session, whose model says what is written down."""
    service, source, tokenizer = scripted(*answers)
    service = Service(
        source, service.form, tokenizer, model="policy", context=4096,
        stop_token_ids=service.stop_token_ids, most_tokens=1 << 40, rules=SamplingParams(max_new_tokens=64),
    )  # fmt: skip
    config = EnvironmentConfig(options=options)
    (episode,) = asyncio.run(live(play, [{}], [1], ["s"], service, config.limits, address=lambda: ""))
    return episode


async def ask_on(task: Task, client: Client) -> float:
    """Ask again and again, with all that was said."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    for _ in range(9):
        reply = await client.chat(messages, tools=[LOOK])
        messages = [*reply.messages, *({"role": "tool", "content": "ok"} for _ in reply.tool_calls)]
        messages += [{"role": "user", "content": "And?"}] if not reply.tool_calls else []
    return 1.0


@pytest.mark.parametrize(
    ("limit", "answers", "said", "turns"),
    [
        ({"turn_limit": 3}, ANSWER, "turn_limit", 3),
        ({"sampled_limit": 2 * LENGTH}, ANSWER, "sampled_limit", 2),
        ({"sampled_limit": 2 * LENGTH + 1, "turn_limit": 8}, ANSWER, "sampled_limit", 3),
        ({"read_limit": 700}, ANSWER, "read_limit", 3),
        ({"read_limit": 1}, ANSWER, "read_limit", 0),
        ({"tool_call_limit": 2}, CALL + "<|im_end|>", "tool_call_limit", 3),
        ({"tool_call_limit": 2}, CALL + CALL + CALL + "<|im_end|>", "tool_call_limit", 1),
    ],
)
def test_a_session_ends_by_its_limit_and_is_trained_like_one_whose_context_is_full(
    limit: dict[str, int], answers: str, said: str, turns: int
) -> None:
    episode = lived(ask_on, *[answers] * 9, **limit)
    assert (episode.limit, episode.truncated, episode.failure) == (said, True, "")
    assert [len(one.session.calls) for one in episode.trajectories] == ([turns] if turns else [])
    assert [one.score for one in episode.trajectories] == ([0.0] if turns else [])
    left_out = lived(ask_on, *[answers] * 9, **limit, train_at_limit=False)
    assert left_out.failure == said.replace("_", " ")
    assert (left_out.limit, left_out.truncated) == (said, False)


def test_what_is_within_its_limits_ends_as_it_does_without() -> None:
    limits = {"turn_limit": 9, "sampled_limit": 9 * LENGTH, "read_limit": 1 << 20, "tool_call_limit": 9}
    for options in (limits, {}):
        episode = lived(ask_on, *[ANSWER] * 9, **options)
        assert (episode.limit, episode.truncated, episode.trajectories[0].score) == ("", False, 1.0)
    episode = lived(ask_on, *[CALL + "<|im_end|>"] * 9, **{**limits, "sampled_limit": 1 << 20})
    assert episode.limit == ""


def test_the_last_answer_asks_for_no_more_tokens_than_are_left() -> None:
    drawn: list[int] = []

    async def play(task: Task, client: Client) -> float:
        stream = client._service.source.stream

        def note(prompt: Any, params: SamplingParams, *rest: Any, **how: Any) -> Any:
            drawn.append(params.max_new_tokens)
            return stream(prompt, params, *rest, **how)

        client._service.source.stream = note  # type: ignore[method-assign]
        return await ask_on(task, client)

    assert lived(play, *[ANSWER] * 9, sampled_limit=70).limit == "sampled_limit"
    assert drawn == [64, 70 - LENGTH, 70 - 2 * LENGTH, 70 - 3 * LENGTH]


def test_agents_of_a_session_share_its_limits() -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Go.")
        await client.agent("critic").chat("Right?")
        await client.agent("critic").agent("judge").chat("Right?")
        return 1.0

    episode = lived(play, *[ANSWER] * 3, turn_limit=2)
    assert (episode.limit, len(episode.trajectories)) == ("turn_limit", 2)
    assert lived(play, *[ANSWER] * 3, turn_limit=3).limit == ""


def test_an_agent_may_handle_its_limit() -> None:
    async def play(task: Task, client: Client) -> float:
        await client.chat("Go.")
        with pytest.raises(ContextFull, match=r"environment.options.turn_limit = 1"):
            await client.chat("And?")
        return 0.5

    episode = lived(play, ANSWER, turn_limit=1)
    assert (episode.limit, episode.truncated, episode.trajectories[0].score) == ("", False, 0.5)


@pytest.mark.parametrize("full", [False, True], ids=["limit", "context"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_an_agent_over_http_ends_by_its_limit_or_a_full_context(dialect: str, full: bool) -> None:
    openai: Any = pytest.importorskip("openai")
    anthropic: Any = pytest.importorskip("anthropic")
    from podium_serve.app import make_app
    from podium_serve.server import Server

    async def play(task: Task, client: Client) -> float:
        base = f"{server.url}/sessions/{client.session_id}"
        asked: list[Any] = [{"role": "user", "content": "Go."}]
        api: Any = (
            anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0)
            if dialect == "messages"
            else openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0)
        )
        async with api:
            for turn in range(3):
                asked[0]["content"] = "Go." * (99 if full and turn == 2 else 1)
                if dialect == "chat":
                    await api.chat.completions.create(model="m", messages=asked)
                elif dialect == "responses":
                    await api.responses.create(model="m", input=asked[0]["content"])
                else:
                    await api.messages.create(model="m", messages=asked, max_tokens=64)
        return 1.0

    service, source, tokenizer = scripted(*[ANSWER] * 3)
    service = Service(
        source, service.form, tokenizer, model="policy", context=4096,
        stop_token_ids=service.stop_token_ids, most_tokens=1 << 40, rules=SamplingParams(max_new_tokens=64),
    )  # fmt: skip
    with Server(make_app(service, "k")) as server:
        limits = SessionLimits(turn_limit=0 if full else 2)
        service.context = 4096 if not full else 90
        (episode,) = asyncio.run(live(play, [{}], [1], ["s"], service, limits, address=lambda: ""))
    assert (episode.limit, episode.truncated, episode.failure) == ("" if full else "turn_limit", True, "")
    assert len(episode.trajectories[0].session.calls) == 2


@pytest.mark.parametrize("value", [-1, "many", 1.5])
def test_a_limit_is_a_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.turn_limit"):
        _ = EnvironmentConfig(options={"turn_limit": value}).limits
