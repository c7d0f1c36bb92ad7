"""The token ids that a reward model reads: it has a tokenizer and a chat template of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from podium.errors import DataError
from podium.exceptions import describe_error
from podium.rollout.tasks.messages import INSTRUCTING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_scored"]


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
