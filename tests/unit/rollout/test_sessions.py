"""What a session records: which calls make a row, and what each row trains."""

from __future__ import annotations

import pytest

from podium_agents.service.histories import message_key
from podium_agents.service.session_recording import Sampled, Session


def sampled(*ids: int, version: int = 3) -> Sampled:
    return Sampled(ids, [-0.1 * token for token in ids], [version] * len(ids), "stop")


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_prompt_that_extends_what_is_recorded_goes_on_in_its_row() -> None:
    session = Session("one")
    session.record([1, 2], sampled(10, 11))
    session.record([1, 2, 10, 11, 3], sampled(12, version=4))
    (row,) = session.rows
    assert row.ids == [1, 2, 10, 11, 3, 12]
    assert row.sampled == [False, False, True, True, False, True]
    assert row.logprobs == pytest.approx([0, 0, -1.0, -1.1, 0, -1.2])
    assert row.versions == [0, 0, 3, 3, 0, 4]
    assert [(turn.start, turn.stop) for turn in row.turns] == [(2, 4), (5, 6)]
    assert (row.parent, row.fork) == (None, 0)


def test_a_second_continuation_is_a_row_of_its_own_and_trains_no_token_again() -> None:
    session = Session("forked")
    session.record([1], sampled(10))
    session.record([1, 10, 2], sampled(11))
    session.record([1, 10, 3], sampled(12))
    first, second = session.rows
    assert (second.parent, second.fork) == (0, 2)
    assert second.ids == [1, 10, 3, 12]
    assert second.sampled == [False, False, False, True]
    trained = [token for row in session.rows for token, own in zip(row.ids, row.sampled, strict=True) if own]
    assert sorted(trained) == [10, 11, 12]
    assert first.sampled == [False, True, False, True]


def test_another_prompt_is_a_row_without_a_parent() -> None:
    session = Session("agents")
    session.record([1], sampled(10))
    session.record([5, 10], sampled(11))
    assert [row.parent for row in session.rows] == [None, None]


def test_a_row_that_was_split_off_goes_on_itself() -> None:
    session = Session("long")
    session.record([1], sampled(10))
    session.record([1, 10, 2], sampled(11))
    session.record([1, 10, 3], sampled(12))
    session.record([1, 10, 3, 12, 4], sampled(13))
    assert [row.ids for row in session.rows] == [[1, 10, 2, 11], [1, 10, 3, 12, 4, 13]]


def test_a_conversation_that_the_template_writes_otherwise_is_counted() -> None:
    session = Session("rewritten")
    first = session.record([1, 2], sampled(10), said("u", "a"))
    session.record([1, 2, 10, 3], sampled(11), said("u", "a", "u", "b"), continues=first)
    assert session.splits == 0
    second = session.find(said("u", "a", "u", "b", "u"))
    assert second is session.calls[1]
    session.record([1, 2, 99, 3, 11, 4], sampled(12), continues=second)
    assert (session.splits, len(session.rows)) == (1, 2)
    session.record([1, 2, 10, 98], sampled(12), continues=second)
    assert session.splits == 2, "it begins with the first call's ids, and not with those of the one it continues"


def test_find_takes_the_longest_conversation_and_of_equals_the_one_that_nobody_continued() -> None:
    session = Session("twins")
    session.record([1], sampled(10), said("u", "a"))
    session.record([1], sampled(10), said("u", "a"))
    session.record([1, 10, 2], sampled(11), said("u", "a", "v", "b"))
    found = session.find(said("u", "a", "w"))
    assert found is not None and session.rows[found.row].turns[-1].call == found.number
    assert session.find(said("x")) is None


def test_kept_sets_stay_with_their_tokens() -> None:
    session = Session("filtered")
    session.record([1], Sampled([10, 11], [-1.0, -2.0], [0, 0], "length", [[10, 12], [11]]))
    (row,) = session.rows
    assert row.kept == [(), [10, 12], [11]]
    assert row.turns[0].finish_reason == "length"


SAID = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": true}'}}],
}


@pytest.mark.parametrize(
    "changed",
    [
        {**SAID, "content": " Let me look.\n"},
        {**SAID, "content": [{"type": "text", "text": "Let me look."}]},
        {**SAID, "refusal": None, "audio": None, "annotations": []},
        {**SAID, "reasoning_content": "hm"},
        {**SAID, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"b":true,"a":1}'}}]},
    ],
)
def test_what_clients_change_on_the_way_makes_no_other_message(changed: dict[str, object]) -> None:
    assert message_key(changed) == message_key(SAID)


@pytest.mark.parametrize(
    "other",
    [
        {**SAID, "content": "Let me look"},
        {**SAID, "role": "user"},
        {**SAID, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a": 2, "b": true}'}}]},
        {**SAID, "tool_calls": []},
    ],
)
def test_another_text_role_or_argument_is_another_message(other: dict[str, object]) -> None:
    assert message_key(other) != message_key(SAID)


def test_a_users_white_space_counts() -> None:
    assert message_key({"role": "user", "content": "a "}) != message_key({"role": "user", "content": "a"})
