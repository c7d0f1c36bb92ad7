"""The critic: a language model's body with a scalar head, which says what a state is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from podium.algorithms import (
    AlgorithmConfig,
    TokenLoss,
    ValueLoss,
    ValueLossInputs,
    explained_variance,
    partial_metrics,
    value_moments,
)
from podium.data import Batch, fields
from podium.runtime import concat, endpoint, first, shard
from podium.telemetry import metrics
from podium.workers.engine import MicroLoss
from podium.workers.learner import Learner
from podium.workers.micro_batches import MicroBatch
from podium.workers.models import ModelConfig, load_model, plain_model
from podium.workers.optim import OptimConfig
from podium.workers.parallel import ParallelConfig
from podium.workers.scoring import run_model

__all__ = ["VALUE_GRAD_NORM", "VALUE_LEARNING_RATE", "Critic"]

VALUE_GRAD_NORM: Final = "value/grad_norm"
VALUE_LEARNING_RATE: Final = "value/learning_rate"


class Critic(Learner):
    """Values of the states before each token. Its head starts at zero, so that all values do.

    Args:
        model: the body; a policy's own model is usual.
        optim: None makes a critic that is only evaluated.
        parallel: how model and batches are spread.
        loss: of a token.
    """

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        loss: ValueLoss | None = None,
    ) -> None:
        super().__init__(model, optim, parallel)
        self.loss = loss or ValueLoss(AlgorithmConfig())

    def make_model(self) -> nn.Module:
        model = load_model(self.config, self.device)
        body = plain_model(model)
        old = cast(Any, body.get_output_embeddings()).weight
        head = nn.Linear(old.shape[1], 1, dtype=old.dtype, device=old.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        body.set_output_embeddings(head)
        return model

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def values(self, batch: Batch) -> Batch:
        """``values`` before each token with loss, 0 elsewhere."""

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            return {fields.VALUES: self._values(micro)}

        return Batch(self.engine.evaluate(batch, compute, (fields.VALUES,)), batch.meta)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step over a global minibatch.

        Args:
            batch: ``tokens``, ``loss_mask``, ``values`` from before the update, ``returns``, and ``loss_weights``
                (computed over the minibatch if absent).

        Returns:
            Metrics of the whole minibatch, equal on all ranks. The explained variance is that of the old values.

        Raises:
            DataError: a column is missing.
        """
        batch = self.weighted(batch, self.loss.config.aggregation)
        columns = (fields.VALUES, fields.RETURNS, fields.LOSS_WEIGHTS)
        own = value_moments(*(batch.jagged(name).values for name in columns))
        moments = self.engine.parallel.gather(own.to(self.device)).sum(0)

        def compute(micro: MicroBatch) -> MicroLoss:
            loss = self._token_loss(self._values(micro), micro.columns)
            weights = micro.columns[fields.LOSS_WEIGHTS]
            return MicroLoss((weights * loss.loss_N).sum(), partial_metrics(loss, weights))

        empty = torch.empty(0, device=self.device)
        nothing = partial_metrics(self._token_loss(empty, dict.fromkeys(columns, empty)), empty)
        result = self.engine.step(batch, compute, nothing, columns=columns)
        return {
            **result.metrics,
            metrics.VALUE_LOSS: result.loss,
            metrics.EXPLAINED_VARIANCE: explained_variance(moments),
            VALUE_GRAD_NORM: result.grad_norm,
            VALUE_LEARNING_RATE: result.learning_rate,
        }

    def _values(self, micro: MicroBatch) -> Tensor:
        return run_model(self.model, micro).logits[0, :, 0].float()

    def _token_loss(self, values: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return self.loss(
            ValueLossInputs(values_N=values, old_values_N=columns[fields.VALUES], returns_N=columns[fields.RETURNS])
        )
