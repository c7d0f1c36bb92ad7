"""From the parameters of a request to what it may draw: bans, biases and grammars.

``logit_bias`` of -100 bans an id, and of 100 leaves only such ids, as the OpenAI API means them: both are masks, which
are recorded. Any other bias changes probabilities without leaving ids out. It has no kept set, and a trainer that does
not add the same bias would take the sampled distribution for the policy's, so it is refused in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from podium.rollout.engines.constraints import Constraint
from podium_agents.service.structured import AnswerGrammar
from podium_agents.service.wire import Refusal

__all__ = ["make_constraint"]

_BAN: Final = -100.0
_FORCE: Final = 100.0


def make_constraint(
    bias: Mapping[int, float], grammar: AnswerGrammar | None, *, vocabulary: int, training: bool
) -> Constraint | None:
    """Return what a request may draw; None for everything.

    Args:
        bias: Its ``logit_bias``.
        grammar: The grammar of its answer; None for any text.
        vocabulary: The number of ids.
        training: Whether what is drawn is trained on.

    Raises:
        Refusal: An id is none of the vocabulary's, every id is banned, or a bias cannot be trained.
    """
    bias = {token_id: value for token_id, value in bias.items() if value}
    if not bias and grammar is None:
        return None
    if bias and (largest := max(bias)) >= vocabulary:
        raise Refusal(400, f"logit_bias.{largest}: the vocabulary has {vocabulary} tokens", "logit_bias")
    forced = [token_id for token_id, value in bias.items() if value >= _FORCE]
    banned = [token_id for token_id, value in bias.items() if value <= _BAN]
    between = {} if forced else {token_id: value for token_id, value in bias.items() if _BAN < value < _FORCE}
    if training and between:
        token_id, value = next(iter(between.items()))
        raise Refusal(
            400,
            f"logit_bias.{token_id} = {value:g}: in training only -100, which bans a token, and 100, which leaves only "
            "such tokens, are possible, because any other bias draws from a distribution that is not the policy's",
            "logit_bias",
            "unsupported",
        )
    if len(banned) == vocabulary:
        raise Refusal(400, "logit_bias bans every token of the vocabulary", "logit_bias")
    wire: dict[str, Any] = {}
    if bias:
        wire["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    if grammar is not None:
        wire["structured_outputs"] = {"grammar": grammar.text}
    return Constraint(bias=between, only=forced, banned=() if forced else banned, grammar=grammar, wire=wire)
