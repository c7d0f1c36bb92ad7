"""Values of states and their loss, by a critic of its own or by a head on the policy's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from podium.algorithms import AlgorithmConfig, LossInputs, TokenLoss, value_loss, value_moments
from podium.data import Batch, Jagged, fields
from podium.training.micro_batches import MicroBatch
from podium.training.train_engine import TrainEngine

VALUE_COLUMNS: Final = (fields.VALUES, fields.RETURNS)
"""The columns that the loss of values reads."""
VALUE_LEARNING_RATE: Final = "value/learning_rate"  # of the critic, or of a value head


def compute_values(engine: TrainEngine, batch: Batch, values_of: Callable[[MicroBatch], Tensor]) -> Batch:
    """Compute ``values`` before each token with loss, 0 elsewhere. ``values_of`` gives those of a micro-batch.

    Where ``batch`` has ``finish_reason``, also compute ``bootstrap`` ``[B]``: the value after the last token of
    rows that were cut off, whose reason is "length", and 0 for rows that ended by themselves.
    """

    def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
        return {fields.VALUES: values_of(micro)}

    tokens, cut_B = batch.jagged(fields.TOKENS), _cut_off(batch)
    longer, own_N = _with_a_next_token(batch, cut_B)
    values_N = engine.evaluate(longer, compute, (fields.VALUES,))[fields.VALUES].values
    columns: dict[str, Any] = {fields.VALUES: tokens.like(values_N[own_N])}
    if fields.FINISH_REASON in batch:
        columns[fields.BOOTSTRAP] = torch.zeros(len(batch)).masked_scatter(cut_B, values_N[~own_N])
    return Batch(columns, batch.meta)


def token_value_loss(micro: MicroBatch, values_K: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """Return the loss of a micro-batch's values, which has ``VALUE_COLUMNS``."""
    columns = {
        "values": values_K,
        "old_values": micro.columns[fields.VALUES],
        "returns": micro.columns[fields.RETURNS],
    }
    return value_loss(LossInputs(offsets_B1=micro.offsets, columns=columns), algorithm)


def gather_moments(engine: TrainEngine, batch: Batch) -> Tensor:
    """Return :func:`.value_moments` of the old values over all ranks' rows, which have loss weights, ``[5]``.

    Raises:
        DataError: A column is missing.
    """
    columns = (batch.jagged(name).values for name in (*VALUE_COLUMNS, fields.LOSS_WEIGHTS))
    return engine.parallel.gather(value_moments(*columns).to(engine.device)).sum(0)


def _cut_off(batch: Batch) -> Tensor:
    """Whether each row was cut off at its greatest length: bool ``[B]``."""
    reasons = batch.python(fields.FINISH_REASON) if fields.FINISH_REASON in batch else [""] * len(batch)
    return torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)


def _with_a_next_token(batch: Batch, cut_B: Tensor) -> tuple[Batch, Tensor]:
    """Add a token with loss to the rows of ``cut_B``, before which the value is that after their last token.

    The model never sees the added token, because a row's last token is no input. Also returns, for each token, whether
    it is one of ``batch``.
    """
    tokens, mask = batch.jagged(fields.TOKENS), batch.jagged(fields.LOSS_MASK)
    lengths_B = tokens.lengths + cut_B
    own_N = torch.ones(int(lengths_B.sum()), dtype=torch.bool)
    own_N[lengths_B.cumsum(0)[cut_B] - 1] = False
    ids_N = torch.zeros(len(own_N), dtype=torch.int64).masked_scatter(own_N, tokens.values)
    mask_N = torch.ones_like(own_N).masked_scatter(own_N, mask.values)
    longer = Jagged.from_lengths(ids_N, lengths_B)
    return Batch({fields.TOKENS: longer, fields.LOSS_MASK: longer.like(mask_N)}), own_N
