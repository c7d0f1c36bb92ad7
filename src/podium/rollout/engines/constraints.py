"""What one request may draw: a mask of ids for each token, and a bias of logits.

    before each draw   guide.allowed() ─▶ mask ─▶ logits of all other ids become minus infinity
    after it           guide.accept(id)           the mask is recorded with the token, for the trainer

Masks are packed as :mod:`podium.data.masks` says. Equal masks of a completion are one object.

Legend: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from podium.data.masks import pack_ids, unpack_masks
from podium.errors import GenerationError

__all__ = ["Constraint", "Grammar", "Guide", "Guided", "restrict_logits"]


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


def restrict_logits(logits_BV: Tensor, rows: Sequence[int], guided: Sequence[Guided]) -> list[GenerationError | None]:
    """Add the biases of ``rows`` to their logits, in place, and give ids that may not come none. Return the error of
    each row for which no token is allowed, whose logits stay as they are."""
    errors = list[GenerationError | None]([None] * len(rows))
    masked, masks = list[int](), list[bytes]()
    for index, (row, state) in enumerate(zip(rows, guided, strict=True)):
        try:
            mask = state.next_mask()
        except GenerationError as error:
            errors[index] = error
            continue
        if state.constraint.bias:
            ids, values = (part.to(logits_BV.device) for part in state.constraint.biased)
            within = ids < logits_BV.shape[1]
            logits_BV[row].index_add_(0, ids[within], values[within])
        if mask:
            masked.append(row)
            masks.append(mask)
    if masked:
        packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1)
        outside = unpack_masks(packed.to(logits_BV.device), logits_BV.shape[1]).logical_not_()
        for index, row in enumerate(masked):
            logits_BV[row].masked_fill_(outside[index], -torch.inf)
    return errors
