"""From the parameters of a request to what it may draw: bans, biases and grammars.

``logit_bias`` of -100 bans an id, and of 100 leaves only such ids, as the OpenAI API means them: both are masks, which
are recorded. Any other bias changes probabilities without leaving ids out. It has no kept set, and a trainer that does
not add the same bias would take the sampled distribution for the policy's, so it is refused in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from podium.data.masks import pack_ids
from podium.errors import GenerationError
from podium_agents.service.request_bodies import Refusal
from podium_agents.service.structured import AnswerGrammar

__all__ = ["Constraint", "Grammar", "Guide", "make_constraint"]

_BAN: Final = -100.0
_FORCE: Final = 100.0


class Guide(Protocol):
    """What may come next in one completion."""

    def allowed(self) -> bytes:
        """Return the packed mask of the ids that may come next, stop tokens among them where the text may end.

        Raises:
            GenerationError: No token can go on with the text.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on with a token that was allowed.

        Raises:
            GenerationError: The text has become too complex to be followed.
        """
        ...


class Grammar(Protocol):
    """Texts that a completion may be."""

    def begin(self, stop_token_ids: Sequence[int]) -> Guide:
        """Return the guide of a new completion. Each of the stop tokens ends the completion."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraint:
    """What one request may draw.

    Attributes:
        bias: By id, a number that is added to its logit, before the temperature.
        only: The only ids that may be drawn; empty for every id.
        banned: Ids that may not be drawn.
        grammar: The texts that may be drawn; None for every text.
        wire: The parameters by which a request asks for all this, for an engine in another process.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    only: Sequence[int] = ()
    banned: Sequence[int] = ()
    grammar: Grammar | None = None
    wire: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def biased(self) -> tuple[Tensor, Tensor]:
        """The ids of ``bias`` and its numbers, as tensors."""
        return torch.tensor([*self.bias], dtype=torch.int64), torch.tensor([*self.bias.values()], dtype=torch.float32)

    def begin(self, stop_token_ids: Sequence[int], vocabulary: int) -> Guided:
        """Return the state of a new completion over ``vocabulary`` ids."""
        return Guided(self, stop_token_ids, vocabulary)


class Guided:
    """One completion under a constraint.

    Args:
        constraint: What may be drawn.
        stop_token_ids: The tokens that end the completion.
        vocabulary: The number of ids.

    Attributes:
        masks: The mask of each token drawn so far, packed, each of ``ceil(vocabulary / 8)`` bytes or ``b""``.
    """

    def __init__(self, constraint: Constraint, stop_token_ids: Sequence[int], vocabulary: int) -> None:
        self.constraint, self.masks = constraint, list[bytes]()
        self._guide = None if constraint.grammar is None else constraint.grammar.begin(stop_token_ids)
        self._width = (vocabulary + 7) // 8
        self._known: dict[bytes, bytes] = {}
        self._static = b""
        if constraint.only:
            self._static = pack_ids(constraint.only, vocabulary)
        if constraint.banned:
            others = pack_ids(constraint.banned, vocabulary, without=True)
            self._static = _intersect_masks(self._static, others) if self._static else others
        self._mask = b""

    @property
    def restricts(self) -> bool:
        """Whether some ids may not be drawn, so that masks are recorded."""
        return self._guide is not None or bool(self._static)

    def next_mask(self) -> bytes:
        """Return the mask of the next token.

        Raises:
            GenerationError: No token is allowed.
        """
        mask = self._static
        if self._guide is not None:
            allowed = self._fit(self._guide.allowed())
            mask = _intersect_masks(mask, allowed) if mask and allowed else mask or allowed
        if mask and not any(mask):
            raise GenerationError("no token is allowed here: the grammar and logit_bias leave none to draw from")
        self._mask = self._known.setdefault(mask, mask)
        return self._mask

    def add_bias(self, logits_V: Tensor) -> None:
        """Add the constraint's bias to logits, in place."""
        if self.constraint.bias:
            ids, values = (part.to(logits_V.device) for part in self.constraint.biased)
            within = ids < len(logits_V)
            logits_V.index_add_(0, ids[within], values[within])

    def accept(self, token_id: int) -> GenerationError | None:
        """Record the token that was drawn under the latest mask, and go on with it. Return why that is impossible."""
        self.masks.append(self._mask)
        try:
            if self._guide is not None:
                self._guide.accept(token_id)
        except GenerationError as error:
            return error
        return None

    def _fit(self, mask: bytes) -> bytes:
        return mask[: self._width].ljust(self._width, b"\0") if mask and len(mask) != self._width else mask


def _intersect_masks(first: bytes, second: bytes) -> bytes:
    return (np.frombuffer(first, np.uint8) & np.frombuffer(second, np.uint8)).tobytes()


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
