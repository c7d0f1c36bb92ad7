"""A reward model reads what a policy reads of the same rows: tools, calls of tools, messages and system prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig, load_examples
from podium_preferences import EncodedPreferences, encode_preferences, read_pair
from podium_preferences.scored_rows import encode_for_scorer
from tests.unit.rollout.tasks.test_encode import byte_tokenizer, notes_of
from tests.unit.rollout.tasks.test_schemas import ADD, SUM, TOOLS, model, system, user

SCHEMA = {"type": "function", "function": ADD}
PAIR = {"chosen": "7", "rejected": "8"}


def call(a: int, name: str = "", written: bool = False) -> dict[str, Any]:
    arguments: Any = json.dumps({"a": a}) if written else {"a": a}
    entry = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {**entry, "id": name} if name else entry


def calls(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*entries]}


def old_call(a: int) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": json.dumps({"a": a})}}


def encode(
    folder: Path, rows: list[dict[str, Any]], template: Any = TOOLS, **settings: Any
) -> tuple[EncodedPreferences, EncodedPreferences]:
    """The rows as a policy reads them, and as a reward model does."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(file), holdout=0, **settings)
    tokenizer = byte_tokenizer(template)
    examples = load_examples(config.train, config, read=read_pair)
    encoded = encode_preferences(examples, tokenizer, config)
    return encoded, encode_for_scorer(encoded, tokenizer, config)


def texts_of(rows: EncodedPreferences) -> list[str]:
    tokenizer = byte_tokenizer(TOOLS)
    return [str(tokenizer.decode(ids)) for row in rows for ids, _ in row.answers]


RESULTS = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("two", "one")]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": ({"prompt": SUM, **PAIR}, {}),
    "tools": ({"prompt": SUM, "tools": [SCHEMA], **PAIR}, {}),
    "tools as JSON text": ({"prompt": [user(SUM)], "tools": json.dumps([SCHEMA]), **PAIR}, {}),
    "functions": ({"prompt": SUM, "functions": [ADD], **PAIR}, {}),
    "tools beside the messages": (
        {"input": {"messages": [user(SUM)], "tools": [SCHEMA]}, **PAIR},
        {"prompt_column": "input.messages"},
    ),
    "tools and calls": (
        {"prompt": [user(SUM)], "chosen": [calls(call(3))], "rejected": [calls(call(4))], "tools": [SCHEMA]},
        {},
    ),
    "arguments as JSON text": (
        {"prompt": SUM, "chosen": [calls(call(3, written=True))], "rejected": [calls(call(4, written=True))]},
        {},
    ),
    "function_call": ({"prompt": [user(SUM)], "chosen": [old_call(3)], "rejected": [old_call(4)]}, {}),
    "the role function": (
        {"prompt": [user(SUM), old_call(3), {"role": "function", "name": "add", "content": "7"}], **PAIR},
        {},
    ),
    "results in another order": (
        {"prompt": [user(SUM), calls(call(1, "one"), call(2, "two")), *RESULTS], "tools": [SCHEMA], **PAIR},
        {},
    ),
    "weights": ({"prompt": [user(SUM), {**model("6"), "weight": 0}, user("Sure?")], **PAIR}, {}),
    "a sign of the end": ({"prompt": [user(SUM), model("6<|im_end|>"), user("Sure?")], **PAIR}, {}),
    "parts": ({"prompt": [{"role": "user", "content": [{"type": "text", "text": SUM}]}], **PAIR}, {}),
    "system": ({"prompt": SUM, "system": "Add.", "tools": [SCHEMA], **PAIR}, {"system_prompt": "Be brief."}),
    "data.system_prompt": ({"prompt": SUM, "tools": [SCHEMA], **PAIR}, {"system_prompt": "Be brief."}),
    "developer": (
        {"prompt": [{**system("Add."), "role": "developer"}, user(SUM)], **PAIR},
        {"system_prompt": "Be brief."},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_reward_model_reads_what_a_policy_reads(tmp_path: Path, form: str) -> None:
    row, settings = FORMS[form]
    policy, scored = encode(tmp_path, [row], **settings)
    read = texts_of(policy)
    assert texts_of(scored) == [f"{text}\n" for text in read], "the template writes a line end after each message"
    assert ("Adds." in read[0]) == any(name in json.dumps(row) for name in ('"tools"', '"functions"'))
    assert read[0] != read[1]


def test_rows_with_tools_are_written_by_the_template_for_tools(tmp_path: Path) -> None:
    named = {"default": TOOLS, "tool_use": "FOR TOOLS\n" + TOOLS}
    row = {"prompt": SUM, "tools": [SCHEMA], **PAIR}
    policy, scored = encode(tmp_path, [row], named)
    assert texts_of(scored) == [f"{text}\n" for text in texts_of(policy)]
    assert texts_of(scored)[0].startswith("FOR TOOLS")
    template = tmp_path / "own.jinja"
    template.write_text(TOOLS)
    with pytest.raises(ConfigError, match=r"own\.jinja': there are rows with tools, which a reward model reads by the"):
        encode(tmp_path, [row], named, chat_template=str(template))
    encode(tmp_path, [{"prompt": SUM, **PAIR}], named, chat_template=str(template))


def test_pairs_that_the_template_writes_alike_teach_a_reward_model_nothing(tmp_path: Path) -> None:
    """The answers are texts, which a policy learns as they are. A reward model reads them through the template."""
    shortening = TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    alike = {"prompt": SUM, "chosen": "3 + 4</think>7", "rejected": "4 + 3</think>7"}
    rows = [{"prompt": SUM, **PAIR}, alike, {"prompt": "What is 1 plus 1?", "chosen": "2", "rejected": "3"}]
    notes = notes_of(lambda: encode(tmp_path, rows, shortening))
    (note,) = [note for note in notes if "two answers" in note]
    assert note.startswith("1 of 3 pairs has two answers of which the chat template writes the same text"), note
    assert "is left out" in note and "rows.jsonl, line 2" in note
    policy, scored = encode(tmp_path, rows, shortening)
    assert (len(policy), len(scored), len(scored.answers)) == (3, 2, 4)
    assert [example.prompt for example in scored.examples] == [SUM, "What is 1 plus 1?"]
    with pytest.raises(DataError, match=r"line 1, .*so that a reward model would see no difference: set data\.chat_t"):
        encode(tmp_path, [alike], shortening)
