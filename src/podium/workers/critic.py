"""The critic: a language model's body with a scalar head, which estimates the value of each state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from podium.algorithms import TokenLoss, explained_variance
from podium.data import Batch
from podium.models.loading import plain_model
from podium.models.weight_files import find_replaced_heads, read_stored_value_head
from podium.runtime import concat, endpoint, first, shard
from podium.telemetry import metrics
from podium.training.micro_batches import MicroBatch
from podium.training.scoring import run_model
from podium.training.sharded_loading import load_parallel
from podium.workers.learner import Learner
from podium.workers.values import VALUE_COLUMNS, VALUE_LEARNING_RATE, compute_values, gather_moments, token_value_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(Learner):
    """A language model's body with a scalar head: the base of :class:`Critic` and :class:`Scorer`.

    The arguments are those of :class:`Learner`. The head, and so all values, start at zero, unless the model's
    directory has a head with one output, such as transformers writes for a classification with one label.
    """

    has_bias = True

    def make_model(self) -> nn.Module:
        spared = find_replaced_heads(self.config.path)
        return load_parallel(self.config, self.parallel, self.device, spared=spared, change=self._give_head)

    def _give_head(self, body: PreTrainedModel) -> None:
        """Replace the output layer, which may be on meta."""
        old = cast(Any, body.get_output_embeddings()).weight
        head = nn.Linear(old.shape[1], 1, bias=self.has_bias, dtype=old.dtype, device=self.device)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        for name, stored in read_stored_value_head(self.config.path).items():
            with safe_open(stored.file, framework="pt") as tensors, torch.no_grad():
                head.get_parameter(name.rpartition(".")[2]).copy_(tensors.get_tensor(name))
        body.set_output_embeddings(head)

    def values_of(self, micro: MicroBatch) -> Tensor:
        """Return the output of the head, ``[K]``, before the model caps or scales it as it does logits."""
        outputs: list[Tensor] = []
        head = cast(Any, plain_model(self.model).get_output_embeddings())
        with head.register_forward_hook(lambda _head, _args, output: outputs.append(output)):
            logits = run_model(self.model, micro).logits
        # FSDP2 gathers the parameters of the backward pass when the gradient reaches what the whole model returned.
        return (outputs[0] + 0 * logits)[0, :, 0].float()


class Critic(ValueModel):
    """Estimates the value of the state before each token. The model is usually the policy's own."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def values(self, batch: Batch) -> Batch:
        """Compute ``values`` before each token with loss, 0 elsewhere.

        Where ``batch`` has ``finish_reason``, also compute ``bootstrap`` ``[B]``: the value after the last token of
        rows that were cut off, whose reason is "length", and 0 for rows that ended by themselves.
        """

        return compute_values(self.engine, batch, self.values_of)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Make one optimizer step over a global minibatch.

        Args:
            batch: ``tokens``, ``loss_mask``, ``values`` from before the update, ``returns``, and ``loss_weights``
                (computed over the minibatch if absent).

        Returns:
            Metrics of the whole minibatch, equal on all ranks. The explained variance is that of the old values.

        Raises:
            DataError: A column is missing.
        """
        batch = self.weighted(batch)

        def compute(micro: MicroBatch) -> TokenLoss:
            return token_value_loss(micro, self.values_of(micro), self.algorithm)

        moments = gather_moments(self.engine, batch)
        result = self.engine.step(batch, compute, columns=VALUE_COLUMNS)
        return {
            **self.count_means(batch, {**result.metrics, metrics.EXPLAINED_VARIANCE: explained_variance(moments)}),
            metrics.VALUE_LOSS: result.loss,
            "value/grad_norm": result.grad_norm,
            VALUE_LEARNING_RATE: result.learning_rate,
            **({"value/loss_scale": self.engine.loss_scale.value} if self.engine.loss_scale.is_used else {}),
        }
