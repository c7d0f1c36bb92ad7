"""The forms in which the field writes rows, read as prompt and answer: nested columns, conversations of other names.

conversations [{"from": "human", "value": …}]  ─▶  [{"role": "user", "content": …}]
reward_model.ground_truth                      ─▶  the field of a column that holds an object, or its JSON text
["7"]                                          ─▶  "7"
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, cast

from podium.errors import DataError
from podium.plain_values import explain_json
from podium.rollout.tasks.bad_rows import name_place
from podium.rollout.tasks.fields import is_metadata, list_texts
from podium.rollout.tasks.messages import Messages, parse_json
from podium.rollout.tasks.rows import OPEN, TOKEN_IDS, read_object
from podium.spelling import suggest_nearest, write_count

CONVERSATIONS: Final = ("messages", "conversations", "conversation")
"""The columns that hold a whole conversation where the data have no prompt."""
NESTED_PROMPTS: Final = ("responses_create_params.input",)
"""Where NeMo-Gym's rows have the prompt."""
NESTED_ANSWERS: Final = ("reward_model.ground_truth", "reward_spec.ground_truth")
"""Where rows of verl, DAPO, Search-R1 and SkyRL have the answer."""

_ROLES: Final = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "ai", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
_SPEAKERS: Final = {*_ROLES, "system", "developer", "user", "assistant", "tool", "function"}
_SYSTEM: Final = ("system_prompt", "system")
_METADATA: Final = re.compile(
    r"(.+_)?(id|idx|index|uuid|url|title|meta|metadata|source|dump|date|timestamp|created|added|path|file|filename|lang|"
    r"language|score|count|tokens|length|size|license|licence|subset|split|hash|sha|repo|version|__index_level_0__)s?"
)
"""Columns beside a text that say where it comes from, and are not a second half of it."""
_NEW_LINE: Final = re.compile(
    r"\\n(?!(u|abla|eq?|eg|ot|otin|i|ewline|mid|leq?|geq?|onumber|orm|ewcommand|earrow|warrow|atural|less|gtr)\b)"
)
_CHOSEN: Final = (("chosen", "rejected"), ("preferred", "non_preferred"), ("preferred", "dispreferred"))
_FIGURE: Final = re.compile(
    r"(.*_)?(reward|grade|utility|elo|point|vote|like|rank|ranking|logp|logprob|probability|perplexity|ppl|confidence|"
    r"margin|score|rating)s?(_.*)?"
)
"""Columns with a figure of an answer, and not the answer."""


@dataclass(frozen=True, slots=True)
class Preference:
    """What the data say of the answer of an example.

    Attributes:
        rejected: The example with the worse answer to the same prompt; None where answers have labels.
        desirable: The label.
        margin: By how much the answer is better than the rejected one; None where the data do not say.
        tied: Whether the data give both answers of a pair the same score or rank.
    """

    rejected: Example | None = None
    desirable: bool = True
    margin: float | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt, its answer and its row of the data.

    Attributes:
        prompt: Text, or chat messages.
        answer: The answer as text. None means that there is none.
        row: All columns of the data, plus "prompt" and "answer". A reward gets this row, where a text stays text
            and a list of answers a list.
        turns: The answer as messages, if the data have it in that form. The last message is the assistant's.
        whole: Whether prompt and turns are one conversation, of which supervised fine-tuning learns every turn of the
            assistant.
        place: Where the row comes from, as in "train.jsonl, line 3". Empty for a row that comes from no data.
        columns: The columns of prompt and answer, or the templates that write them; None for one that is not there.
        preference: What the data say of the answer, where preferences are learned.
        source: The name of the source in ``data.train``, where there are several.
    """

    prompt: str | Messages
    answer: str | None
    row: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]] = ()
    whole: bool = False
    place: str = ""
    columns: tuple[str | None, str | None] = (None, None)
    preference: Preference | None = None
    source: str = ""

    @property
    def fields(self) -> list[str]:
        """The columns, and fields of columns, that prompt and answer are made of."""
        return [field for column in self.columns for field in list_fields(column)]

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text of which supervised fine-tuning learns every token."""
        return self.whole and not self.turns

    def name_in_errors(self) -> AbstractContextManager[None]:
        """Put the place of the row, or its prompt where it has no place, before the text of errors of the block."""
        return name_place(self.place or f"the row of the prompt {str(self.prompt)[:60]!r}")


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Return whether ``row`` has the column, or the field of a column, that ``name`` names."""
    try:
        read_column(row, name)
    except LookupError:
        return False
    return True


def read_column(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of ``row``, or the field of one by a dotted name, as in ``reward_model.ground_truth``.

    A number is the place of an element of a list. A column that holds a JSON object as text is read as the object. A
    list of one text, number or truth value is read as this element.

    Raises:
        LookupError: There is no such column or field.
        DataError: The text of a column has a name twice, with different values.
    """
    return read_single(read_value(row, name))


def read_value(row: Mapping[str, Any], name: str) -> Any:
    """Return what :func:`read_column` reads, and a list of one element as a list."""
    if name in row:
        return row[name]
    first, *path = name.split(".")
    value = row[first]
    for key in path:
        with name_place(f"column {first!r}"):
            value = parse_json(value, "[" if key.isdecimal() else "{", strict=True)
        if isinstance(value, list) and key.isdecimal():
            value = cast("list[Any]", value)[int(key)]
        elif isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value)[key]
        else:
            raise KeyError(key)
    if (
        path and path[-1] == "ground_truth" and isinstance(value, str)
    ):  # verl's are sometimes a list of one text, as JSON
        element = read_single(parse_json(value, '["'))
        return element if isinstance(element, str) else value
    return value


def is_template(column: str | None, row: Mapping[str, Any]) -> bool:
    """Return whether ``column`` is a template with the names of columns in braces, and no column itself."""
    return column is not None and "{" in column and column not in row


def list_fields(column: str | None) -> list[str]:
    """Return the columns, or fields of columns, that a column or a template names."""
    if column is None or "{" not in column:
        return [] if column is None else [column]
    try:
        return [_dotted(name) for _, name, _, _ in string.Formatter().parse(column) if name]
    except ValueError:
        return []


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Write a text from columns of ``row``, as in ``"Q: {question}\\nA: "``. A column without a value is empty.

    A backslash with an n, as a shell passes it on, is a new line where it begins no command of LaTeX.

    Raises:
        LookupError: There is no such column or field.
        ValueError: The template is malformed, names an object, a list or bytes, or all columns that it names are empty.
    """
    filled = _Template(row)
    text = filled.vformat(_NEW_LINE.sub("\n", template), (), {})
    if not filled.has_value:
        raise ValueError("the columns that it names are empty")
    return text


def is_missing(value: Any) -> bool:
    """Return whether a column has no value: null, or NaN, which pandas and Arrow write in the place of one."""
    return value is None or (isinstance(value, float) and math.isnan(value))


class _Template(string.Formatter):
    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.has_value = False

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        name = field_name if field_name in self._row else _dotted(field_name)
        value = read_column(self._row, name)
        return ("" if is_missing(value) else value), name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Mapping | list):
            kind = "a list" if isinstance(value, list) else "an object"
            raise ValueError(f"{str(value)[:40]!r} is {kind}, of which a part is named as in {{choices.0}}")
        if isinstance(value, bytes):
            raise ValueError(f"{value[:40]!r} are bytes: write the column as text")
        text = str(super().format_field(value, format_spec))
        self.has_value = self.has_value or bool(text.strip())
        return text


def _dotted(name: str) -> str:
    """Write ``metadata[expression]`` as ``metadata.expression``."""
    return re.sub(r"\[([^\]]*)\]", r".\1", name)


def list_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of ``row``, and of the fields of those that hold objects."""
    names = list(row)
    for column in row:
        value = parse_json(row[column], "{")
        if isinstance(value, Mapping):
            names += [f"{column}.{field}" for field in cast("Mapping[str, Any]", value)]
    return names


def columns_hint(wanted: str, row: Mapping[str, Any]) -> str:
    """Say for an error about a missing column which columns the row has, and which is the nearest; and what else the
    data may be."""
    columns = list_names(row)
    names = ", ".join(map(repr, columns))
    ids = [name for name in columns if TOKEN_IDS.fullmatch(name)]
    nearest = suggest_nearest(wanted, [name for name in columns if name not in ids], likeness=0.5)
    if ids and not nearest:
        return f"the columns are {names}; token ids, as {ids[0]!r} may hold them, are not read: give texts or messages"
    if len(columns) == 1 and (sign := next((sign for sign in ";\t|" if sign in columns[0]), "")):
        how = f"a .csv file has commas between its columns, and a .tsv file tabs, not {sign!r}"
        return f"the header is the one column {names}: {how}"
    for name, value in row.items() if not nearest else ():
        entries = cast("list[Any]", value) if isinstance(value, list) and name not in OPEN else []
        if not entries or not all(isinstance(one, Mapping) and not {"role", "from"} & one.keys() for one in entries):
            continue  # texts, or messages
        if len(columns) == 1 or any(has_column(entries[0], column) for column in (wanted, *CONVERSATIONS)):
            objects = write_count(len(entries), "object")
            return (
                f"the columns are {names}, and {name!r} holds a list of {objects}: if these are the rows, write this "
                "list alone into a file with the ending .json"
            )
    return f"the columns are {names}{nearest}"


def read_single(value: Any) -> Any:
    """Return the element of a list of one text, number or truth value; any other value as it is."""
    if isinstance(value, list) and len(cast("list[Any]", value)) == 1 and isinstance(value[0], str | int | float):
        return value[0]
    return value


def read_messages(value: Any, column: str | None) -> Any:
    """Return a conversation with the roles and fields of the OpenAI API; any other value as it is.

    A column that is called after conversations may hold one as JSON text.
    ShareGPT's entries have "from" and "value" in place of "role" and "content", and a call of a function as JSON text.

    Raises:
        DataError: An entry names a speaker that no convention knows, or a call that cannot be read.
    """
    if isinstance(value, str) and column in CONVERSATIONS:
        value = parse_json(value, "[", strict=True)
    if not isinstance(value, list) or not value:
        return value
    entries = cast("list[Any]", value)
    if all(isinstance(entry, str) for entry in entries):
        parsed = [parse_json(entry, "{", strict=True) for entry in entries]  # as columns of mixed types are kept
        if all(isinstance(entry, Mapping) and _speaker(entry) for entry in parsed):
            entries = parsed
        elif column in CONVERSATIONS and len(entries) > 1:
            return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(entries)]
    if all(isinstance(entry, Mapping) and {"input", "output"} <= entry.keys() for entry in entries):
        return [
            {"role": role, "content": entry[field]}
            for entry in entries
            for role, field in (("user", "input"), ("assistant", "output"))
        ]
    if not all(isinstance(entry, Mapping) and isinstance(_speaker(entry), str) for entry in entries):
        return entries
    return [_message(entry, f"message {number} of column {column!r}") for number, entry in enumerate(entries, start=1)]


def _speaker(entry: Mapping[str, Any]) -> Any:
    return entry.get("role") or entry.get("from")


def _message(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    speaker = str(_speaker(entry))
    if not entry.get("role") and speaker.lower() not in _SPEAKERS:
        raise DataError(f"{where} is from {speaker!r}; expected human, gpt, system, tool, function_call or observation")
    role = _ROLES.get(speaker.lower(), speaker.lower() if speaker.lower() in _SPEAKERS else speaker)
    if entry.get("role") == role and "value" not in entry:
        return entry
    message = {name: field for name, field in entry.items() if name not in ("role", "from", "value", "content")}
    content = entry["content"] if entry.get("content") is not None else entry.get("value")
    if entry.get("value") not in (None, content):
        raise DataError(
            f"{where} has a content, {str(content)[:40]!r}, and another value, {str(entry['value'])[:40]!r}; keep the "
            "one that is meant"
        )
    if speaker.lower() == "function_call":
        return {"role": role, "content": "", "tool_calls": _read_calls(content, where), **message}
    return {"role": role, "content": content, **message}


def _read_calls(text: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls from an object with "name" and "arguments", or a list of such, or the JSON text of either."""
    try:
        calls = json.loads(text, object_pairs_hook=read_object) if isinstance(text, str) else text
        listed = cast("list[Any]", calls if isinstance(calls, list) else [calls])
        return [
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
            for call in listed
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f" ({explain_json(error, text)})" if isinstance(error, ValueError | RecursionError) else ""
        raise DataError(
            f"{where} is a call of a function, {str(text)[:60]!r}{reason}; expected JSON such as "
            '{"name": "add", "arguments": {"a": 1}}'
        ) from None


def list_systems(row: Mapping[str, Any], fields: Collection[str] = ()) -> dict[str, str]:
    """Return the columns that hold the system message of this row alone, and their texts; {} where ``fields`` of which
    the prompt is made are among these columns.

    Raises:
        DataError: Such a column holds texts in a form that is no system message.
    """
    values = {name: row[name] for name in _SYSTEM if row.get(name)}
    if instructions := _sibling(row, "instructions"):
        values["responses_create_params.instructions"] = instructions
    return {} if values.keys() & {*fields} else {name: text for name in values if (text := _system_text(name, values))}


def _system_text(name: str, values: Mapping[str, Any]) -> str:
    """Return the text of a system message: a text, a message, or parts of the type text; "" where there is none."""
    value = read_single(values[name])
    content = cast("Mapping[str, Any]", value).get("content") if isinstance(value, Mapping) else value
    parts = [part if isinstance(part, Mapping) else {} for part in content] if isinstance(content, list) else []
    texts = [part.get("text", part.get("content")) for part in parts]
    text = content if isinstance(content, str) else "".join(text for text in texts if isinstance(text, str))
    if not text.strip() and any(text.strip() for text in list_texts(value)):
        raise DataError(
            f"column {name!r} holds {str(value)[:60]!r} ({type(value).__name__}), which would be left out of the "
            "prompt: write the system message as text, or rename the column where it means something else"
        )
    return text if text.strip() else ""


def read_tools(row: Mapping[str, Any], prompt_column: str | None) -> Any:
    """Return the tools of a row that does not have them in the column "tools"; None where there are none.

    OpenAI's older rows have "functions", the schemas without a type around them. OpenAI's rows of preferences have
    "input.tools" beside the prompt "input.messages". NeMo-Gym's have tools in "responses_create_params", with the type
    among the fields of the schema.

    Raises:
        DataError: The text of one of these columns, or of "tools", has a name twice, with different values.
    """
    if row.get("tools"):
        with name_place("column 'tools'"):
            list_tools(row["tools"])
        return None
    with name_place("column 'functions'"):
        schemas: Any = parse_json(row.get("functions"), "[", strict=True)
    if not _are_schemas(schemas):
        if nested := _read_beside(row, prompt_column):
            return nested
        schemas = _sibling(row, "tools")
        if not _are_schemas(schemas):
            return schemas or None
    return [{"type": "function", "function": {n: v for n, v in schema.items() if n != "type"}} for schema in schemas]


def _read_beside(row: Mapping[str, Any], prompt_column: str | None) -> list[Any] | None:
    """The tools in the object that holds the prompt, in OpenAI's form; None where there are none."""
    name = f"{(prompt_column or '').rpartition('.')[0]}.tools"
    if name == ".tools" or not has_column(row, name):
        return None
    with name_place(f"column {name!r}"):
        schemas = list_tools(read_column(row, name)) or []
    return schemas if schemas and all("function" in schema for schema in schemas) else None


def list_tools(value: Any) -> list[Any] | None:
    """Return the schemas of tools in a list, a schema, or the JSON text of either or of each; None for other values."""
    listed: Any = parse_json(parse_json(value, "[", strict=True), "{", strict=True)
    listed = [listed] if isinstance(listed, Mapping) else listed
    schemas = [parse_json(entry, "{", strict=True) for entry in listed] if isinstance(listed, list) else [None]
    return schemas if all(isinstance(schema, Mapping) for schema in schemas) else None


def _are_schemas(value: Any) -> bool:
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(listed) and all(isinstance(schema, Mapping) and "name" in schema for schema in listed)


def _sibling(row: Mapping[str, Any], name: str) -> Any:
    with name_place("column 'responses_create_params'"):
        params = parse_json(row.get("responses_create_params"), "{", strict=True)
    return cast("Mapping[str, Any]", params).get(name) if isinstance(params, Mapping) else None


def reads_as_text(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a text to learn whole: it has the column "text", and beside it where the text comes from
    at most."""
    return isinstance(row.get("text"), str) and all(_METADATA.fullmatch(name.lower()) for name in row if name != "text")


def explain_preference(better: str, worse: str) -> str:
    """Return the end of an error about a preference pair where none is learned."""
    return (
        f"{better!r} and {worse!r} are a preference pair, from which policies (podium train dpo) and reward models "
        f"(podium train rm) learn. To learn the better answers by supervised fine-tuning, set data.answer_column to "
        f"{better}, or data.prompt_column where {better!r} holds the whole conversation"
    )


def list_preference_pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the columns that may hold the better and the worse answer of a preference row, whatever their order.

    chosen and rejected alone come before longer names, such as response_chosen. Columns that say something of answers,
    such as chosen_model and score_chosen, hold none.
    """
    pairs = list(dict.fromkeys(pair for name in row if (pair := columns_of_pair(name, row)) is not None))
    if plain := [pair for pair in pairs if pair in _CHOSEN]:
        return plain
    pairs = [pair for pair in pairs if not _is_of_answers(*pair)]
    figures = [pair for pair in pairs if any(isinstance(row[name], bool | int | float) for name in pair)]
    return figures if len(figures) == len(pairs) else [pair for pair in pairs if pair not in figures]


def _is_of_answers(better: str, worse: str) -> bool:
    """Whether columns say where two answers come from, or how good they are."""
    other = split_name(worse)
    words = "_".join(word for word in split_name(better) if word in other)
    return bool(words) and (is_metadata(words) or _FIGURE.fullmatch(words) is not None)


def split_name(name: str) -> list[str]:
    """Return the words of a name, as in score_chosen, chosen-score or chosenScore."""
    return re.split(r"[_-]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def columns_of_pair(name: str | None, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the column ``name`` of a better answer and that of the worse one beside it; None where it is no such
    column."""
    for better, worse in _CHOSEN:
        if name is not None and better in name and worse not in name and name.replace(better, worse) in row:
            return name, name.replace(better, worse)
    return None


def check_meaning(row: Mapping[str, Any], columns: Sequence[str | None], *, in_session: bool = False) -> None:
    """Refuse a row with a column that changes what prompt and answer mean, and that Podium does not read.

    Args:
        columns: The columns that are read, or templates of them.
        in_session: Whether an environment reads the row, which may read any column.

    Raises:
        DataError: There is one. The message names it and the remedy.
    """
    if "completion" in columns and str(row.get("label")).lower() in ("false", "0", "0.0"):
        raise DataError(
            f"column 'label' is {str(row['label']).lower()}, which marks the completion as a bad one (KTO), "
            "and it would be learned or rewarded as a good one; take such rows out, or the column where it means "
            "something else"
        )
    with name_place("column 'history'"):
        history: Any = parse_json(parse_json(row.get("history"), "[", strict=True), "{", strict=True)
    read = {field.partition(".")[0] for column in columns for field in list_fields(column)}
    holds_turns = isinstance(history, list | Mapping) and any(text.strip() for text in list_texts(history))
    if holds_turns and not in_session and "history" not in read:
        turns = write_count(len(history), "earlier turn") if isinstance(history, list) else "earlier turns"
        raise DataError(
            f"column 'history' holds {turns}, which would be left out of the "
            'prompt; write them as messages, [{"role": "user", "content": "…"}, …], or rename the column where it '
            "means something else"
        )
    options = parse_json(row.get("chat_template_kwargs"), "{")
    options = cast("Mapping[str, Any]", options) if isinstance(options, Mapping) else {str(options): options or None}
    if names := [name for name, value in options.items() if value is not None]:
        raise DataError(
            f"column 'chat_template_kwargs' sets {', '.join(names)[:60]} for this row alone, which Podium does not "
            "read; set data.chat_template_kwargs for all rows, and take the column out"
        )
