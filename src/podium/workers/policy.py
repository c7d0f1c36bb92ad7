"""The policy: the language model that is trained, by reinforcement or by examples."""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Final, cast

import torch
from torch import Tensor, nn

from podium.algorithms import (
    CORRECTIONS,
    LOSSES,
    AlgorithmConfig,
    LossInputs,
    TokenLoss,
    check_functions,
    explained_variance,
    policy_loss,
)
from podium.algorithms.metrics import Maximum
from podium.algorithms.token_rows import row_sums, rows_of_tokens
from podium.data import Batch, InPlace, Jagged, fields
from podium.data.sampled_text import count_sampled, sum_rows
from podium.devices import memory_peak_bytes
from podium.errors import ConfigError, DataError
from podium.models.buckets import Bucket, WeightManifest, fill
from podium.models.config import ModelConfig
from podium.models.loading import save_pretrained
from podium.models.tokenizers import load_tokenizer
from podium.models.value_head import add_value_head
from podium.models.whole_weights import WholeWeights, full_weights
from podium.runtime import concat, endpoint, first, nothing, shard
from podium.telemetry import metrics
from podium.telemetry.held_out import LOSS, TOKEN_ACCURACY
from podium.training.config import EndingOptim, OptimConfig, ParallelConfig, check_dropout
from podium.training.micro_batches import MicroBatch
from podium.training.output_layer import TokenScores
from podium.training.routing import (
    Route,
    count_choices,
    count_experts,
    find_routers,
    measure_balance,
    note_choices,
    record_routes,
    replay_routes,
)
from podium.training.scoring import score_tokens, score_values
from podium.training.sharded_loading import load_parallel
from podium.workers.learner import Learner, list_own_columns
from podium.workers.values import VALUE_COLUMNS, VALUE_LEARNING_RATE, compute_values, gather_moments, token_value_loss
from podium.workers.weight_sync.on_device import Lent, Site, lend, site_of
from podium.workers.weight_sync.receiver import WeightReceiver

ENTROPY_COEF: Final = "entropy_coef"
"""Metadata of a batch: the coefficient of its entropy bonus."""
HEAD_ALONE: Final = "head_alone"
"""Metadata of a batch: whether an update by it trains the value head alone."""

_COMPARED_ROWS = 4  # of each rank
_SCORES = (fields.OLD_LOGPROBS, fields.ENTROPY, fields.SQUARED_PROBS)
_LOSS_COLUMNS = (
    *(fields.ADVANTAGES, fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS),
    *(fields.REF_LOGPROBS, fields.TEACHER_LOGPROBS, fields.TEACHER_TOP, fields.ROLLOUT_TOP),
)
_TOP_COLUMNS = (fields.TEACHER_TOP, fields.ROLLOUT_TOP)


class Policy(Learner):
    """A causal language model with its optimizer. ``AlgorithmConfig(loss="cross_entropy")`` trains it on examples.

    The arguments are those of :class:`Learner`, and one more. With ``algorithm.options.critic_trunk`` "shared" or
    "detached" the model has a value head too, which makes the policy its own critic. The head's values start at zero.

    Args:
        value_lr: The learning rate of the value head, in place of that of ``optim``.
    """

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        *,
        value_lr: float | None = None,
    ) -> None:
        if optim is not None and value_lr is not None:
            begins = {"first_step": 0} if isinstance(optim, EndingOptim) else {}  # the head never waits
            self.head_optim = replace(optim, lr=value_lr, **begins)
        super().__init__(model, optim, parallel, algorithm)
        critic = self.algorithm.critic
        self.late_steps = critic.critic_warmup if critic.critic_trunk == "separate" else 0

    @cached_property
    def _weights(self) -> WholeWeights:
        return WholeWeights(self.model, merged=self._overrides_buckets)

    @property
    def _overrides_buckets(self) -> bool:
        """Whether a subclass has its own ``weight_bucket``, which may change whole weights alone."""
        return inspect.getattr_static(type(self), "weight_bucket") is not vars(Policy)["weight_bucket"]

    @cached_property
    def _in_place(self) -> InPlace | None:
        """The weights themselves, to be read where they are; None where they must be gathered, and on other ranks."""
        return InPlace(self._weights.tensors) if self.ctx.rank == 0 and self._weights.is_plain else None

    @property
    def _not_in_place(self) -> str:
        """Why nobody can read the weights where they are; "" where that is possible."""
        if self._weights.sharded:
            return "the policy's weights are sharded"
        if self.parallel.offload == "all":
            return "the policy's weights leave the device while it rests (parallel.offload)"
        if any(isinstance(worker, WeightReceiver) for worker in self.ctx.colocated.values()):
            return "a generator in the policy's process reads its weights"
        if self._overrides_buckets:
            return f"{type(self).__name__} sends its weights by a weight_bucket of its own"
        return ""

    @cached_property
    def _lent(self) -> list[Tensor]:
        """What is kept until those have read the weights to whom they are lent."""
        return []

    _scored: Tensor | None = None  # log-probabilities of the last update's tokens [N], which are those before it

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, so that the model's parameters are not yet its weights."""
        return self.config.lora is not None

    @endpoint(collect=nothing())
    def rest(self, weights: bool = True) -> None:
        """As :meth:`.Learner.rest`. If a generator in the same process reads the weights, they stay."""
        read = any(worker.reads_policy for worker in self.ctx.colocated.values() if isinstance(worker, WeightReceiver))
        self.engine.rest(weights=weights and not read)

    def make_model(self) -> nn.Module:
        change = add_value_head if self.algorithm.has_value_head else None
        model = load_parallel(self.config, self.parallel, self.device, change=change)
        if self.algorithm.uses_routers:  # raises an error if the model has none
            find_routers(model, "router_balance" if self.algorithm.router_balance else "router_replay")
        return model

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def logprobs(self, batch: Batch, entropy: bool = False, squares: bool = False) -> Batch:
        """Compute ``old_logprobs`` of the tokens with loss, 0 elsewhere: see :func:`score_tokens`.

        Args:
            entropy: Whether ``entropy`` is computed too, which reads the distribution over the vocabulary once more.
            squares: Whether ``squared_probs`` are computed too, likewise.

        With ``router_replay: old`` the batch gets ``experts`` too.
        """
        noted = list[Tensor]()
        scores = self._scores(batch, entropy, squares, noted if self.algorithm.router_replay == "old" else None)
        if self.algorithm.router_replay == "old":
            tokens, width = batch.jagged(fields.TOKENS).to("cpu"), count_experts(self.model)
            scores[fields.EXPERTS] = tokens.like(*noted or [torch.zeros(len(tokens.values), width, dtype=torch.int16)])
        return Batch(scores, batch.meta)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def values(self, batch: Batch) -> Batch:
        """As :meth:`.Critic.values`, by the value head.

        Raises:
            ConfigError: The model has no value head.
        """
        if not self.algorithm.has_value_head:
            raise ConfigError(
                "this policy has no value head: set algorithm.options.critic_trunk to shared or detached, or ask the "
                "critic"
            )
        return compute_values(self.engine, batch, lambda micro: score_values(self.model, micro))

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), readonly=True)
    def answer_values(self, batch: Batch) -> Batch:
        """Compute ``answer_values``, float64 ``[B]``: the sum of the log-probabilities of each row's tokens with
        loss, without gradients and dropout."""
        return Batch({fields.ANSWER_VALUES: sum_rows(self._scores(batch, entropy=False)[fields.OLD_LOGPROBS])})

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), readonly=True)
    def score_examples(self, batch: Batch) -> Batch:
        """Compute the loss of examples and how well their tokens are predicted, without gradients.

        Args:
            batch: ``tokens`` and ``loss_mask``, with at least one token to learn in each row.

        Returns:
            ``loss``, the mean cross-entropy of each row's tokens to learn in nats, and ``token_accuracy``, the share of
            these tokens that are the most probable ones: float64 ``[B]``.
        """

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            scores = score_tokens(self.model, batch, micro, best=True)
            assert scores.best is not None
            return {LOSS: -scores.logprobs, TOKEN_ACCURACY: (scores.logprobs >= scores.best).float()}

        columns = self.engine.evaluate(batch, compute, (LOSS, TOKEN_ACCURACY))
        mask = batch.jagged(fields.LOSS_MASK).to("cpu")
        counts_B, row_N = count_sampled(mask), rows_of_tokens(mask.offsets)
        sums = {name: row_sums(column.values.double(), row_N, len(counts_B)) for name, column in columns.items()}
        return Batch({name: sums_B / counts_B.clamp(min=1) for name, sums_B in sums.items()})

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Make one optimizer step over a global minibatch: :meth:`accumulate` and :meth:`step` in one call.

        Args:
            batch: As for :meth:`accumulate`.

        Returns:
            The metrics of both.

        Raises:
            DataError: A column is missing, or the loss did not return one number a token.
        """
        if batch.meta.get(HEAD_ALONE):
            return self._update_head(batch)
        return {**self.accumulate(batch), **self.step()}

    def _update_head(self, batch: Batch) -> dict[str, float]:
        """Make one optimizer step of the value head alone."""
        batch = self.weighted(batch)
        moments, self._scored = gather_moments(self.engine, batch), None

        def compute(micro: MicroBatch) -> TokenLoss:
            return token_value_loss(micro, score_values(self.model, micro), self.algorithm)

        minibatch = self.engine.accumulate(batch, compute, columns=VALUE_COLUMNS)
        applied = self.engine.apply(head_alone=True)
        return {
            **self.count_means(batch, {**minibatch.metrics, metrics.EXPLAINED_VARIANCE: explained_variance(moments)}),
            metrics.VALUE_LOSS: minibatch.loss,
            "value/grad_norm": applied.grad_norm,
            VALUE_LEARNING_RATE: applied.head_learning_rate,
        }

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def accumulate(self, batch: Batch, loss: AlgorithmConfig | None = None, *, weight: float = 1.0) -> dict[str, float]:
        """Add the gradient of a global minibatch to those that wait for :meth:`step`.

        The sum of several minibatches' losses is trained, each with its weight. A loss is normalized over its own
        minibatch, unless the batch has ``loss_weights``. If an exception is raised, all gradients that wait are
        dropped.

        Args:
            batch: ``tokens``, ``loss_mask`` and ``loss_weights`` (computed over the minibatch if absent); ``left_out``,
                if rows are left out; for a policy loss also ``advantages``, and ``old_logprobs``,
                ``rollout_logprobs``, ``ref_logprobs``, ``teacher_logprobs`` as it asks for them, and token columns of
                the user's own. Without
                ``old_logprobs`` the policy counts as unchanged since sampling. ``batch.meta["entropy_coef"]`` stands in
                place of that of the worker's algorithm.
            loss: The loss of this minibatch and its constants; by default the worker's own.
            weight: A factor of this minibatch's loss.

        Returns:
            Metrics of the whole minibatch, equal on all ranks, by their names in :mod:`podium.telemetry.metrics`.

        Raises:
            ConfigError: ``loss`` cannot be found, or an option of it is wrong.
            DataError: A column is missing, or the loss did not return one number a token.
        """
        algorithm = self.algorithm
        if ENTROPY_COEF in batch.meta:
            algorithm = replace(algorithm, entropy_coef=batch.meta[ENTROPY_COEF])
        if loss is not None:
            algorithm = self._resolve(loss)
            batch = batch.with_meta(aggregation=algorithm.aggregation_mode)
        sampled_N = batch.jagged(fields.LOSS_MASK).values.bool()
        batch = self.weighted(batch)
        columns = [*(name for name in _LOSS_COLUMNS if name in batch), *list_own_columns(batch)]
        judges = loss is None and self.algorithm.has_value_head
        shared = judges and self.algorithm.critic.critic_trunk == "shared"
        moments = gather_moments(self.engine, batch) if judges else None
        flat = not judges and _has_no_other_term(algorithm, batch) and fields.ADVANTAGES in batch
        flat = flat and self.engine.is_flat(batch, fields.ADVANTAGES)
        figures = {} if flat else self._minibatch_figures(batch, columns, algorithm)
        shares_LE = self._expert_shares(batch) if algorithm.router_balance and not flat else None
        self._scored = kept_N = None
        if fields.ROLLOUT_LOGPROBS in batch and fields.OLD_LOGPROBS not in batch:
            unscored_N = sampled_N if flat else sampled_N ^ batch.jagged(fields.LOSS_MASK).values
            kept_N = torch.where(unscored_N, torch.nan, 0.0).to(self.device)
        sampled = self._sample_mismatch(batch) if flat and kept_N is not None else {}

        if algorithm.router_replay != "none" and loss is None and not flat and fields.EXPERTS not in batch:
            raise DataError(f"algorithm.options.router_replay needs the column {fields.EXPERTS!r}; the batch has none")

        def compute(micro: MicroBatch) -> TokenLoss:
            top_ids = {name: micro.columns[name].chunk(2, -1)[1].long() for name in _TOP_COLUMNS if name in columns}
            ids_KJ = torch.cat([*top_ids.values()], -1) if top_ids else None
            with nullcontext(list[Route]()) if shares_LE is None else record_routes(self.model) as routes:
                options = {"entropy": True, "entropy_grad": algorithm.entropy_coef != 0, "value_grad": shared}
                scores = score_tokens(self.model, batch, micro, chosen_KJ=ids_KJ, **options)
            if kept_N is not None:
                kept_N[micro.index] = scores.logprobs.detach().float()
            added: dict[str, Tensor] = {}
            if shares_LE is not None:
                added["router_balance"] = measure_balance(routes, micro.select, shares_LE)
            if scores.chosen is not None:
                parts = scores.chosen.split([ids.shape[1] for ids in top_ids.values()], -1)
                added |= {f"at_{name}": part for name, part in zip(top_ids, parts, strict=True)}
            inputs = LossInputs(
                offsets_B1=micro.offsets,
                columns={**added, **_loss_columns(micro, scores, columns)},
                figures={name: micro.columns[name] for name in figures},
                step=self.engine.step_count,
            )
            return self._add_value_loss(policy_loss(inputs, algorithm), micro, scores.values if judges else None)

        added_columns = (*columns, *figures, *(VALUE_COLUMNS if judges else ()))
        full_batch = batch.with_columns(figures)
        replay = partial(_replay_experts, self.model, batch)
        minibatch = self.engine.accumulate(
            full_batch, compute, columns=added_columns, weight=weight, flat=flat, within=replay
        )
        self._scored = kept_N
        named = {metrics.LOSS: minibatch.loss, **self.count_means(batch, minibatch.metrics), **sampled}
        return named if moments is None else self._split_losses(named, batch, moments, weight)

    def _add_value_loss(self, token_loss: TokenLoss, micro: MicroBatch, values_K: Tensor | None) -> TokenLoss:
        """Return the policy's loss plus ``value_coef`` times that of the values, if there are any."""
        if values_K is None:
            return token_loss
        return token_loss.add(token_value_loss(micro, values_K, self.algorithm), self.algorithm.critic.value_coef)

    def _split_losses(
        self, named: Mapping[str, float], batch: Batch, moments: Tensor, weight: float
    ) -> dict[str, float]:
        """Return the metrics of a minibatch with the losses of policy and values apart."""
        value = named.get(metrics.VALUE_LOSS, 0.0) * float(moments[0])  # from the mean under weights to their sum
        return {
            **named,
            metrics.LOSS: named[metrics.LOSS] - weight * self.algorithm.critic.value_coef * value,
            metrics.VALUE_LOSS: value,
            **self.count_means(batch, {metrics.EXPLAINED_VARIANCE: explained_variance(moments)}),
        }

    @endpoint(collect=first())
    def step(self, *, learning_rate: float | None = None, grad_clip: float | None = None) -> dict[str, float]:
        """Make one optimizer step by the gradients that :meth:`accumulate` has added up.

        Args:
            learning_rate: In place of that of the schedule ``optim.*``.
            grad_clip: In place of ``optim.grad_clip``; 0 clips nothing.

        Returns:
            Norm of the gradient before clipping, learning rates and number of skipped steps, by their names in
            :mod:`podium.telemetry.metrics`.

        Raises:
            PodiumError: No gradient waits.
        """
        applied = self.engine.apply(learning_rate=learning_rate, grad_clip=grad_clip)
        peak = memory_peak_bytes(self.device)
        return {
            metrics.GRAD_NORM: applied.grad_norm,
            metrics.LEARNING_RATE: applied.learning_rate,
            **({VALUE_LEARNING_RATE: applied.head_learning_rate} if self.algorithm.has_value_head else {}),
            metrics.SKIPPED_STEPS: float(self.engine.skipped_count),
            **({"policy/loss_scale": self.engine.loss_scale.value} if self.engine.loss_scale.is_used else {}),
            # so far, on the first rank's accelerator
            **({"policy/memory_peak_gib": Maximum(peak / 2**30)} if peak else {}),
        }

    def _resolve(self, loss: AlgorithmConfig) -> AlgorithmConfig:
        check_functions(loss)
        algorithm = loss.resolve()
        check_dropout(self.config, algorithm)
        return algorithm

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def update_logprobs(self, batch: Batch) -> Batch:
        """Return the ``old_logprobs`` that the last update computed, if its batch had none and the same rows as
        ``batch``.

        The column is NaN if there was no such update.

        Args:
            batch: ``loss_mask`` and ``group``.
        """
        mask, kept_N = batch.jagged(fields.LOSS_MASK), self._scored
        if kept_N is None or len(kept_N) != len(mask.values):
            kept_N = torch.full((len(mask.values),), torch.nan)
        return Batch({fields.OLD_LOGPROBS: mask.like(kept_N.cpu())})

    @endpoint(collect=first())
    def weight_manifest(self) -> WeightManifest:
        """Return names and shapes of all weights, and the number of updates, which identifies the weights."""
        memory_key = "" if self._in_place is None else self._in_place.key
        return WeightManifest(self._weights.manifest, self.engine.step_count, memory_key, self._weights.adapters)

    @endpoint(collect=first(), returns="ref")
    def weight_bucket(self, index: int, bucket_bytes: int, known: Sequence[int] | None = None) -> Bucket:
        """Return part of the weights for a :class:`~podium.workers.StreamedSync`, from the first rank; all ranks call.

        Args:
            index: The bucket's number from 0. Buckets must be requested in order; those of frozen weights may be left
                out.
            bucket_bytes: The size of all buckets.
            known: The checksums of what the generators hold: see :func:`.fill`.
        """
        self.engine.wake()
        takes_part = self.ctx.rank == 0 or self._weights.sharded
        rows = self._weights.bucket(index, bucket_bytes) if takes_part else []
        return fill(rows, known) if self.ctx.rank == 0 else ([], None)

    @endpoint(collect=first(), returns="ref")
    def weights_in_place(self) -> InPlace | None:
        """Return references to the weights themselves, in the order of ``weight_manifest``. Readers find the weights as
        they are when they are read.

        None where the weights must come in buckets: they are sharded or on an accelerator, leave their place while the
        policy rests, a generator in the same process reads them, the backend shares no memory, or a subclass has its
        own ``weight_bucket``.
        """
        return None if self._not_in_place else self._in_place

    @endpoint()
    def weight_site(self) -> Site:
        """Return the location of this rank's weights, and the reason if a generator cannot copy them from there."""
        return site_of(self.device, self._not_in_place)

    @endpoint()
    def lend_weights(self, readers: Sequence[int]) -> Lent:
        """Lend the weights to processes on the same device, and end earlier loans.

        Args:
            readers: How many processes read the weights of each rank; empty to end all loans.
        """
        self._lent.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        lent, self._lent = lend(self._weights.tensors, readers[self.ctx.rank] if readers else 0)
        return lent

    @endpoint(collect=nothing())
    def save_pretrained(self, path: str) -> None:
        """Write model and tokenizer to the directory ``path`` so that transformers' Auto classes load them.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        all_weights = full_weights(self.model)
        if self.ctx.rank == 0:
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in all_weights}
            save_pretrained(self.model, weights, path, load_tokenizer(self.config.tokenizer_source), self.others)
        else:
            deque(all_weights, maxlen=0)  # shards are gathered from all ranks

    def _sample_mismatch(self, batch: Batch) -> dict[str, float]:
        """Compare the generator's log-probabilities with this policy's in a few rows of a minibatch over which the step
        made no pass: a generator that computes another model draws completions that all earn nothing."""
        weighed = count_sampled(batch.jagged(fields.LOSS_MASK)).nonzero().flatten()[:_COMPARED_ROWS]
        rows = batch.take(weighed.tolist())
        chosen_N = rows.jagged(fields.LOSS_MASK).values.bool()
        logprobs_N = self._scores(rows, entropy=False)[fields.OLD_LOGPROBS].values
        apart_N = (logprobs_N - rows.jagged(fields.ROLLOUT_LOGPROBS).values)[chosen_N].double().abs()
        largest = apart_N.max() if len(apart_N) else apart_N.sum()
        parts = torch.stack([apart_N.sum(), apart_N.new_tensor(len(apart_N)), largest]).to(self.device)
        table = self.engine.parallel.gather(parts)
        total, count, _ = table.sum(0).tolist()
        if not count:
            return {}
        return {metrics.MISMATCH_MEAN: total / count, metrics.MISMATCH_MAX: float(table[:, 2].max())}

    def _scores(
        self, batch: Batch, entropy: bool, squares: bool = False, noted: list[Tensor] | None = None
    ) -> dict[str, Jagged]:
        """Log-probabilities and what else is asked for. ``noted`` gets the column ``experts`` of what routers chose."""
        tokens = len(batch.jagged(fields.TOKENS).values)

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            replay(micro)
            with nullcontext(list[Route]()) if noted is None else record_routes(self.model, "router_replay") as routes:
                scores = score_tokens(self.model, batch, micro, entropy=entropy, squares=squares)
            if noted is not None:
                noted[:] = [note_choices(noted[0] if noted else None, routes, micro, tokens)]
            named = (scores.logprobs, scores.entropy, scores.squares)
            return {name: column for name, column in zip(_SCORES, named, strict=True) if column is not None}

        names = [name for name, is_wanted in zip(_SCORES, (True, entropy, squares), strict=True) if is_wanted]
        with _replay_experts(self.model, batch) as replay:
            return self.engine.evaluate(batch, compute, names)

    def _expert_shares(self, batch: Batch) -> Tensor:
        """The experts' shares of the choices for the tokens with loss of all ranks, ``[L, E]``, from a pass without
        gradients."""
        counts = torch.zeros((), dtype=torch.float64, device=self.device)

        def count(micro: MicroBatch) -> Mapping[str, Tensor]:
            nonlocal counts
            replay(micro)
            with record_routes(self.model) as routes:
                score_tokens(self.model, batch, micro)
            counts = counts + count_choices(routes, micro.select)
            return {}

        with _replay_experts(self.model, batch) as replay:
            self.engine.evaluate(batch, count, ())
        every = self.engine.parallel.gather_objects(counts.cpu())
        total_LE = sum((part for part in every if part.ndim), torch.zeros((), dtype=torch.float64)).to(self.device)
        return total_LE / total_LE.sum(-1, keepdim=True) if total_LE.ndim else total_LE

    def _minibatch_figures(self, batch: Batch, columns: Sequence[str], algorithm: AlgorithmConfig) -> dict[str, Jagged]:
        """Token columns that ``minibatch`` functions of loss and corrections compute from the tokens of all ranks.

        A first pass without gradients gives the log-probabilities. Each rank gathers the tokens of all, computes the
        figures of the whole minibatch, and keeps those of its own tokens.
        """
        declared = [(f"loss {name!r}", LOSSES.declaration(name)) for name in algorithm.losses]
        declared += [(f"correction {name!r}", CORRECTIONS.declaration(name)) for name in algorithm.corrections]
        functions = [(who, figures) for who, entry in declared if (figures := entry.load_minibatch()) is not None]
        if not functions:
            return {}
        mask = batch.jagged(fields.LOSS_MASK)
        chosen_N, lengths_B = mask.values.bool(), count_sampled(mask)
        scores = self._scores(batch, entropy=True)
        own_columns = {
            **{name: batch.jagged(name).values[chosen_N] for name in (fields.TOKENS, *columns)},
            "logprobs": scores[fields.OLD_LOGPROBS].values[chosen_N],
            "entropy": scores[fields.ENTROPY].values[chosen_N],
        }
        every = self.engine.parallel.gather_objects((own_columns, lengths_B[lengths_B > 0]))
        lengths_B = torch.cat([lengths for _, lengths in every])
        loss_inputs = LossInputs(
            offsets_B1=torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(self.device),
            columns={name: torch.cat([tokens[name] for tokens, _ in every]).to(self.device) for name in own_columns},
            step=self.engine.step_count,
        )
        start = sum(int(lengths.sum()) for _, lengths in every[: self.ctx.rank])
        columns_added: dict[str, Jagged] = {}
        with torch.no_grad():
            for who, figures in functions:
                named = _check_figures(figures(loss_inputs, algorithm), loss_inputs, batch, who)
                for name, figure_M in named.items():
                    values_N = torch.zeros(len(chosen_N), dtype=figure_M.dtype)
                    values_N[chosen_N] = figure_M[start : start + int(chosen_N.sum())].cpu()
                    columns_added[name] = mask.like(values_N)
        return columns_added


def _replay_experts(model: nn.Module, batch: Batch) -> AbstractContextManager[Callable[[MicroBatch], None]]:
    """As :func:`replay_routes` by the column ``experts``. Without this column the routers choose anew."""
    if fields.EXPERTS not in batch:
        return nullcontext(lambda micro: None)
    return replay_routes(model, batch.jagged(fields.EXPERTS).values)


def _loss_columns(micro: MicroBatch, scores: TokenScores, columns: Sequence[str]) -> dict[str, Tensor]:
    """The columns of a loss's inputs that a batch has, and what the forward pass gave."""
    assert scores.entropy is not None
    taken = {name: micro.columns[name] for name in columns}
    return {**taken, "tokens": micro.targets, "logprobs": scores.logprobs, "entropy": scores.entropy}


def _has_no_other_term(algorithm: AlgorithmConfig, batch: Batch) -> bool:
    """Whether the loss is 0, with its gradient, where the advantage is, and nothing else is measured or added."""
    if ENTROPY_COEF in batch.meta:  # a coefficient that follows the entropy, which is measured where it is 0, too
        return False
    if algorithm.entropy_coef or algorithm.needs_reference or algorithm.router_balance:
        return False
    return all(LOSSES.declaration(name).scales_advantage for name in algorithm.sampled_losses)


def _check_figures(figures: object, whole: LossInputs, batch: Batch, owner: str) -> Mapping[str, Tensor]:
    """Return the ``figures`` of a loss. Raises DataError if they are not one value a token by names of their own."""
    who, expected = f"{owner}: its minibatch function", list(whole.logprobs_N.shape)
    if not isinstance(figures, Mapping):
        raise DataError(f"{who} returned {type(figures).__name__}; expected tensors by name")
    named = cast("Mapping[str, object]", figures)
    for name, figure_M in named.items():
        if not isinstance(figure_M, Tensor) or list(figure_M.shape) != expected:
            kind = (
                f"of shape {list(figure_M.shape)}" if isinstance(figure_M, Tensor) else f"as {type(figure_M).__name__}"
            )
            raise DataError(f"{who} returned {name} {kind}; expected one value a token, {expected}")
        if name in batch:
            raise DataError(f"{who} returned {name!r}, which is a column of the batch: choose another name")
    return cast("Mapping[str, Tensor]", named)
