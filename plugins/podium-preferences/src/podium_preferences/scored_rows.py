"""Answers as a reward model reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.encode import EncodedPairs, TokenRows
from podium.rollout.tasks.forms import Example
from podium.rollout.tasks.messages import strip_end, template_messages
from podium.rollout.tasks.templates import chat_template, encode_scored
from podium_preferences.rows import EncodedPreferences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_for_scorer"]


def encode_for_scorer(
    rows: EncodedPreferences, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> EncodedPreferences:
    """Return ``rows`` with the ids that a reward model reads of these answers when it is used. The mask is set at the
    last of them, after which the score is read.

    Raises:
        ConfigError: A setting would have no effect where the reward model is used.
        DataError: The template cannot write a conversation.
    """
    template = chat_template(tokenizer, config)
    for name, value in (("chat_template", "none"), ("overlong", "cut")):
        if getattr(config, name) == value and (name != "chat_template" or tokenizer.chat_template):
            raise ConfigError(f"data.{name} = {value!r}: {_UNREAD[name]}; leave it out")
    if config.chat_template_kwargs:
        raise ConfigError(
            f"data.chat_template_kwargs = {dict(config.chat_template_kwargs)}: {_UNREAD['chat_template']}"
        )
    ends = ChatEncoder(tokenizer, config).closings
    values, offsets, last = array("i"), array("q", [0]), array("b")
    for (ids, mask), example in zip(rows.answers, rows.answers.examples, strict=True):
        prompt = str(tokenizer.decode(ids[: mask.index(True)]))
        with example.name_in_errors():
            tokens = encode_scored(
                tokenizer,
                template,
                _turns(example, ends),
                f"{prompt}{strip_end(example.answer or '', ends)}",
                config.system_prompt,
                "the run",
            )
            if not tokens:
                raise DataError("the text has no tokens; take the row out")
        values.extend(tokens)
        offsets.append(len(values))
        last.extend([0] * (len(tokens) - 1) + [1])
    places = torch.frombuffer(offsets, dtype=torch.int64).clone()
    ids = TokenRows(torch.frombuffer(values, dtype=torch.int32).clone(), places)
    marks = TokenRows(torch.frombuffer(last, dtype=torch.int8).clone().view(torch.bool), places)
    return rows.with_answers(EncodedPairs(ids, marks, rows.answers.examples, ids.digest if rows.digest else ""))


_UNREAD = {
    "chat_template": "a reward model is used with the chat template of its tokenizer, without variables",
    "overlong": "a reward model reads prompts whole where it is used",
}


def _turns(example: Example, ends: Sequence[str]) -> list[dict[str, Any]]:
    """Prompt and answer as messages, without signs of ``ends`` that the data have at the end of an answer."""
    prompt: Any = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    answer = example.turns or [{"role": "assistant", "content": example.answer or ""}]
    messages = template_messages([*prompt, *answer])
    return [{**m, "content": strip_end(m["content"], ends)} if m["role"] == "assistant" else m for m in messages]
