"""The text of each row of an environment's sessions, turn by turn, for people to read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from podium.data import Batch, fields
from podium.trainer.token_texts import TokenTexts

__all__ = ["Conversation", "conversations"]


@dataclass
class Conversation:
    """One row as turns. A turn consists of the text that the model read since the turn before, and of the model's
    answer.

    Attributes:
        text: The whole row, special tokens included.
        read: By turn, the text that the model read, special tokens included.
        said: By turn, the model's answer, without special tokens.
        tokens: By turn, the number of sampled tokens.
        rewards: By turn, the reward that its last token carries.
        lengths: For each sampled token of all turns, the number of characters of ``said`` that it wrote; None if the
            text of a turn differs from the texts of its tokens.
    """

    text: str = ""
    read: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] | None = field(default_factory=list)


def conversations(batch: Batch, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> list[Conversation]:
    """Return the conversations of ``batch``, whose ``tokens``, ``turn`` and ``token_rewards`` are in this process."""
    tokens, turns, rewards = (
        [row.tolist() for row in batch.jagged(name).unbind()]
        for name in (fields.TOKENS, fields.TURN, fields.TOKEN_REWARDS)
    )
    return [
        _conversation(ids, row_turns, earned, tokenizer, texts)
        for ids, row_turns, earned in zip(tokens, turns, rewards, strict=True)
    ]


def _conversation(
    ids: list[int],
    turns: Sequence[int],
    rewards: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenTexts,
) -> Conversation:
    conversation = Conversation(str(tokenizer.decode(ids, skip_special_tokens=False)))
    start, read = 0, ""
    for turn, run in itertools.groupby(turns):
        stop = start + len(list(run))
        answer_ids = ids[start:stop]
        if turn < 0:
            read = str(tokenizer.decode(answer_ids, skip_special_tokens=False))
        else:
            answer = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
            lengths = texts.lengths(answer_ids, answer)
            conversation.read.append(read)
            conversation.said.append(answer)
            conversation.tokens.append(len(answer_ids))
            conversation.rewards.append(sum(rewards[start:stop]))
            conversation.lengths = (
                None if lengths is None or conversation.lengths is None else conversation.lengths + lengths
            )
            read = ""
        start = stop
    return conversation
