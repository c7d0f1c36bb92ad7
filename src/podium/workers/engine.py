"""The training loop inside a rank: micro-batches forward and backward, one optimizer step, metrics of the whole batch.

One step over a global minibatch that is spread over ranks and cut into micro-batches::

    each rank, each micro-batch:   loss = sum(weights * per-token loss);  loss.backward()
    all ranks:                     add gradients -> global norm -> clip -> AdamW

The weights were normalised over the whole minibatch, so the sum is the loss, however the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from podium.algorithms import Aggregation, PartialMetrics, loss_weights
from podium.data import Batch, Jagged, fields
from podium.devices import autocast, compute_dtype
from podium.errors import PodiumError
from podium.workers.micro_batches import MicroBatch, cut
from podium.workers.optim import OptimConfig, build_optimizer, learning_rate
from podium.workers.parallel import FullyShard, ParallelConfig, make_parallel
from podium.workers.scoring import run_model
from podium.workers.texts import sampled_counts

__all__ = ["MicroLoss", "StepResult", "TrainEngine"]


@dataclass(frozen=True)
class MicroLoss:
    """What one micro-batch contributes.

    Attributes:
        loss: scalar, ``sum(weights * per-token loss)``.
        metrics: what it adds to the step's figures.
    """

    loss: Tensor
    metrics: PartialMetrics


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, equal on all ranks.

    Attributes:
        loss: of the global minibatch.
        grad_norm: global, before clipping; NaN or infinite where the step was skipped.
        learning_rate: of this step.
        skipped: the gradients were not finite and the parameters stayed as they were.
        metrics: means and maxima over the global minibatch, by name.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    metrics: Mapping[str, float]


class TrainEngine:
    """A model with its optimizer on one rank.

    Args:
        model: on its device; trained parameters require gradients.
        optim: None makes an engine that only evaluates.
        world_size: ranks of the default process group, all of which make an engine and call it together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optim: OptimConfig | None,
        parallel: ParallelConfig,
        device: torch.device,
        world_size: int = 1,
    ) -> None:
        self.device = device
        self.config = parallel
        self.precision = compute_dtype(device, parallel.precision)
        self.parallel = make_parallel(model, parallel, world_size=world_size, device=device, precision=self.precision)
        self.model = self.parallel.model
        self.optim = optim
        self.optimizer = None
        if optim is not None:
            learning_rate(optim, 0)  # a schedule without an end fails here, not at the first step
            self.optimizer = build_optimizer(self.model, optim)
        self.step_count = 0
        self.skipped_count = 0

    def evaluate(
        self, batch: Batch, compute: Callable[[MicroBatch], Mapping[str, Tensor]], outputs: Sequence[str]
    ) -> dict[str, Jagged]:
        """Token columns of ``batch`` without gradients.

        Args:
            batch: with tokens and loss mask.
            compute: float32 ``[K]`` by name for one micro-batch.
            outputs: the names.

        Returns:
            By name a Jagged float32 over the rows of the batch, on the CPU, 0 where there is no loss.
        """
        tokens = batch.jagged(fields.TOKENS)
        results = {name: torch.zeros(len(tokens.values), device=self.device) for name in outputs}
        self.model.eval()
        with torch.no_grad():
            for micro in self._micro_batches(batch, ()):
                with autocast(self.device, self.precision):
                    if len(micro.index) == 0:
                        run_model(self.model, micro)
                        continue
                    for name, values in compute(micro).items():
                        results[name][micro.index] = values.float()
        return {name: tokens.like(values).to("cpu") for name, values in results.items()}

    def step(
        self,
        batch: Batch,
        compute: Callable[[MicroBatch], MicroLoss],
        nothing: PartialMetrics,
        *,
        columns: Sequence[str] = (),
    ) -> StepResult:
        """One optimizer step over this rank's rows of a global minibatch.

        Args:
            batch: with tokens, loss mask and ``columns``; may be empty on some ranks.
            compute: the loss of one micro-batch, with gradients.
            nothing: the metrics of no tokens, with the names that every :class:`MicroLoss` has, for ranks without rows.
            columns: token columns that ``compute`` finds in ``micro.columns``.

        Raises:
            PodiumError: non-finite gradients with ``optim.non_finite="error"``, or an engine without an optimizer.
        """
        if self.optim is None or self.optimizer is None:
            raise PodiumError("this engine was made without an optimizer and only evaluates")
        self.model.train()
        self.parallel.prepare()
        parts: list[MicroLoss] = []
        for micro in self._micro_batches(batch, columns):
            with autocast(self.device, self.precision):
                if len(micro.index) == 0:
                    (run_model(self.model, micro).logits.sum() * 0.0).backward()
                    continue
                part = compute(micro)
            part.loss.backward()
            parts.append(replace(part, loss=part.loss.detach()))
        self.model.eval()
        norm = float(self.parallel.reduce())
        rate = learning_rate(self.optim, self.step_count)
        skipped = not math.isfinite(norm)
        if not skipped:
            self._apply(norm, rate)
        elif self.optim.non_finite == "error":
            raise PodiumError(f"the gradients of step {self.step_count} are not finite (norm {norm})")
        self.step_count += 1
        self.skipped_count += skipped
        loss, metrics = self._gather(parts, nothing)
        return StepResult(loss, norm, rate, skipped, metrics)

    def loss_weights(self, batch: Batch, mode: Aggregation, constant: float | None = None) -> Jagged:
        """Weights over the global minibatch for this rank's rows, when the batch brings none; all ranks call together.

        Raises:
            ConfigError: see :func:`podium.algorithms.loss_weights`.
        """
        mask = batch.jagged(fields.LOSS_MASK)
        counts = sampled_counts(mask)
        own = torch.stack([counts.sum(), (counts > 0).sum()]).to(self.device)
        tokens, rows = self.parallel.gather(own).sum(0).to(mask.offsets.device)
        return mask.like(
            loss_weights(mask.values.bool(), mask.offsets, mode, constant=constant, tokens=tokens, rows=rows)
        )

    def _apply(self, norm: float, rate: float) -> None:
        assert self.optim is not None and self.optimizer is not None
        if self.optim.grad_clip and norm > self.optim.grad_clip:
            self.parallel.scale(self.optim.grad_clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _micro_batches(self, batch: Batch, columns: Sequence[str]) -> Iterator[MicroBatch]:
        """This rank's micro-batches, then empty ones as far as other ranks have more and must not wait."""
        needed = batch.select(fields.TOKENS, fields.LOSS_MASK, *columns).to(self.device)
        micros = cut(needed, self.config.micro_batch_tokens, packed=self.config.packed(self.device), columns=columns)
        if not isinstance(self.parallel, FullyShard):
            yield from micros
            return
        own = list(micros)
        passes = self.parallel.micro_batches(len(own), self.device)
        yield from own
        for _ in range(passes - len(own)):
            yield _empty_micro_batch(self.device)

    def _gather(self, parts: Sequence[MicroLoss], nothing: PartialMetrics) -> tuple[float, dict[str, float]]:
        """The loss and the metrics over micro-batches and ranks, in one exchange."""
        total = sum((part.metrics for part in parts), nothing)
        loss = sum((part.loss for part in parts), torch.zeros((), device=self.device))
        added, largest = [loss, total.weight, *total.sums.values()], list(total.maxima.values())
        own = torch.stack([value.to(self.device, torch.float64) for value in (*added, *largest)])
        every = self.parallel.gather(own)
        loss, weight, *sums = every[:, : len(added)].sum(0).tolist()
        maxima = every[:, len(added) :].amax(0).tolist()
        if not weight:
            return loss, {}
        means = {name: value / weight for name, value in zip(total.sums, sums, strict=True)}
        return loss, means | dict(zip(total.maxima, maxima, strict=True))


def _empty_micro_batch(device: torch.device) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    none = zero[:0]
    return MicroBatch(zero[None], None, None, zero, none, none, {}, none)
