"""The token ids that a reward model reads: it has a tokenizer and a chat template of its own."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from podium.errors import ConfigError, DataError
from podium.exceptions import describe_error
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.encode import EncodedPairs, TokenRows
from podium.rollout.tasks.examples import Example, template_messages
from podium.rollout.tasks.preferences import EncodedPreferences
from podium.rollout.tasks.templates import chat_template
from podium.rollout.tasks.writer import INSTRUCTING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_for_scorer", "encode_scored"]


def encode_scored(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    turns: Sequence[Mapping[str, Any]],
    text: str,
    system_prompt: str,
    who: str,
) -> list[int]:
    """Return the ids of a conversation that a reward model scores.

    Args:
        template: Its chat template. None encodes ``text`` instead.
        turns: Prompt and answer as messages.
        text: Prompt and answer as one text.
        system_prompt: The system message of conversations without one of their own.
        who: The reward model, for errors.

    Raises:
        DataError: The template cannot write the conversation.
    """
    if template is None:
        return cast("list[int]", tokenizer(text)["input_ids"])
    if system_prompt and turns[0]["role"] not in INSTRUCTING:
        turns = [{"role": "system", "content": system_prompt}, *turns]
    try:
        written: Any = tokenizer.apply_chat_template(
            cast("list[Any]", [*turns]), tokenize=False, chat_template=template
        )
    except Exception as error:  # templates raise what they like, by raise_exception too
        roles = ", ".join(str(turn.get("role")) for turn in turns)
        raise DataError(
            f"the chat template of {who} cannot write a conversation of {roles}: {describe_error(error)}; change the "
            "prompts, or data.system_prompt"
        ) from error
    return cast("list[int]", tokenizer(written, add_special_tokens=False)["input_ids"])


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
    values, offsets, last = array("i"), array("q", [0]), array("b")
    for (ids, mask), example in zip(rows.answers, rows.answers.examples, strict=True):
        prompt = str(tokenizer.decode(ids[: mask.index(True)]))
        with example.name_in_errors():
            tokens = encode_scored(
                tokenizer, template, _turns(example), f"{prompt}{example.answer or ''}", config.system_prompt, "the run"
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


def _turns(example: Example) -> list[dict[str, Any]]:
    """Prompt and answer as messages."""
    prompt: Any = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    answer = example.turns or [{"role": "assistant", "content": example.answer or ""}]
    return template_messages([*prompt, *answer])
