"""The policy: the language model that is trained, by reinforcement or by examples."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from podium.algorithms import AlgorithmConfig, PolicyLoss, PolicyLossInputs, SFTLoss, SFTLossInputs, TokenLoss
from podium.algorithms import partial_metrics as partial
from podium.data import Batch, InPlace, fields
from podium.devices import memory_peak_bytes
from podium.errors import DataError
from podium.runtime import concat, endpoint, first, nothing, shard
from podium.telemetry import metrics
from podium.workers.engine import MicroLoss
from podium.workers.learner import Learner
from podium.workers.micro_batches import MicroBatch
from podium.workers.models import ModelConfig, save_pretrained
from podium.workers.optim import OptimConfig
from podium.workers.parallel import ParallelConfig
from podium.workers.publication.sending import Bucket, WeightSender
from podium.workers.scoring import TokenScores, kept_tokens, score_tokens
from podium.workers.tokenizers import load_tokenizer
from podium.workers.weights import WeightInfo, full_weights

__all__ = ["MEMORY_PEAK_GIB", "SKIPPED_STEPS", "Policy"]

MEMORY_PEAK_GIB: Final = "policy/memory_peak_gib"
"""Metric: the most memory that tensors took on the first rank's accelerator so far."""

SKIPPED_STEPS: Final = "policy/skipped_steps"
"""Metric: optimizer steps left out so far because a gradient was not finite."""

_OPTIONAL = (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS, fields.REF_LOGPROBS)


class Policy(Learner):
    """A causal language model with its optimizer.

    Args:
        model: which model.
        optim: None makes a policy that is only evaluated.
        parallel: how model and batches are spread.
        loss: of a token: :class:`~podium.algorithms.PolicyLoss` or :class:`~podium.algorithms.SFTLoss`.
    """

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        loss: PolicyLoss | SFTLoss | None = None,
    ) -> None:
        super().__init__(model, optim, parallel)
        self.loss = loss or PolicyLoss(AlgorithmConfig())

    @cached_property
    def _sender(self) -> WeightSender:
        return WeightSender(self.model, sends=self.ctx.rank == 0)

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, so that the model's parameters are not yet its weights."""
        return self.config.lora is not None

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def logprobs(self, batch: Batch) -> Batch:
        """``old_logprobs`` and ``entropy`` of the tokens with loss, 0 elsewhere.

        Both are those of the distribution that was sampled from: at ``batch.meta["temperature"]`` (1 if not given) and,
        where the batch has kept sets (``kept_sizes``), over those.
        """

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            scores = self._score(batch, micro, entropy=True)
            assert scores.entropy is not None
            return {fields.OLD_LOGPROBS: scores.logprobs, fields.ENTROPY: scores.entropy}

        return Batch(self.engine.evaluate(batch, compute, (fields.OLD_LOGPROBS, fields.ENTROPY)), batch.meta)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step over a global minibatch.

        Args:
            batch: ``tokens``, ``loss_mask`` and ``loss_weights`` (computed over the minibatch if absent); for a policy
                loss also ``advantages``, and ``old_logprobs``, ``rollout_logprobs``, ``ref_logprobs`` as it asks for
                them. Without ``old_logprobs`` the policy counts as unchanged since sampling.

        Returns:
            Metrics of the whole minibatch, equal on all ranks, by their names in :mod:`podium.telemetry.metrics`.

        Raises:
            DataError: a column is missing.
        """
        settings = self.loss.config if isinstance(self.loss, PolicyLoss) else None
        if settings and fields.ADVANTAGES not in batch:
            raise DataError(f"a policy update needs the column {fields.ADVANTAGES!r}; this batch has {list(batch)}")
        batch = self.weighted(batch, settings.aggregation if settings else "token-mean")
        wanted = (fields.ADVANTAGES, *(name for name in _OPTIONAL if name in batch)) if settings else ()
        entropy_grad = settings is not None and settings.entropy_coef != 0

        def compute(micro: MicroBatch) -> MicroLoss:
            scores = self._score(batch, micro, entropy=True, entropy_grad=entropy_grad)
            loss = self._token_loss(scores, micro.columns)
            weights = micro.columns[fields.LOSS_WEIGHTS]
            return MicroLoss((weights * loss.loss_N).sum(), partial(loss, weights))

        empty = torch.empty(0, device=self.device)
        columns = (*wanted, fields.LOSS_WEIGHTS)
        nothing_yet = partial(self._token_loss(TokenScores(empty, empty), dict.fromkeys(columns, empty)), empty)
        result = self.engine.step(batch, compute, nothing_yet, columns=columns)
        peak = memory_peak_bytes(self.device)
        return {
            metrics.LOSS: result.loss,
            **result.metrics,
            metrics.GRAD_NORM: result.grad_norm,
            metrics.LEARNING_RATE: result.learning_rate,
            SKIPPED_STEPS: float(self.engine.skipped_count),
            **({MEMORY_PEAK_GIB: peak / 2**30} if peak else {}),
        }

    @endpoint(collect=first())
    def weight_layout(self) -> list[WeightInfo]:
        """Names and shapes of all weights, whole and with adapters merged: what ``weight_bucket`` can be asked for."""
        return self._sender.layout()

    @endpoint(collect=first(), returns="ref")
    def weight_bucket(self, index: int, bucket_bytes: int, known: Sequence[int] | None = None) -> Bucket:
        """Part of the weights for a :class:`~podium.workers.StreamedPublication`, from the first rank; all take part.

        Args:
            index: of the bucket; 0 begins, and the policy must not be updated before the last.
            bucket_bytes: the size of all buckets.
            known: see :meth:`WeightSender.bucket`, which says what comes back.

        Raises:
            DataError: the policy was updated since bucket 0.
        """
        return self._sender.bucket(index, bucket_bytes, known, self.engine.step_count)

    @endpoint(collect=first(), returns="ref")
    def weights_in_place(self) -> InPlace | None:
        """References to the weights themselves, in the order of ``weight_layout``: they are read where they are, as
        they are then. None where they must come in buckets: sharded, below adapters, on an accelerator, in the same
        process as a generator that reads them, on a backend without shared memory, or made by a subclass's own
        ``weight_bucket``."""
        from podium.workers.generator import Generator

        read_here = any(isinstance(worker, Generator) for worker in self.ctx.colocated.values())
        own = inspect.getattr_static(type(self), "weight_bucket") is not vars(Policy)["weight_bucket"]
        return None if read_here or own else self._sender.in_place

    @endpoint(collect=first())
    def weights_state(self) -> tuple[str, int]:
        """A name for what ``weights_in_place`` returned, "" where that no longer holds, and how often the policy has
        been updated."""
        live = self._sender.in_place
        return "" if live is None else live.key, self.engine.step_count

    @endpoint(collect=first())
    def weights(self) -> dict[str, Tensor]:
        """All weights under Hugging Face's names, whole, adapters merged, copied to the CPU; from the first rank."""
        return self._whole_weights()

    @endpoint(collect=nothing())
    def save_pretrained(self, path: str) -> None:
        """Write model and tokenizer to the directory ``path`` so that transformers' Auto classes load them.

        Raises:
            CheckpointError: the directory cannot be written.
        """
        weights = self._whole_weights()
        if self.ctx.rank == 0:
            save_pretrained(self.model, weights, path, load_tokenizer(self.config.tokenizer_source))

    def _whole_weights(self) -> dict[str, Tensor]:
        whole = full_weights(self.model)
        if self.ctx.rank == 0:
            return {name: tensor.to("cpu", copy=True) for name, tensor in whole}
        deque(whole, maxlen=0)  # shards are gathered from all ranks
        return {}

    def _score(self, batch: Batch, micro: MicroBatch, *, entropy: bool, entropy_grad: bool = False) -> TokenScores:
        return score_tokens(
            self.model,
            micro,
            temperature=float(batch.meta.get("temperature", 1.0)),
            kept=kept_tokens(batch, micro),
            entropy=entropy,
            entropy_grad=entropy_grad,
        )

    def _token_loss(self, scores: TokenScores, columns: Mapping[str, Tensor]) -> TokenLoss:
        if isinstance(self.loss, SFTLoss):
            return self.loss(SFTLossInputs(logprobs_N=scores.logprobs, entropy_N=scores.entropy))
        return self.loss(
            PolicyLossInputs(
                logprobs_N=scores.logprobs,
                advantages_N=columns[fields.ADVANTAGES],
                old_logprobs_N=columns.get(fields.OLD_LOGPROBS),
                rollout_logprobs_N=columns.get(fields.ROLLOUT_LOGPROBS),
                ref_logprobs_N=columns.get(fields.REF_LOGPROBS),
                entropy_N=scores.entropy,
            )
        )
