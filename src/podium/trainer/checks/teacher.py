"""Checks of a teacher before the run starts: each id must mean the same token to teacher and policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.errors import ConfigError
from podium.models.loading import longest_text, vocabulary_size
from podium.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.runs.config import PPOConfig

__all__ = ["check_teacher"]

_REMEDY = "choose a teacher of the same family, or train the policy from a model with the teacher's tokenizer"


def check_teacher(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, longest: int | None) -> None:
    """Check that the teacher, if there is one, has the policy's vocabulary, and positions for its texts.

    Args:
        longest: The most tokens of a prompt with its completion; None where they fill all of the model's positions.

    Raises:
        ConfigError: The teacher cannot be read, an id means another token to it, or it has too few positions.
    """
    if not config.algorithm.needs_teacher:
        return
    teacher = config.teacher_model
    who = f"algorithm.options.teacher = {teacher.path!r}"
    try:
        rows = vocabulary_size(teacher)
        theirs = load_tokenizer(teacher.path).get_vocab()
    except ConfigError as error:
        raise ConfigError(
            f"{who}, whose vocabulary is compared with that of model.path by the tokenizer in its directory: {error}"
        ) from None
    own_rows = vocabulary_size(config.model)
    own_ids = {token: id for token, id in tokenizer.get_vocab().items() if id < own_rows}
    other = {token: id for token, id in own_ids.items() if theirs.get(token) != id}
    if other:
        token, id = min(other.items(), key=lambda item: item[1])
        meaning = f"the id {theirs[token]}" if token in theirs else "none"
        raise ConfigError(
            f"{who} has another vocabulary than model.path: {len(other):,} of {len(own_ids):,} tokens have other ids, "
            f"such as {token!r}, which is {id} to the policy and {meaning} to the teacher, so that its "
            f"log-probabilities would be those of other text: {_REMEDY}"
        )
    if (last := max(own_ids.values(), default=0)) >= rows:
        raise ConfigError(
            f"{who} has {rows:,} rows, and the policy's tokenizer has the id {last:,}: the teacher's tokenizer is not "
            f"its own; {_REMEDY}"
        )
    needed, most = longest if longest is not None else longest_text(config.model), longest_text(teacher)
    if most is not None and needed is not None and needed > most:
        raise ConfigError(
            f"{who} has {most:,} positions, and a prompt with its completion may have {needed:,} tokens: lower "
            "sampling.max_new_tokens or data.max_prompt_tokens, or choose a teacher with more positions"
        )
