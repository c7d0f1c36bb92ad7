"""Why a JSON text of a user's cannot be read."""

import json
from pathlib import Path

import pytest

from podium.errors import DataError
from podium.plain_values import explain_json
from podium.rollout.tasks.messages import parse_json
from podium.rollout.tasks.rows import read_rows
from podium_agents.environments.tools import ToolError, _arguments
from podium_agents.service.request_bodies import Refusal
from podium_agents.service.structured import _read_json
from podium_serve.exchange import as_json

LONG = "9" * 5000
REMEDY = r"'id' holds a whole number of 5,000 digits, and at most 4,300 can be read: write it as a text, in quotes"
NESTED = f'{{"meta": {{"id": [[1, -{LONG}]]}}}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NESTED, "'id' holds a whole number of 5,000 digits"),
        (f"[{LONG}]", "it holds a whole number of 5,000 digits"),
        (f'{{"id": {LONG}}} x', "'id' holds a whole number of 5,000 digits"),
        ('{"id": 1', "delimiter: line 1"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_the_field_and_the_remedy_are_named(text: str, said: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as caught:
        json.loads(text)
    assert said in explain_json(caught.value, text)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_with_a_number_of_too_many_digits_is_refused_by_its_field(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(NESTED if name.endswith("l") else f"[{NESTED}]")
    with pytest.raises(DataError, match=REMEDY):
        for _, row in read_rows(path):
            raise row if isinstance(row, DataError) else AssertionError


def test_texts_requests_and_arguments_with_such_a_number_are_refused_by_their_field() -> None:
    with pytest.raises(DataError, match=REMEDY):
        parse_json(NESTED, "{", strict=True)
    with pytest.raises(Refusal, match=REMEDY):
        _read_json(NESTED, "structured_outputs.json")
    with pytest.raises(Refusal, match=REMEDY):
        as_json(NESTED.encode("utf-16"))
    with pytest.raises(ToolError, match=REMEDY):
        _arguments(NESTED)
