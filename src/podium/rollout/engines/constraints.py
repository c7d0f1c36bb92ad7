"""What one request may draw: a mask of ids for each token, and a bias of logits. Whoever makes a request with grammars
or biases brings what implements the two protocols.

    before each draw   guided.next_mask() ─▶ mask ─▶ logits of all other ids become minus infinity
    after it           guided.accept(id)            the mask is recorded with the token, for the trainer

Masks are packed as :mod:`podium.data.masks` says. Equal masks of a completion are one object.

Legend: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from podium.data.masks import unpack_masks
from podium.errors import GenerationError


class Guided(Protocol):
    """One completion under a constraint.

    Attributes:
        masks: The mask of each token drawn so far, packed, each of ``ceil(vocabulary / 8)`` bytes or ``b""``.
    """

    masks: list[bytes]

    @property
    def restricts(self) -> bool:
        """Whether some ids may not be drawn, so that masks are recorded."""
        ...

    def next_mask(self) -> bytes:
        """Return the mask of the next token. Raises GenerationError if no token is allowed."""
        ...

    def add_bias(self, logits_V: Tensor) -> None:
        """Add what changes probabilities without leaving ids out, in place, before the temperature."""
        ...

    def accept(self, token_id: int) -> GenerationError | None:
        """Record the token that was drawn under the latest mask, and go on with it. Return why that is impossible."""
        ...


class Constraint(Protocol):
    """What one request may draw."""

    def begin(self, stop_token_ids: Sequence[int], vocabulary: int) -> Guided:
        """Return the state of a new completion over ``vocabulary`` ids. Each of the stop tokens ends the completion."""
        ...


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
        state.add_bias(logits_BV[row])
        if mask:
            masked.append(row)
            masks.append(mask)
    if masked:
        packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1)
        outside = unpack_masks(packed.to(logits_BV.device), logits_BV.shape[1]).logical_not_()
        for index, row in enumerate(masked):
            logits_BV[row].masked_fill_(outside[index], -torch.inf)
    return errors
