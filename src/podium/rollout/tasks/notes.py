"""Notes on data that are read or trained in another way than their author may expect."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

from podium.rollout.tasks.fields import holds_speech, is_speech, list_texts
from podium.rollout.tasks.forms import (
    CONVERSATIONS,
    NESTED_ANSWERS,
    Example,
    has_column,
    is_template,
    list_systems,
    list_tools,
    read_single,
)
from podium.rollout.tasks.media import find_links
from podium.rollout.tasks.messages import Messages, message_text, strip_end
from podium.rollout.tasks.rows import TOKEN_IDS
from podium.spelling import write_count, write_share
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from podium.rollout.tasks.chat_encoder import ChatEncoder
    from podium.rollout.tasks.config import DataConfig

_OPENING: Final = re.compile(
    r"(\[/INST\]|<\|assistant\|>|<\|im_start\|>assistant|<start_of_turn>model|<\|end_header_id\|>|"
    r"\n#+ ?(Response|Answer|Assistant|Output):?|\n(Assistant|ASSISTANT|Bot|GPT):)\s*\Z"
)
"""The end of a prompt that some template has opened for an answer."""

MissingPart = tuple[str, str]
"""A part of an example, "prompt" or "answer", and a field of its template that has no value in the row; "" where a
column has the part's name and is not read as the part."""

_CONTEXTS: Final = re.compile(
    r"(.+_)?(context|passage|document|paragraph|article|story|narrative|evidence|choice|option)s?|"
    r"input|premise|hypothesis|background|instructions?|developer|prefix|suffix|prefill|assistant_prefix|"
    r"question|query|problem|system_message|few_?shots?|hints?|persona"
)
"""Columns that belong to a question or to an answer."""
_OF_CSV: Final = re.compile(r"\.(csv|tsv)\b")
_LOOKED_AT: Final = 200  # rows, for columns of texts
_SHOWN: Final = 8  # names of columns in a note
_LONGEST_NUMBER: Final = 12  # characters of a number that somebody wrote


def emit_notes(*notes: Iterable[str]) -> None:
    """Emit notes."""
    for note in chain(*notes):
        emit(Note(note))


def note_forms(
    spec: str, examples: Sequence[Example], config: DataConfig, untaken: Mapping[MissingPart, int]
) -> Iterator[str]:
    """Yield notes on what is read from columns that no setting names, and on columns that may be believed to be read.

    Args:
        spec: The data.
        untaken: How many rows have each of what is not taken.
    """
    return (f"{spec}: {note}" for note in chain(_list_read(examples, config), _list_unread(examples, config, untaken)))


def _list_read(examples: Sequence[Example], config: DataConfig) -> Iterator[str]:
    systems = Counter(
        name
        for e in examples
        if isinstance(e.prompt, list) and "system" in e.prompt[0]["role"]
        for name, text in [*list_systems(e.row, e.fields).items()][:1]
        if e.prompt[0].get("content") == text
    )
    yield from (
        f"column {name!r} is the system message of {write_count(count, 'row')}" for name, count in systems.items()
    )
    if config.answer_column == "answer":
        answers = Counter(e.columns[1] for e in examples if e.columns[1] in NESTED_ANSWERS)
        yield from (
            f"the answers of {write_count(count, 'row')} are those in {name}" for name, count in answers.items()
        )
    if opened := sum(e.columns == ("prompt", None) and bool(e.turns) for e in examples):
        yield (
            f"{write_count(opened, 'row has a prompt that ends', 'rows have prompts that end')} with the assistant's "
            "turn, which is the answer: no completion goes on with it"
        )
    rows = [e.row for e in examples[:_LOOKED_AT] if _OF_CSV.search(e.place)]
    columns = rows[0].keys() - {"prompt"} if rows else ()
    if texts := sorted(name for name in columns if all(_is_number(row.get(name)) for row in rows)):
        yield (
            f"CSV has texts alone: the numbers in {', '.join(map(repr, texts[:_SHOWN]))} are texts in each row; JSON "
            "Lines and Parquet hold numbers"
        )
    if lists := sum(read_single(value := e.row.get("answer")) is not value for e in examples):
        yield (
            f"the {'answer of 1 row is a list' if lists == 1 else f'answers of {lists:,} rows are lists'} of one: "
            "Podium's own rewards take the element, and row['answer'] of others and task['answer'] are the list"
        )
    if numbers := [e for e in examples if isinstance(value := e.row.get("answer"), float) and _is_odd(value)]:
        yield (
            f"the answers of {write_count(len(numbers), 'row')} are numbers such as {numbers[0].answer}, and "
            "are compared and learned in this form: write texts or whole numbers if another one is meant"
        )
    if texts := sum(example.is_text for example in examples):
        rows = write_count(texts, "row is text without a prompt", "rows are texts without prompts")
        yield f"{rows}, of which every token is learned"


def _is_number(value: Any) -> bool:
    """Whether a text is a number as Python reads one."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _is_odd(number: float) -> bool:
    """Whether a number is hardly written as Python does: 7.0, as pandas makes of 7, a fraction of float32, or inf,
    which a number such as 1e999 becomes."""
    return math.isinf(number) or number.is_integer() or len(str(number)) > _LONGEST_NUMBER


def _are_ids(value: Any) -> bool:
    """Whether a value is a list of whole numbers, or of lists of them."""
    if not isinstance(value, list) or not value:
        return False
    first = cast("list[Any]", value)[0]
    return isinstance(first, int) or _are_ids(first)


def _list_unread(examples: Sequence[Example], config: DataConfig, untaken: Mapping[MissingPart, int]) -> Iterator[str]:
    links = Counter(link for e in examples if (link := find_links(e.row)) is not None)
    for name, count in links.items():
        rows = write_count(count, "row has", "rows have")
        yield f"{rows} an address in {name!r}, and the model does not see what is there"
    names = dict.fromkeys(chain.from_iterable(example.row for example in examples))
    ids = [name for name in names if TOKEN_IDS.fullmatch(name)]
    for name, count in Counter(name for e in examples for name in ids if _are_ids(e.row.get(name))).items():
        rows = write_count(count, "row")
        yield f"column {name!r} of {rows} holds token ids, which are not read: texts are tokenized anew"
    contexts = [name for name in names if _CONTEXTS.fullmatch(name.lower())]
    for name, count in Counter(name for e in examples for name in contexts if _is_left_out(name, e)).items():
        yield (
            f"column {name!r} of {write_count(count, 'row')} is neither in the prompt nor in the answer: "
            "to add it, make data.prompt_column or data.answer_column a template, such as '{context}\\n{question}'"
        )
    if others := [name for name in names if name not in contexts and _is_unseen(name, examples)]:
        columns = f"column{'' if len(others) == 1 else 's'} {', '.join(map(repr, others[:_SHOWN]))}"
        yield f"the texts of the {columns} are in neither the prompt nor the answer: the model does not see them"
    for (part, field), count in untaken.items():
        column = getattr(config, f"{part}_column")
        if not field:
            yield (
                f"a reward that reads {part!r} of {write_count(count, 'row')} gets what data.{part}_column = "
                f"{column!r} names, and not the column {part!r}: rename that column for a reward that reads it"
            )
        else:
            rows = write_count(count, "row has", "rows have")
            yield f"{rows} no value in {field!r}: the template data.{part}_column leaves its place empty"
    prompts = [e for e in examples if e.answer is None and not e.turns and not e.is_text]
    empty = [e for e in prompts if has_column(e.row, e.columns[1] or "")]
    if empty and not is_template(config.answer_column, empty[0].row):
        yield (
            f"{write_share(len(empty), len(examples), 'row', 'has', 'have')} no answer in {empty[0].columns[1]!r} "
            "(null or NaN): a reward gets None in its place; take the rows out, or put the answers in"
        )
    untold = [e for e in examples if isinstance(e.prompt, str) and not e.is_text and e.row.get("tools")]
    if untold := [example.row["tools"] for example in untold if list_tools(example.row["tools"]) is None]:
        yield (
            f"column 'tools' of {write_count(len(untold), 'row')} is not written, since it holds no JSON schemas of "
            f"tools: {str(untold[0])[:40]!r}"
        )


def _is_left_out(name: str, example: Example) -> bool:
    """Whether a column that belongs to a question or an answer holds a text that is a part of neither."""
    rejected = example.preference.rejected if example.preference else None
    read = [field for mine in (example, rejected) if mine for field in (*mine.columns, *mine.fields)]
    if example.is_text or name in read:
        return False
    shown = f"{whole_text(example.prompt)}\n{example.answer}\n{rejected.answer if rejected else ''}"
    return any(text.strip() not in shown for text in list_texts(example.row.get(name)))


def _is_unseen(name: str, examples: Sequence[Example]) -> bool:
    """Whether a column holds what somebody wrote in most rows, and no prompt and no answer has it. Columns of which
    other notes tell are not looked at."""
    if name in (*CONVERSATIONS, "prompt", "answer", "tools", "functions") or is_speech(name):
        return False
    if any(e.preference is not None and isinstance(e.row.get(name), list) for e in examples[:1]):
        return False  # of several answers, each pair has two
    rows = examples[:_LOOKED_AT]
    count = sum(_is_left_out(name, e) and holds_speech(name, e.row.get(name)) for e in rows)
    return 2 * count > len(rows)


def note_turns(turns: int, rewritten: int, without_end_token: int, partial: int, opened: int) -> Iterator[str]:
    """Yield notes on turns that are not learned as their rows have them."""
    if rewritten:
        yield (
            f"the chat template changes the text of {rewritten} of {write_count(turns, 'turn')} of the assistant; "
            "many templates leave out the reasoning of earlier turns. The model learns the text that the template "
            "writes. data.split_turns makes a row of each turn, and the model then learns the whole turn"
        )
    if opened:
        yield (
            f"the chat template begins {opened} of {write_count(turns, 'turn')} of the assistant in another way than "
            "an answer that the model generates; many templates do so if later messages follow. data.split_turns "
            "makes a row of each turn, which begins like a generated answer"
        )
    if partial:
        yield (
            f"the chat template marks {partial} of {write_count(turns, 'turn')} of the assistant by "
            f"{{% generation %}} only in part, or not at all: the model does not learn the rest"
        )
    if without_end_token:
        yield (
            f"the chat template ends {without_end_token} of {write_count(turns, 'turn')} of the assistant without a "
            "special token, so the model does not learn to stop there"
        )


def note_unwritten(fields: Mapping[str, int], messages: Mapping[str, int]) -> Iterator[str]:
    """Yield notes on fields of messages that the template does not write, and on messages that it writes otherwise."""
    if fields:
        named = ", ".join(f"{name!r} of {write_count(count, 'message')}" for name, count in sorted(fields.items()))
        yield f"the chat template does not write {named}: these fields are taken for metadata"
    if messages:
        named = ", ".join(f"{count:,} of the role {role!r}" for role, count in sorted(messages.items()))
        yield (
            f"the chat template writes messages with other characters than the rows have, {named}: the model reads "
            "what the template writes, which may be a part; set data.chat_template to one that writes them whole"
        )


def note_texts(examples: Sequence[Example], encoder: ChatEncoder, *, answers: bool) -> Iterator[str]:
    """Yield notes on prompts that are empty or written already, on answers that all begin with their prompts, and on
    what the chat template writes before answers that are messages."""
    yield from _list_signs(examples, encoder, answers)
    if empty := sum(not whole_text(example.prompt).strip() for example in examples):
        yield f"{write_share(empty, len(examples), 'prompt', 'is', 'are')} empty"
    messages = [e for e in examples if not e.is_text] if encoder.template is not None else []
    if openings := [match[0] for example in messages if (match := _OPENING.search(last_text(example.prompt)))]:
        yield (
            f"{write_share(len(openings), len(examples), 'prompt', 'ends', 'end')} with {openings[0].strip()!r}, as "
            "if a template had opened the answer, and the chat template writes them as messages: data.chat_template "
            "= none takes prompts as they are"
        )
    lone = sum(not example.turns for example in messages) if answers else 0
    if lone and encoder.lead:
        yield (
            f"the chat template writes {encoder.lead!r} before an answer that is a message, and {lone} of "
            f"{write_count(len(examples), 'answer is text, which is', 'answers are texts, which are')} learned "
            "without it: write prompt and completion as messages to learn what the template writes"
        )
    pairs = ((last_text(example.prompt).strip(), example) for example in examples)
    if answers and all(text and (e.answer or "").lstrip().startswith(text) and not e.is_text for text, e in pairs):
        yield "every answer begins with its prompt, which the model reads and then learns to repeat"


def _list_signs(examples: Sequence[Example], encoder: ChatEncoder, answers: bool) -> Iterator[str]:
    """Yield a note on special tokens in the texts of messages, which are tokens to the model and no texts. An
    assistant's may have those that the template itself mentions, such as the ones around reasoning."""
    if encoder.template is None or not (names := encoder.special_texts):
        return
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    counts = Counter[tuple[str, str]]()
    for example in examples:
        if example.is_text:
            continue
        prompt = example.prompt if isinstance(example.prompt, list) else [{"role": "user", "content": example.prompt}]
        answer = [{"role": "assistant", "content": example.answer}] if example.answer and not example.turns else []
        for message in (*prompt, *((*example.turns, *answer) if answers else ())):
            text, role = message_text(message), str(message["role"])
            if role == "assistant":
                text = strip_end(text, encoder.closings)
            signs = {*pattern.findall(text)}
            counts.update((sign, role) for sign in signs if role != "assistant" or sign not in str(encoder.template))
    if counts:
        named = ", ".join(f"{sign!r} in {n:,} of the role {role!r}" for (sign, role), n in counts.most_common(5))
        yield (
            f"texts of messages have special tokens of the tokenizer, {named}: the model reads each as that token and "
            "not as its letters; if a text only mentions it, write it in another way, such as with a space in it"
        )


def note_unlearned(examples: Sequence[Example]) -> Iterator[str]:
    """Yield notes on columns that hold what was said or thought, and that are part of neither prompt nor answer."""
    unread = Counter(
        name
        for example in examples
        for name in CONVERSATIONS
        if name not in example.columns
        and example.row.get(name)
        and (example.answer or name) not in str(example.row[name])
    )
    for name, count in unread.items():
        yield f"column {name!r} of {write_count(count, 'row')} is not learned: data.prompt_column = {name} learns it"
    others = [e for e in examples if e.whole and e.turns and e.columns[1] not in (None, "completion")]
    others = [e for e in others if e.answer is not None and e.answer != message_text(e.turns[-1])]
    for name, count in Counter(e.columns[1] for e in others).items():
        yield (
            f"column {name!r} of {write_count(count, 'row')} is not learned, but the last turn of the conversation: "
            f"data.answer_column = '{{{name}}}' learns the column"
        )
    columns = Counter(
        name
        for example in examples
        for name, value in example.row.items()
        if value and is_speech(name) and name not in example.fields and name not in example.columns
    )
    for name, count in columns.items():
        yield (
            f"column {name!r} of {write_count(count, 'row')} is not learned: data.answer_column can be a template "
            f"that puts it into the answer, as in '<think>{{{name}}}</think>{{answer}}'"
        )


def last_text(prompt: str | Messages) -> str:
    """Return a prompt, or the text of its last message."""
    return prompt if isinstance(prompt, str) else message_text(prompt[-1])


def whole_text(prompt: str | Messages) -> str:
    """Return a prompt, or the texts of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))
