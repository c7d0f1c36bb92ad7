"""Answers as a reward model reads them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.encode import EncodedPairs, TokenRows
from podium.rollout.tasks.messages import strip_end
from podium.rollout.tasks.reward_encoder import RewardEncoder, list_scored_tools
from podium.spelling import write_share
from podium.telemetry import Note, emit
from podium_preferences.rows import EncodedPreferences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_for_scorer"]


def encode_for_scorer(
    rows: EncodedPreferences, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> EncodedPreferences:
    """Return ``rows`` with the ids that a reward model reads of these answers when it is used. The mask is set at the
    last of them, after which the score is read. Pairs of which it reads both answers alike are left out, and a note
    says how many.

    Raises:
        ConfigError: A setting would have no effect where the reward model is used.
        DataError: The template cannot write a conversation, or no pair is left.
    """
    _check_settings(rows, tokenizer, config)
    encoder = RewardEncoder(tokenizer, config, "the run")
    values, offsets, last = array("i"), array("q", [0]), array("b")
    for (ids, mask), example in zip(rows.answers, rows.answers.examples, strict=True):
        prompt, text = str(tokenizer.decode(ids[: mask.index(True)])), strip_end(example.answer or "", encoder.closings)
        turns = example.turns or [{"role": "assistant", "content": example.answer or ""}]
        with example.name_in_errors():
            tokens = encoder.encode_answer(example.prompt, turns, f"{prompt}{text}", list_scored_tools(example))
            if not tokens:
                raise DataError("the text has no tokens; take the row out")
        values.extend(tokens)
        offsets.append(len(values))
        last.extend([0] * (len(tokens) - 1) + [1])
    places = torch.frombuffer(offsets, dtype=torch.int64).clone()
    ids = TokenRows(torch.frombuffer(values, dtype=torch.int32).clone(), places)
    marks = TokenRows(torch.frombuffer(last, dtype=torch.int8).clone().view(torch.bool), places)
    answers = EncodedPairs(ids, marks, rows.answers.examples, ids.digest if rows.digest else "")
    return _without_equal_pairs(rows.with_answers(answers))


def _check_settings(rows: EncodedPreferences, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    """Check that a reward model reads the rows in the same way where it is used. Raises ConfigError."""
    for name, value in (("chat_template", "none"), ("overlong", "cut")):
        if getattr(config, name) == value and (name != "chat_template" or tokenizer.chat_template):
            raise ConfigError(f"data.{name} = {value!r}: {_UNREAD[name]}; leave it out")
    if config.chat_template_kwargs:
        raise ConfigError(
            f"data.chat_template_kwargs = {dict(config.chat_template_kwargs)}: {_UNREAD['chat_template']}"
        )
    stored: Any = tokenizer.chat_template
    has_another = isinstance(stored, dict) and "tool_use" in stored and config.chat_template not in ("auto", "tool_use")
    if has_another and any(map(list_scored_tools, rows.examples)):
        raise ConfigError(
            f"data.chat_template = {config.chat_template!r}: there are rows with tools, which a reward model reads by "
            "the template tool_use of its tokenizer where it is used; leave it out, or take tool_use out of the "
            "tokenizer"
        )


_UNREAD = {
    "chat_template": "a reward model is used with the chat template of its tokenizer, without variables",
    "overlong": "a reward model reads prompts whole where it is used",
}


def _without_equal_pairs(rows: EncodedPreferences) -> EncodedPreferences:
    """The rows without pairs of equal ids. Raises DataError if none is left."""
    equal = [number for number, row in enumerate(rows) if len(row.answers) == 2 and row.answers[0] == row.answers[1]]
    if not equal:
        return rows
    reason = (
        f"{write_share(len(equal), len(rows), 'pair', 'has', 'have')} two answers of which the chat template writes "
        "the same text, so that a reward model would see no difference"
    )
    remedy = "set data.chat_template to one that writes what they differ in"
    first = rows.examples[equal[0]].place
    if len(equal) == len(rows):
        raise DataError(f"{first}: {reason}: {remedy}, or take the rows out")
    left_out = "is left out" if len(equal) == 1 else "are left out, the first of them"
    emit(Note(f"{reason}, and {left_out} {first}: {remedy}"))
    return rows.take(sorted({*range(len(rows))} - {*equal}))
