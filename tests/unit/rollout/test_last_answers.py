"""The text that rewards grade where an environment gives no score: what the policy wrote, as without an environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import completion_texts, decode_sampled
from podium.rollout.environments import SessionLimits
from podium.rollout.sampling import RequestParams
from podium_agents import Client, Task
from podium_agents.environments.contract import Outcome
from podium_agents.environments.runner import Trajectory, live
from podium_agents.rollout import _as_batch, _last_text
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled, Session
from tests.unit.rollout.service.scripted import LOOK, scripted

END = "<|im_end|>"
CALL = '<tool_call>{"name": "look", "arguments": {"number": 42}}</tool_call>'


def graded_texts(play: Any, *answers: str, stops: tuple[str, ...] = ()) -> tuple[list[tuple[str, str]], Batch, Any]:
    """The agent and the graded text of each row of a session, its rows, and the tokenizer."""
    service, source, tokenizer = scripted(*answers)
    rules = RequestParams(max_new_tokens=256, stop=stops)
    service = Service(
        source, service.form, tokenizer, model="policy", context=1 << 16,
        stop_token_ids=service.stop_token_ids, most_tokens=1 << 40, rules=rules, stops=stops,
    )  # fmt: skip
    (episode,) = asyncio.run(live(play, [{}], [1], ["s"], service, SessionLimits(), address=lambda: ""))
    assert not episode.failure, episode.failure
    rows = [(episode, trajectory, 0, number) for number, trajectory in enumerate(episode.trajectories)]
    batch = _as_batch(rows, service, rules)
    return [*zip(batch.python(fields.AGENT), completion_texts(batch, tokenizer), strict=True)], batch, tokenizer


def last_ids(batch: Batch, row: int) -> list[int]:
    """What a reward gets as ``completion_ids``."""
    ids, turns = ([*batch.jagged(name).unbind()][row] for name in (fields.TOKENS, fields.TURN))
    return ids[turns == turns.max()].tolist()


async def ask_twice(task: Task, client: Client) -> None:
    reply = await client.chat("Which number?", tools=[LOOK])
    await client.chat([*reply.messages, {"role": "user", "content": "And now?"}], tools=[LOOK])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<think>2 and 2</think> <answer>4</answer>", "<think>2 and 2</think> <answer>4</answer>"),
        ("<think>\n2 and 2\n</think>\n\n4\n", "<think>\n2 and 2\n</think>\n\n4\n"),
        ("<think>I never end.", "<think>I never end."),
        ("  4 <|eot|>", "  4 "),
        ("", ""),
        ('<tool_call>{"name": 4}</tool_call>', '<tool_call>{"name": 4}</tool_call>'),  # which is no call
        (f"<think>hm</think>I look.\n{CALL}", "I look."),
        (CALL, ""),
    ],
)
def test_the_last_answer_is_graded_as_it_was_written(answer: str, text: str) -> None:
    ((_, graded),), batch, tokenizer = graded_texts(ask_twice, f"Nine.{END}", f"{answer}{END}")
    assert graded == text
    if CALL not in answer:
        ids = last_ids(batch, 0)
        single = Batch({fields.TOKENS: (row := Jagged.from_rows([batch.jagged(fields.TOKENS).values.new_tensor(ids)]))})
        (plain,) = decode_sampled(single.with_columns({fields.LOSS_MASK: row.like(row.values >= 0)}), tokenizer)
        assert graded == plain, "a completion without an environment is graded by this text"


@pytest.mark.parametrize(
    ("answer", "text", "stop"),
    [
        ("<think>hm</think>4</answer> and more", "<think>hm</think>4", "</answer>"),
        ("<think>4</answer> and more", "<think>4", "</answer>"),
        ("<think>hm</think>4", "<think>hm</think>4", ""),
    ],
)
def test_the_text_that_ended_the_last_answer_is_cut_off(answer: str, text: str, stop: str) -> None:
    ((_, graded),), batch, _ = graded_texts(ask_twice, f"Nine.{END}", f"{answer}{END}", stops=("</answer>",))
    assert (graded, batch.python(fields.STOP_TEXT)) == (text, [stop])


def test_each_agent_has_its_own_last_answer_in_all_of_its_rows() -> None:
    async def play(task: Task, client: Client) -> Outcome:
        await client.chat("One?")
        await client.agent("critic").chat("Two?")
        await client.chat("Another conversation?")
        return Outcome()

    texts, batch, _ = graded_texts(
        play, f"<think>a</think>1{END}", f"<think>b</think>2{END}", f"<think>c</think>3{END}"
    )
    assert texts == [("", "<think>c</think>3"), ("", "<think>c</think>3"), ("critic", "<think>b</think>2")]
    assert len(batch) == 3


def test_an_answer_to_ids_is_graded_too() -> None:
    _, _, tokenizer = scripted()
    session, ids = Session("s"), tokenizer.encode(f"<think>a</think>1{END}", add_special_tokens=False)
    session.record([1, 2, 3], Sampled(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
    assert _last_text(Trajectory("", session, None, {}), tokenizer) == "<think>a</think>1"
