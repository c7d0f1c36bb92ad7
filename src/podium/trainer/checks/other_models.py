"""Checks of the models that read the policy's ids, the teacher and a critic of its own, before the run starts: each id
must mean the same token to them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from podium.errors import ConfigError
from podium.models import ModelConfig
from podium.models.loading import position_limit, vocabulary_size
from podium.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.runs.config import PPOConfig

_REMEDIES: Final = {
    "teacher": "choose a teacher of the same family, or train the policy from a model with the teacher's tokenizer",
    "critic": "choose a critic of the same family, or leave critic.path out, so that it begins as the policy",
}


def check_other_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, longest: int | None) -> None:
    """Check that the teacher and the critic, if there are such, have the policy's vocabulary, and positions for its
    texts.

    Args:
        longest: The most tokens of a prompt with its completion; None where they fill all of the model's positions.

    Raises:
        ConfigError: The model cannot be read, an id means another token to it, or it has too few positions.
    """
    if config.algorithm.needs_teacher:
        _check("teacher", "algorithm.options.teacher", config.teacher_model, config, tokenizer, longest)
    if config.critic.path and config.has_critic:
        model = replace(config.model, path=config.critic.path, tokenizer="", config={}, lora=None)
        _check("critic", "critic.path", model, config, tokenizer, longest)


def _check(
    role: str,
    key: str,
    model: ModelConfig,
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    longest: int | None,
) -> None:
    who, remedy = f"{key} = {model.path!r}", _REMEDIES[role]
    try:
        rows = vocabulary_size(model)
        theirs = load_tokenizer(model.path).get_vocab()
    except ConfigError as error:
        raise ConfigError(
            f"{who}: its vocabulary is compared with that of model.path, so its directory must hold the files of its "
            f"tokenizer: {error}"
        ) from None
    own_rows = vocabulary_size(config.model)
    own_ids = {token: id for token, id in tokenizer.get_vocab().items() if id < own_rows}
    other = {token: id for token, id in own_ids.items() if theirs.get(token) != id}
    if other:
        token, id = min(other.items(), key=lambda item: item[1])
        meaning = f"the id {theirs[token]}" if token in theirs else "none"
        what = "log-probabilities" if role == "teacher" else "values"
        raise ConfigError(
            f"{who} has another vocabulary than model.path: {len(other):,} of {len(own_ids):,} tokens have other ids, "
            f"such as {token!r}, which is {id} to the policy and {meaning} to the {role}, so that its {what} would be "
            f"those of other text: {remedy}"
        )
    if (last := max(own_ids.values(), default=0)) >= rows:
        raise ConfigError(
            f"{who} has {rows:,} ids, and the policy's tokenizer has the id {last:,}: the {role}'s tokenizer is not "
            f"its own; {remedy}"
        )
    needed, most = longest if longest is not None else position_limit(config.model), position_limit(model)
    if most is not None and needed is not None and needed > most:
        raise ConfigError(
            f"{who} has {most:,} positions, and a prompt with its completion may have {needed:,} tokens: lower "
            f"sampling.max_new_tokens or data.max_prompt_tokens, or choose a {role} with more positions"
        )
