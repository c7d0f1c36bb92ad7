"""Notes on data that are trained in another way than their author may expect."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.example import Example
from podium.rollout.tasks.fields import is_speech
from podium.rollout.tasks.forms import CONVERSATIONS
from podium.rollout.tasks.messages import Messages, message_text
from podium.telemetry import Note, emit

__all__ = ["last_text", "pack_counts", "tell_texts", "tell_turns", "tell_unlearned", "tell_unwritten", "whole_text"]

_OPENING: Final = re.compile(
    r"(\[/INST\]|<\|assistant\|>|<\|im_start\|>assistant|<start_of_turn>model|<\|end_header_id\|>|"
    r"\n#+ ?(Response|Answer|Assistant|Output):?|\n(Assistant|ASSISTANT|Bot|GPT):)\s*\Z"
)
"""The end of a prompt that some template has opened for an answer."""


def tell_turns(turns: int, rewritten: int, endless: int, partial: int, opened: int) -> None:
    """Tell of turns that are not learned as their rows have them."""
    if rewritten:
        emit(
            Note(
                f"the chat template changes the text of {rewritten} of {turns} turns of the assistant; many templates "
                "leave out the reasoning of earlier turns. The model learns the text that the template writes. "
                "data.split_turns makes a row of each turn, and the model then learns the whole turn"
            )
        )
    if opened:
        emit(
            Note(
                f"the chat template begins {opened} of {turns} turns of the assistant in another way than an answer "
                "that the model generates; many templates do so if later messages follow. data.split_turns makes a row "
                "of each turn, which begins like a generated answer"
            )
        )
    if partial:
        emit(
            Note(
                f"the chat template marks {partial} of {turns} turns of the assistant by {{% generation %}} only in "
                "part, or not at all: the model does not learn the rest"
            )
        )
    if endless:
        emit(
            Note(
                f"the chat template ends {endless} of {turns} turns of the assistant without a special token, so the "
                "model does not learn to stop there"
            )
        )


def pack_counts(counts: Sequence[Mapping[str, int]]) -> Tensor:
    """Return counts as bytes, which are kept with token ids."""
    return torch.tensor([*json.dumps(counts).encode()], dtype=torch.uint8)


def tell_unwritten(packed: Tensor) -> None:
    """Tell of fields of messages that the template does not write, and of messages that it writes otherwise."""
    fields, messages = ({**counts} for counts in json.loads(bytes(packed.tolist())))
    if fields:
        named = ", ".join(f"{name!r} of {count:,} messages" for name, count in sorted(fields.items()))
        emit(Note(f"the chat template does not write {named}: these fields are taken for meta data"))
    if messages:
        named = ", ".join(f"{count:,} of the role {role!r}" for role, count in sorted(messages.items()))
        emit(
            Note(
                f"the chat template writes messages with other characters than the rows have, {named}: the model reads "
                "what the template writes, which may be a part; set data.chat_template to one that writes them whole"
            )
        )


def tell_texts(examples: Sequence[Example], encoder: ChatEncoder, *, answers: bool) -> None:
    """Tell of prompts that are empty or written already, of answers that all begin with their prompts, and of what the
    chat template writes before answers that are messages."""
    if empty := sum(not whole_text(example.prompt).strip() for example in examples):
        emit(Note(f"{empty} of {len(examples)} prompts are empty"))
    if encoder.template is None:
        openings = []
    else:
        openings = [match[0] for e in examples if not e.is_text and (match := _OPENING.search(last_text(e.prompt)))]
    if openings:
        emit(
            Note(
                f"{len(openings)} of {len(examples)} prompts end with {openings[0].strip()!r}, as if a template had "
                "opened the answer, and the chat template writes them as messages: data.chat_template = none takes "
                "prompts as they are"
            )
        )
    lone = sum(not e.turns and not e.is_text for e in examples) if answers and encoder.template is not None else 0
    if lone and encoder.lead:
        emit(
            Note(
                f"the chat template writes {encoder.lead!r} before an answer that is a message, and {lone} of "
                f"{len(examples)} answers are texts, which are learned without it: write prompt and completion as "
                "messages to learn what the template writes"
            )
        )
    pairs = ((last_text(example.prompt).strip(), example) for example in examples)
    if answers and all(text and (e.answer or "").lstrip().startswith(text) and not e.is_text for text, e in pairs):
        emit(Note("every answer begins with its prompt, which the model reads and then learns to repeat"))


def tell_unlearned(examples: Sequence[Example]) -> None:
    """Tell of columns that hold what was said or thought, and that are part of neither prompt nor answer."""
    columns = Counter(
        name
        for example in examples
        for name, value in example.row.items()
        if value and is_speech(name) and name not in example.fields and name not in example.columns
    )
    unread = Counter(
        name
        for example in examples
        for name in CONVERSATIONS
        if name not in example.columns
        and example.row.get(name)
        and (example.answer or name) not in str(example.row[name])
    )
    for name, count in unread.items():
        emit(Note(f"column {name!r} of {count:,} rows is not learned: data.prompt_column = {name} learns it"))
    for name, count in columns.items():
        emit(
            Note(
                f"column {name!r} of {count:,} rows is not learned: data.answer_column can be a template that puts it "
                f"into the answer, as in '<think>{{{name}}}</think>{{answer}}'"
            )
        )


def last_text(prompt: str | Messages) -> str:
    """Return a prompt, or the text of its last message."""
    return prompt if isinstance(prompt, str) else message_text(prompt[-1])


def whole_text(prompt: str | Messages) -> str:
    """Return a prompt, or the texts of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))
