"""Load examples: rows are read, columns are mapped, and held-out examples are kept apart.

    files ─┐
    hub ───┼─▶ (place, row) ─▶ Example ─▶ training side or held-out side ─▶ at most `limit`
    tasks ─┘

The side of an example depends on the text of its prompt alone: on no seed, no order and no other row. The sides are
therefore disjoint in every run and with every seed, and equal prompts are on one side.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, Literal, NoReturn, TypeGuard

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.bad_rows import BadRows, name_place
from podium.rollout.tasks.config import DataConfig, name_sources, show_sources
from podium.rollout.tasks.forms import (
    CONVERSATIONS,
    NESTED_ANSWERS,
    NESTED_PROMPTS,
    Example,
    check_meaning,
    columns_hint,
    explain_preference,
    fill_template,
    has_column,
    is_missing,
    is_template,
    list_fields,
    list_preference_pairs,
    list_systems,
    read_column,
    read_messages,
    read_single,
    read_tools,
    read_value,
    reads_as_text,
)
from podium.rollout.tasks.messages import (
    INSTRUCTING,
    Messages,
    check_messages,
    half_pair,
    is_conversation,
    message_text,
    parse_json,
)
from podium.rollout.tasks.notes import MissingPart, emit_notes, note_forms
from podium.rollout.tasks.rows import (
    PlacedRow,
    dataset_rows,
    find_files,
    generate_rows,
    is_generated,
    means_files,
    read_rows,
    split_names,
    tell_splits,
)
from podium.spelling import write_count
from podium.telemetry import Note, emit

RowReader = Callable[[str, dict[str, Any], DataConfig], "Example"]
GENERATED_ITEMS: Final = 10_000  # training examples of a generated task, unless data.train_items says otherwise
_SPECS: Final = "expected a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, a dataset, or reasoning_gym:TASK"
_COMPLETION: Final = "completion"  # the column that holds the answer where the data have no other
_WRITTEN_OUT: Final = re.compile(r"""\s*\[\s*\{(?=.*['"](role|from)['"]\s*:).*['"](content|value)['"]\s*:""", re.DOTALL)
"""Messages as the text of JSON or of Python."""
_PATIENCE: Final = 200  # a task is exhausted when this many problems of a side bring no new one


def load_examples(
    spec: str | Sequence[str] | Mapping[str, float],
    config: DataConfig,
    split: Literal["train", "test"] = "train",
    seed: int = 0,
    limit: int | None = None,
    read: RowReader | None = None,
    evaluates: bool = True,
) -> list[Example]:
    """Load the examples of one side of the data.

    Args:
        spec: The data, written as in ``config.train``. Of several sources, examples come in the order of the sources
            and have the names of them.
        split: "train", or "test" for held-out examples. Held-out examples come from ``config.eval`` if that is set,
            else from ``config.eval_split`` of a hub dataset that has it. Otherwise they are the share
            ``config.holdout`` of ``spec``, which "train" leaves out.
        seed: Seed of generated tasks. Other data come in their own order.
        limit: Largest number of examples: the first ones of each source of "train", a fixed pseudo-random choice of
            "test".
        read: Makes an example of a row; by default :func:`map_columns`.
        evaluates: Whether the run evaluates held-out examples. If not, a note says how to train on them as well.

    Raises:
        ConfigError: The specification or the options are wrong.
        DataError: A file, a column or a row is missing or malformed, or nothing is left. The message names the file
            and the line.
    """
    held_out, read = split == "test", read or map_columns
    first_source = next(iter(config.eval_sets.values()))  # of several, whoever loads takes one at a time
    if held_out and first_source:
        shares = first_source == spec or (not isinstance(spec, str) and first_source in spec)
        config = config.of_source(first_source)
        examples = _load_source(first_source, config, shares, held_out, seed, limit, read, evaluates)
        return examples or _refuse_empty(first_source, config, held_out)
    sources = (spec,) if isinstance(spec, str) else tuple(spec)
    if not any(sources):
        keys = "neither data.eval nor data.train is set" if held_out else "data.train is not set"
        raise ConfigError(f"{keys}: {_SPECS}")
    if limit is None and not held_out:
        limit = config.train_items
    several, examples = len(sources) > 1, list[Example]()
    for source, name in zip(sources, name_sources(sources), strict=True):
        loaded = _load_source(source, config.of_source(source), True, held_out, seed, limit, read, evaluates)
        if not loaded and not held_out:
            _refuse_empty(source, config, held_out)
        examples += [replace(example, source=name) for example in loaded] if several else loaded
    examples = _choice(examples, limit) if held_out and several else examples
    return examples or _refuse_empty(show_sources(spec), config, held_out)


def _load_source(
    source: str,
    config: DataConfig,
    shares: bool,
    held_out: bool,
    seed: int,
    limit: int | None,
    read: RowReader,
    evaluates: bool,
) -> list[Example]:
    """Load the examples of one side of one source. ``shares`` says whether the training side is from this source,
    too."""
    if not is_generated(source):
        return _read_examples(source, config, held_out, limit, read, evaluates)
    shared = shares and bool({"", source} & {*config.eval_sets.values()})  # both sides are picked from one task
    side = (config.holdout if held_out else 1 - config.holdout) if shared else 1.0
    return _generate_examples(source, config, held_out, side, seed, GENERATED_ITEMS if limit is None else limit)


def _refuse_empty(source: str, config: DataConfig, held_out: bool) -> NoReturn:
    """Raise DataError: ``source`` has no examples for one side."""
    if not held_out and not config.eval and config.holdout > 0 and not is_generated(source):
        raise DataError(
            f"{source} holds no examples to train on with data.holdout = {config.holdout:g}: all of them are held out; "
            "set data.eval to held-out data, or lower data.holdout"
        )
    if held_out and not config.eval:
        raise DataError(
            f"{source} leaves no held-out examples with data.holdout = {config.holdout:g}; set data.eval to held-out "
            "data, raise data.holdout, or set eval.items to 0"
        )
    raise DataError(f"{source} holds no examples" + ("" if held_out else " to train on"))


def check_data(config: DataConfig) -> None:
    """Check ``config.train`` and ``config.eval`` without loading anything.

    Raises:
        ConfigError: ``config.train`` is not set.
        DataError: A file, or every file of a pattern, is missing. The message names the nearest.
    """
    if not config.train:
        raise ConfigError(f"data.train is not set: {_SPECS}")
    for spec in (*config.train_sources, *config.eval_sets.values()):
        if spec and not is_generated(spec) and means_files(spec):
            find_files(spec)


def _generate_examples(
    spec: str, config: DataConfig, held_out: bool, side: float, seed: int, wanted: int
) -> list[Example]:
    """Draw different problems of a side, which takes the share ``side`` of all, until there are ``wanted`` of them."""
    examples: dict[str, Example] = {}
    since = 0
    if config.prompt_column == "prompt":
        config = replace(config, prompt_column="question")
    for location, row in generate_rows(spec, config.options, seed) if side > 0 and wanted > 0 else ():
        example = map_columns(location, row, config)
        prompt = _text(example.prompt)
        since += 1
        if prompt not in examples and (side == 1 or _is_held_out(prompt, config.holdout) == held_out):
            examples[prompt] = example
            since = 0
        if len(examples) == wanted or since > _PATIENCE / side:
            break
    if held_out and 0 < len(examples) < wanted:
        emit(
            Note(
                f"{spec} has few different problems: "
                f"{write_count(len(examples), 'held-out problem was', 'held-out problems were')} found, "
                f"and {wanted} are needed; widen data.options or raise data.holdout"
            )
        )
    return list(examples.values())


def _read_examples(
    spec: str, config: DataConfig, held_out: bool, limit: int | None, read: RowReader, evaluates: bool
) -> list[Example]:
    rows, shared = _open(spec, config, held_out)
    everything, bad, untaken = _map_rows(rows, config, None if shared or held_out else limit, read)
    if not (shared and held_out):  # the training side has told of the same rows
        if bad:
            bad.tell(len(bad), len(everything) + len(bad))
        emit_notes(note_forms(spec, everything, config, untaken))
    if not shared:
        return _choice(everything, limit) if held_out else everything
    if not everything:
        raise DataError(f"{spec} holds no examples")
    mine = [e for e in everything if _is_held_out(_beginning(e), config.holdout) == held_out]
    if held_out:
        return _choice(mine, limit)
    count = len(everything) - len(mine)
    shown = (
        f"{count} of the {write_count(len(everything), 'example')} of {spec} {'is' if count == 1 else 'are'} held out"
    )
    if evaluates:
        emit(Note(f"{shown} for evaluation (data.eval names other data, data.holdout another share)"))
    elif count:
        why = "although the run evaluates none (eval.items = 0): set data.holdout to 0 to train on all of them"
        emit(Note(f"{shown} for podium eval, {why}"))
    return mine[:limit]


def _open(spec: str, config: DataConfig, held_out: bool) -> tuple[Iterator[PlacedRow], bool]:
    """Return the rows, and whether they contain both training and held-out examples."""
    shared = not config.eval and (held_out or config.holdout > 0)
    if means_files(spec):
        return (row for file in find_files(spec) for row in read_rows(file)), shared
    if os.path.isdir(path := os.path.expanduser(spec)):
        spec = path
    if shared:
        names = split_names(spec, config.options)
        shared = config.eval_split not in names
        if shared and not held_out:
            tell_splits(spec, names, config.train_split, config.eval_split)
    split = config.eval_split if held_out and not shared else config.train_split
    return dataset_rows(spec, split, config.options), shared


def _map_rows(
    rows: Iterator[PlacedRow], config: DataConfig, limit: int | None, read: RowReader
) -> tuple[list[Example], BadRows, Counter[MissingPart]]:
    """Return the examples of ``rows``, at most ``limit``, the rows of which no example can be made, and what is not
    taken of the others.

    Raises:
        ConfigError, DataError: There are such rows and ``data.bad_rows`` refuses them, or no others.
    """
    examples: list[Example] = []
    bad, untaken = BadRows(config.bad_rows), Counter[MissingPart]()
    last: float = math.inf
    for location, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            examples.append(read(location, row, config))
            untaken.update(_list_untaken(row, examples[-1], config))
        except (ConfigError, DataError) as error:
            bad.add(error)
            last = min(last, len(examples) + bad.look_ahead)
        if len(examples) == limit or len(examples) + len(bad) >= last:
            break
    bad.settle(len(examples) + len(bad))
    return examples, bad, untaken


def _list_untaken(row: Mapping[str, Any], example: Example, config: DataConfig) -> Iterator[MissingPart]:
    """Yield what a row has by the name of prompt or answer beside them, and fields without a value of templates."""
    for part, column in (("prompt", config.prompt_column), ("answer", config.answer_column)):
        fields = list_fields(column) if is_template(column, row) else []
        if column not in (None, part) and part not in fields and row.get(part) not in (None, example.row[part]):
            yield part, ""
        for field in fields:
            if has_column(row, field) and is_missing(read_column(row, field)):
                yield part, field


def map_columns(place: str, row: dict[str, Any], config: DataConfig, *, in_session: bool = False) -> Example:
    """Return the example of a row, which an environment reads where ``in_session`` is True.

    Raises:
        DataError: The row is malformed.
    """
    with name_place(place):
        prompt_column, answer_column = columns = _columns(row, config)
        check_meaning(row, columns, in_session=in_session)
        prompt = _read(row, "prompt", prompt_column)
        if prompt_column in CONVERSATIONS and not isinstance(prompt, str):
            check_messages(prompt_column, prompt)
        answer = _read(row, "answer", answer_column)
        if prompt_column is None:
            if not isinstance(answer, str):
                raise DataError(
                    f"column {answer_column!r} holds {str(answer)[:60]!r} ({type(answer).__name__}); expected text, "
                    "since data.prompt_column = null"
                )
            example = _example(answer, None, row, whole=True)
        else:
            _check_answers(columns, prompt, answer, config)
            conversation = _with_system(prompt, row, columns)
            if not isinstance(conversation, str):
                check_messages(prompt_column, conversation)
            tools = read_tools(row, prompt_column)
            is_named = config.answer_column not in (None, "answer")
            row = row if tools is None else {**row, "tools": tools}
            example = _pair(columns, conversation, answer, row, is_named=is_named)
            example = replace(example, row={**example.row, **dict(_keep_values(row, answer_column, prompt))})
        messages = [*(example.prompt if isinstance(example.prompt, list) else ()), *example.turns]
        for text in (example.prompt, example.answer, *map(message_text, messages)):
            if isinstance(text, str) and (at := half_pair(text)) is not None:
                raise DataError(
                    f"character {at + 1} of {text[:40]!r} is half of a surrogate pair, which is no text; repair the row"
                )
    return replace(example, place=place, columns=columns)


def _read(row: dict[str, Any], part: str, column: str | None) -> Any:
    """Return the prompt or the answer of ``row``: text, messages, or whatever else the column holds."""
    if column is None:
        return None
    try:
        if is_template(column, row):
            return fill_template(column, row)
        value = read_column(row, column)
    except LookupError:
        if is_template(column, row):
            name = next((field for field in list_fields(column) if not has_column(row, field)), "")
            hint = columns_hint(name, row)
            raise DataError(f"data.{part}_column = {column!r} needs {name!r}; {hint}") from None
        if pairs := list_preference_pairs(row):
            raise DataError(f"no column {column!r} for the {part}; {explain_preference(*pairs[0])}") from None
        none = " (null if there is no answer)" if part == "answer" else ""
        hint = columns_hint(column, row)
        for name in CONVERSATIONS if part == "answer" else ():
            if is_conversation(turns := _conversation(row, name)):
                hint = f"{name!r} ends with a message of the role {turns[-1]['role']!r}, and {hint}"
        raise DataError(f"no column {column!r} for the {part}; {hint}; set data.{part}_column{none}") from None
    except (ValueError, TypeError) as error:
        raise DataError(
            f"data.{part}_column = {column!r} cannot be filled: {error}; a column is {{question}}, a part of one "
            "{metadata.expression}, a brace {{ or }}"
        ) from None
    read = read_messages(None if is_missing(value) else value, column)
    if isinstance(read, str) and (_WRITTEN_OUT.match(read) or is_conversation([parse_json(read, "{")])):
        raise DataError(
            f"column {column!r} holds a conversation as text, {read[:60]!r}; expected a list of messages, which JSON "
            "Lines and Parquet can hold, and CSV as JSON in a column called messages"
        )
    return read


def _with_system(prompt: Any, row: Mapping[str, Any], columns: Sequence[str | None]) -> Any:
    """Return the prompt after the row's own system message, where the row has one in a column of its own.

    Raises:
        DataError: The row has another one, too.
    """
    used = [field for column in columns for field in list_fields(column)]
    systems = list_systems(row, used)
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not systems or not is_conversation(messages):
        return prompt
    name, text = next(iter(systems.items()))
    is_instructed = messages[0]["role"] in INSTRUCTING
    texts = {**systems, str(columns[0]): message_text(messages[0])} if is_instructed else systems
    if other := next((column for column in texts if texts[column].strip() != text.strip()), None):
        raise DataError(
            f"column {name!r} holds the system message {text[:40]!r}, and column {other!r} another, "
            f"{texts[other][:40]!r}: take one of them out"
        )
    return prompt if is_instructed else [{"role": "system", "content": text}, *messages]


def _check_answers(columns: tuple[str | None, str | None], prompt: Any, answer: Any, config: DataConfig) -> None:
    """Check that a conversation with its answer has no other one beside it that no setting names. Raises DataError."""
    if columns[1] != _COMPLETION or config.answer_column == _COMPLETION or not _ends_with_answer(prompt):
        return
    last, other = message_text(prompt[-1]), answer_text(answer)
    if other is not None and other != last:
        raise DataError(
            f"column {columns[0]!r} ends with the answer {last[:40]!r}, and column 'completion' holds another, "
            f"{other[:40]!r}: set data.answer_column to completion, or to null for the one in {columns[0]!r}"
        )


def _keep_values(row: Mapping[str, Any], answer_column: str | None, prompt: Any) -> Iterator[tuple[str, Any]]:
    """Yield prompt and answer in the types of the data, where the example has others: a text beside a system message,
    and a list of one answer. A reward takes them apart by their types, and a text has characters in place of answers.
    """
    if isinstance(prompt, str):
        yield "prompt", prompt
    if answer_column is not None and not is_template(answer_column, row):
        value = read_value(row, answer_column)
        if read_single(value) is not value:
            yield "answer", value


def _pair(
    columns: tuple[str | None, str | None], prompt: Any, answer: Any, row: dict[str, Any], *, is_named: bool
) -> Example:
    """Return the example of a prompt with its answer, of which each may be a conversation.

    Args:
        is_named: Whether ``data.answer_column`` names the column of the answer.
    """
    if columns[0] not in CONVERSATIONS and answer is not None and _ends_with_answer(prompt):
        raise DataError(
            f"column {columns[0]!r} ends with the assistant's turn, and column {columns[1]!r} has an answer too, so "
            "that the model would speak twice: take the last message out of the prompt, or set data.answer_column to "
            "null, which makes that message the answer"
        )
    last: Any = None
    if _ends_with_answer(prompt):
        *prompt, last = prompt
        if not prompt:
            raise DataError(f"column {columns[0]!r} holds no message before the assistant's answer")
        if not is_named and columns[1] != _COMPLETION:  # what a reward compares with, and nothing to learn
            return _example(prompt, message_text(last) if answer is None else answer, row, turns=[last], whole=True)
    if is_conversation(answer):
        check_messages(columns[1], answer)
        if answer[-1]["role"] != "assistant":
            raise DataError(
                f"column {columns[1]!r} ends with a message of the role {answer[-1]['role']!r}; expected the "
                "assistant's"
            )
        prompt, turns = _without_prompt(columns, prompt, answer)
        return _example(prompt, turns, row, turns=turns)
    if last is None or (text := answer_text(answer)) is None:
        return _example(prompt, answer, row)
    turn = last if text == message_text(last) else {"role": "assistant", "content": text}
    return _example(prompt, answer, row, turns=[turn], whole=True)


def _without_prompt(
    columns: tuple[str | None, str | None], prompt: str | Messages, answer: Messages
) -> tuple[str | Messages, Messages]:
    """Return the prompt and the turns that follow it. The answer may begin with the prompt, which is then cut off."""
    first = next(index for index, message in enumerate(answer) if message["role"] == "assistant")
    if first == 0:
        return prompt, answer
    head = answer[:first] if isinstance(prompt, str) else answer[: len(prompt)]
    repeats = message_text(head[-1]) == prompt if isinstance(prompt, str) else head == prompt
    turns = answer[len(head) :]
    if not repeats or turns[0]["role"] != "assistant":
        raise DataError(
            f"column {columns[1]!r} begins with a message of the role {answer[0]['role']!r} that is not the prompt in "
            f"column {columns[0]!r}; expected the assistant's answer. A column that holds the whole conversation is "
            "named by data.prompt_column"
        )
    return (prompt if isinstance(prompt, str) and len(head) == 1 else head), turns


def _columns(row: Mapping[str, Any], config: DataConfig) -> tuple[str | None, str | None]:
    """Return the columns of this row that hold prompt and answer. The prompt's is None for a text that is learned
    whole, the answer's if there is none.

    A column that the configuration does not name may be one that the field's data have: "messages", "completion".
    """
    prompt, answer = config.prompt_column, config.answer_column
    usual_answer = answer == "answer" and "answer" not in row
    if prompt == "prompt":
        named = (name for name in (*CONVERSATIONS, *NESTED_PROMPTS) if has_column(row, name))
        conversation = next(named, None)
        if conversation is None and usual_answer and "prompt" not in row and reads_as_text(row):
            return None, "text"
        repeats = usual_answer and _COMPLETION not in row  # UltraChat's prompt is the first turn of its messages
        if conversation is not None and (
            row.get("prompt") is None or (repeats and _ends_with_answer(_conversation(row, conversation)))
        ):
            prompt = conversation
    if usual_answer:
        if _COMPLETION in row:
            answer = _COMPLETION
        elif nested := next((name for name in NESTED_ANSWERS if has_column(row, name)), None):
            answer = nested
        elif prompt is not None and _ends_with_answer(_conversation(row, prompt)):
            answer = None
    return prompt, answer


def _conversation(row: Mapping[str, Any], column: str) -> Any:
    try:
        return read_messages(read_column(row, column), column)
    except (LookupError, DataError):  # of which the reading of the column tells
        return None


def _ends_with_answer(prompt: object) -> TypeGuard[Messages]:
    return is_conversation(prompt) and prompt[-1]["role"] == "assistant"


def answer_text(answer: object) -> str | None:
    """Return an answer as text: text itself, a number or date as Python writes it, the text of the last of messages.

    None means that the answer is of another kind, or missing.
    """
    if answer is None or isinstance(answer, str):
        return answer
    if is_conversation(answer):
        return message_text(answer[-1])
    return None if isinstance(answer, Mapping | Sequence | Set) else str(answer)


def _example(prompt: str | Messages, answer: Any, row: dict[str, Any], **fields: Any) -> Example:
    text = None if answer is None else answer_text(answer)
    shown = str(answer) if text is None and answer is not None else text
    return Example(prompt, shown, {**row, "prompt": prompt, "answer": answer}, **fields)


def _text(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def _beginning(example: Example) -> str:
    """Return the prompt of an example as text. Of a conversation that is learned whole it is what precedes the first
    answer: another row may have this conversation up to an earlier turn, and each turn is learned."""
    prompt = example.prompt
    if example.whole and isinstance(prompt, list):
        prompt = [*takewhile(lambda message: message["role"] != "assistant", prompt)] or prompt
    return _text(prompt)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _is_held_out(text: str, share: float) -> bool:
    return _digest(text) < share * 2**64


def _choice(examples: list[Example], limit: int | None) -> list[Example]:
    """Choose at most ``limit`` of all examples, the same ones each time, in their own order."""
    if limit is None or limit >= len(examples):
        return examples
    salted = ((_digest(f"choice/{_text(example.prompt)}"), index) for index, example in enumerate(examples))
    return [examples[index] for index in sorted(index for _, index in heapq.nsmallest(limit, salted))]
