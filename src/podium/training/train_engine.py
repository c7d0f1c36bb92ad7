"""The training loop of one rank: forward and backward passes, one optimizer step, metrics of the whole minibatch.

One step over a global minibatch that is spread over ranks and cut into micro-batches::

    accumulate   each rank, each micro-batch:   loss = sum(weights * per-token loss);  (scale * loss).backward()
    apply        all ranks:                     add gradients -> global norm -> divide by scale, clip -> AdamW

The weights are normalized over the whole minibatch, so that the sum is the loss, however the minibatch was cut. The
scale is 1 unless matrix products are in float16. Several minibatches may be accumulated before a step, which then
follows the sum of their losses.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from podium.algorithms import PartialMetrics, TokenLoss, partial_metrics
from podium.data import Batch, Jagged, fields
from podium.devices import autocast, compute_dtype
from podium.errors import DataError, PodiumError
from podium.models.loading import longrope_threshold, plain_model
from podium.telemetry.progress import Counting
from podium.training.config import OptimConfig, ParallelConfig
from podium.training.data_parallel import make_parallel
from podium.training.micro_batch_size import choose_micro_batch_tokens
from podium.training.micro_batches import MicroBatch, MicroBatches, cut, empty_micro_batch
from podium.training.offload import Offload
from podium.training.optimizer import LossScale, Optimizer
from podium.training.output_layer import logits_tail, widen_output
from podium.training.row_isolation import choose_batching, may_share_prompts
from podium.training.scoring import run_model, zero_of


@dataclass(frozen=True)
class Accumulated:
    """A global minibatch whose gradient was added to those that wait for a step, equal on all ranks.

    Attributes:
        loss: Its loss, times its weight.
        metrics: Means and maxima over the minibatch, by name.
    """

    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Applied:
    """One optimizer step, equal on all ranks.

    Attributes:
        grad_norm: The global norm before clipping.
        learning_rate: The learning rate of this step.
        head_learning_rate: That of a value head.
        skipped: Whether the loss or its gradient was not finite, so that the parameters stayed as they were.
    """

    grad_norm: float
    learning_rate: float
    head_learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class StepResult(Applied):
    """One optimizer step by one global minibatch, equal on all ranks.

    Attributes:
        loss: The loss of the minibatch.
        metrics: Means and maxima over the minibatch, by name.
    """

    loss: float
    metrics: Mapping[str, float]


def _prepare_nothing() -> AbstractContextManager[Callable[[MicroBatch], None]]:
    return nullcontext(lambda micro: None)


@dataclass(frozen=True)
class _Minibatch:
    batch: Batch
    compute: Callable[[MicroBatch], TokenLoss]
    columns: Sequence[str]
    weight: float
    within: Callable[[], AbstractContextManager[Callable[[MicroBatch], None]]]


class TrainEngine:
    """A model with its optimizer on one rank.

    Args:
        model: The model on its device. Parameters that are trained require gradients.
        optim: The optimizer. None makes an engine that only evaluates.
        world_size: Number of ranks in the default process group. All of them make an engine and call it together.
        dropout: Whether the model's own dropout and router noise act in :meth:`step`. Dropout of adapters always does.
        head_optim: In place of ``optim`` for the learning rate of the model's value head.
        causal: Whether the model must not read ahead: see :func:`.choose_batching`.

    Attributes:
        batching: How rows share a forward pass.
        note: Why ``batching`` is not what ``parallel.batching`` prefers; "" if it is.
        shares_prompts: Whether rows with the same prompt have it once in a forward pass.
        micro_batch_tokens: The most tokens of a forward pass, padding included.
        loss_scale: The factor of the loss in the backward pass.
        schedule_shift: By how many optimizer steps the schedule of the learning rate is further than ``step_count``.
        waiting_count: Number of minibatches whose gradients wait for :meth:`apply`.

    Raises:
        ConfigError: see :func:`.choose_batching` and :func:`.make_parallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optim: OptimConfig | None,
        parallel: ParallelConfig,
        device: torch.device,
        world_size: int = 1,
        dropout: bool = False,
        head_optim: OptimConfig | None = None,
        causal: bool = True,
    ) -> None:
        self.device = device
        self.dropout = dropout
        self.config = parallel
        self.precision = compute_dtype(device, parallel.choice.compute)
        if parallel.choice.output == "float32":
            widen_output(model)
        self.loss_scale = LossScale(self.precision)
        self.batching, self.note = choose_batching(model, parallel, device, self.precision, causal=causal)
        self.shares_prompts = may_share_prompts(model, parallel, self.batching, device, self.precision)
        self.micro_batch_tokens = choose_micro_batch_tokens(
            model, parallel, device, self.precision, trains=optim is not None, world_size=world_size
        )
        logits_tail(model)  # is found now, as all ranks are here
        self.parallel = make_parallel(model, parallel, world_size=world_size, device=device, precision=self.precision)
        self.model = self.parallel.model
        self._adapter_dropouts = [m for name, m in self.model.named_modules() if name.endswith(".lora_dropout")]
        adapters = (submodule for module in self._adapter_dropouts for submodule in module.modules())
        self._noisy = dropout or any(isinstance(adapter, nn.Dropout) for adapter in adapters)
        self.optim = optim
        self.optimizer = None
        if optim is not None:
            self.head_optim = head_optim or optim
            optim.learning_rate(0)  # a schedule without an end fails here, not at the first step
            self.optimizer = Optimizer(self.model, optim, self.parallel.sums)
        self._weights = Offload(lambda: (*self.model.parameters(), *self.model.buffers()))
        self._state = Offload(self._optimizer_state, self.parallel.gradients)
        self.step_count = 0
        self.schedule_shift = 0
        self.skipped_count = 0
        self.waiting_count = 0
        self._has_gradients = False  # of what waits for a step
        self._is_finite = True  # the loss of what waits
        self._minibatches: list[_Minibatch] = []  # to be computed again with a lower loss scale
        self.rest()  # so that roles that are made one after the other do not all stand on the device

    def rest(self, *, weights: bool = True) -> None:
        """Move the parts that ``parallel.offload`` names off the device. Later calls of this engine bring back the
        parts that they need. Gradients that wait for a step stay.

        Args:
            weights: Whether the weights may leave the device, because no other worker reads them.
        """
        if self.config.offload != "none" and not self.waiting_count:
            self._state.sleep()
        if self.config.offload == "all" and weights:
            self._weights.sleep()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        self._weights.wake()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep weights and optimizer on the device during the block, and return them to their place afterwards."""
        asleep = [part for part in (self._weights, self._state) if not part.awake]
        try:
            for part in asleep:
                part.wake()
            yield
        finally:
            for part in asleep:
                part.sleep()

    def _optimizer_state(self) -> list[Tensor]:
        states = () if self.optimizer is None else self.optimizer.state.values()
        return [value for state in states for value in state.values()]

    def evaluate(
        self,
        batch: Batch,
        compute: Callable[[MicroBatch], Mapping[str, Tensor]],
        outputs: Sequence[str],
        widths: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, Jagged]:
        """Compute token columns of ``batch`` without gradients.

        Args:
            batch: Has tokens and loss mask.
            compute: Returns float32 ``[K]`` by name for one micro-batch.
            outputs: The names.
            widths: The further dimensions of a column that has some.

        Returns:
            A float32 token column for each name, on the CPU, 0 where there is no loss.
        """
        self._weights.wake()
        tokens = batch.jagged(fields.TOKENS)
        widths = widths or {}
        results = {name: torch.zeros(len(tokens.values), *widths.get(name, ()), device=self.device) for name in outputs}
        self.model.eval()
        micros = self._micro_batches(batch, ())
        with torch.no_grad(), Counting("micro-batches", len(micros)) as count:
            for micro in count.over(micros):
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
        compute: Callable[[MicroBatch], TokenLoss],
        *,
        columns: Sequence[str] = (),
        flat: bool = False,
    ) -> StepResult:
        """Accumulate a minibatch and make a step. See :meth:`accumulate` for what is taken and raised."""
        minibatch = self.accumulate(batch, compute, columns=columns, flat=flat)
        applied = self.apply()
        return StepResult(**vars(applied), loss=minibatch.loss, metrics=minibatch.metrics)

    def accumulate(
        self,
        batch: Batch,
        compute: Callable[[MicroBatch], TokenLoss],
        *,
        columns: Sequence[str] = (),
        weight: float = 1.0,
        flat: bool = False,
        within: Callable[[], AbstractContextManager[Callable[[MicroBatch], None]]] = _prepare_nothing,
    ) -> Accumulated:
        """Add the gradient of this rank's rows of a global minibatch to those that wait for :meth:`apply`.

        If an exception is raised, all gradients that wait are dropped.

        Args:
            batch: Has tokens, loss mask, loss weights and ``columns``; may be empty on some ranks.
            compute: Returns the loss of each token of one micro-batch, with gradients.
            columns: Token columns that ``compute`` finds in ``micro.columns``.
            weight: A factor of the loss.
            flat: Whether all gradients are known to be 0. They are then added without passes over the model, and
                without metrics.
            within: Makes the context of the passes over the minibatch, also of those that :meth:`apply` makes again.
                It yields a function that takes each micro-batch before ``compute`` does.

        Raises:
            DataError: The loss reports other metrics in one micro-batch than in another.
            PodiumError: The engine has no optimizer.
        """
        if self.optim is None or self.optimizer is None:
            raise PodiumError("this engine was made without an optimizer and only evaluates: give it optim to train")
        minibatch, parts = _Minibatch(batch, compute, columns, weight, within), list[tuple[Tensor, PartialMetrics]]()
        try:
            if not self._count(batch.jagged(fields.LOSS_WEIGHTS).values):
                self.waiting_count += 1
                return Accumulated(0.0, {})
            self._weights.wake()
            self._state.wake()
            if not self._has_gradients:
                self.parallel.prepare(zeros=flat)
            self._has_gradients = True
            if not flat:
                parts = self._backward(minibatch)
            loss, metrics = self._gather(parts)
        except BaseException:
            self._forget()
            raise
        self.waiting_count += 1
        self._is_finite = self._is_finite and math.isfinite(loss)
        if self.loss_scale.is_used and not flat:
            self._minibatches.append(minibatch)
        return Accumulated(loss, metrics)

    def apply(
        self, *, learning_rate: float | None = None, grad_clip: float | None = None, head_alone: bool = False
    ) -> Applied:
        """Make one optimizer step by the gradients that wait.

        Where no token of any rank and minibatch had a weight, parameters and optimizer stay as they are, and the step
        counts: AdamW would move by earlier gradients alone.

        Args:
            learning_rate: In place of that of the schedule.
            grad_clip: In place of ``optim.grad_clip``; 0 clips nothing.
            head_alone: Whether the value head alone is trained. All else stays as it is, its optimizer state too.

        Raises:
            PodiumError: No gradient waits.
        """
        if self.optim is None or self.optimizer is None or not self.waiting_count:
            raise PodiumError("no gradient waits for an optimizer step: accumulate one first")
        rate, head_rate = (
            optim.learning_rate(self.step_count, self.schedule_shift) if learning_rate is None else learning_rate
            for optim in (self.optim, self.head_optim)
        )
        norm, skipped = 0.0, False
        if self._has_gradients:
            scale, most = self.loss_scale.value, self.optim.grad_clip if grad_clip is None else grad_clip
            norm = float(self.parallel.reduce()) / self.loss_scale.value
            while self._is_finite and not math.isfinite(norm) and self.loss_scale.lower():
                self.parallel.prepare()
                for minibatch in self._minibatches:
                    self._backward(minibatch)
                norm = float(self.parallel.reduce()) / self.loss_scale.value
            skipped = not (math.isfinite(norm) and self._is_finite)
            if not skipped:
                factor = (most / norm if most and norm > most else 1.0) / self.loss_scale.value
                if factor != 1.0:
                    for gradient in self.parallel.gradients():
                        gradient.mul_(factor)
                self.optimizer.update(None if head_alone else rate, self.step_count, head_rate)
                self.loss_scale.count_step()
            else:
                self.loss_scale.value = scale  # not the scale was at fault
        self._forget()
        self.step_count += 1
        self.skipped_count += skipped
        return Applied(norm, rate, head_rate, skipped)

    def _forget(self) -> None:
        self.waiting_count, self._has_gradients, self._is_finite = 0, False, True
        self._minibatches.clear()

    def is_flat(self, batch: Batch, factor: str) -> bool:
        """Whether the column ``factor``, by which losses are multiplied, is 0 at all tokens of all ranks that have a
        weight, so that all gradients are 0. Passes that draw random numbers are never flat, since they must be made."""
        weights_N, factor_N = (batch.jagged(name).values for name in (fields.LOSS_WEIGHTS, factor))
        return not self._noisy and not self._count((weights_N != 0) & (factor_N != 0))

    def _count(self, values_N: Tensor) -> int:
        """The number of values of all ranks that are not 0."""
        return int(self.parallel.gather(values_N.count_nonzero().to(self.device)[None]).sum())

    def _backward(self, minibatch: _Minibatch) -> list[tuple[Tensor, PartialMetrics]]:
        """Add this rank's gradients, times the loss scale. Return the loss and the metrics of each micro-batch."""
        self.model.train(self.dropout)
        for module in self._adapter_dropouts:
            module.train()
        parts: list[tuple[Tensor, PartialMetrics]] = []
        try:
            micros = self._micro_batches(minibatch.batch, (*minibatch.columns, fields.LOSS_WEIGHTS), noisy=self._noisy)
            with minibatch.within() as prepare, Counting("micro-batches", len(micros)) as count:
                for micro in count.over(micros):
                    with autocast(self.device, self.precision):
                        if len(micro.index) == 0:
                            zero_of(self.model, micro).backward()
                            continue
                        prepare(micro)
                        token_loss, weights = minibatch.compute(micro), micro.columns[fields.LOSS_WEIGHTS]
                        loss = (weights * token_loss.loss_N).sum()
                        if minibatch.weight != 1.0:
                            loss = loss * minibatch.weight
                    (loss * self.loss_scale.value).backward()
                    parts.append((loss.detach(), partial_metrics(token_loss, weights)))
        finally:
            self.model.eval()
        return parts

    def _micro_batches(self, batch: Batch, columns: Sequence[str], *, noisy: bool = False) -> MicroBatches:
        """Return this rank's micro-batches. Where all ranks must make as many passes, empty ones follow them.

        Rows share no prompt in ``noisy`` passes, in which dropout would do the same to all of them.
        """
        needed = batch.select(fields.TOKENS, fields.LOSS_MASK, *columns).to(self.device)
        packed, equal = self.batching == "packed", self.batching == "equal"
        most, turn = self.micro_batch_tokens, longrope_threshold(plain_model(self.model).config)
        share = self.shares_prompts and not noisy
        micros = cut(needed, most, packed=packed, equal=equal, turn=turn, share=share, columns=columns)
        if not self.parallel.equal_passes:
            return micros
        passes = int(self.parallel.gather(torch.tensor([len(micros)], device=self.device)).max())
        return MicroBatches([*micros.makers, *[lambda: empty_micro_batch(self.device)] * (passes - len(micros))])

    def _gather(self, parts: Sequence[tuple[Tensor, PartialMetrics]]) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics over micro-batches and ranks; a rank without rows has neither."""
        reported: tuple[list[str], list[str], Tensor] | None = None
        if parts:
            loss = sum((loss for loss, _ in parts), torch.zeros((), device=self.device))
            metrics = functools.reduce(operator.add, (metrics for _, metrics in parts))
            values = (loss, metrics.weight, *metrics.sums.values(), *metrics.maxima.values())
            stacked = torch.stack([value.to(self.device, torch.float64) for value in values])
            reported = list(metrics.sums), list(metrics.maxima), stacked.cpu()
        every = [report for report in self.parallel.gather_objects(reported) if report is not None]
        if not every:
            return 0.0, {}
        sums, maxima, _ = every[0]
        if any(report[:2] != (sums, maxima) for report in every):
            names = "; ".join(", ".join(ours + theirs) for ours, theirs, _ in every)
            raise DataError(
                f"the loss reports different metrics on different ranks: {names}. Return the same metrics on every rank"
            )
        table = torch.stack([values for _, _, values in every])
        loss, weight, *added = table[:, : 2 + len(sums)].sum(0)
        largest = table[:, 2 + len(sums) :].amax(0)
        joined = PartialMetrics(weight, dict(zip(sums, added, strict=True)), dict(zip(maxima, largest, strict=True)))
        return float(loss), joined.means()
