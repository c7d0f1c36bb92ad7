"""Frozen models: the reference that the policy is kept close to, and the teacher that it learns from."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import sum_rows
from podium.devices import choose_device
from podium.models.config import ModelConfig
from podium.runtime import Worker, concat, endpoint, first, nothing, shard
from podium.training.config import ParallelConfig
from podium.training.micro_batches import MicroBatch
from podium.training.optimizer import move_parameter
from podium.training.scoring import score_tokens
from podium.training.sharded_loading import load_parallel
from podium.training.train_engine import TrainEngine
from podium.workers.learner import Learner
from podium.workers.siblings import find_sibling


class FrozenModel(Worker):
    """Log-probabilities under frozen weights.

    If a colocated policy trains adapters of the same model, this model is that policy with its adapters switched off,
    and holds no weights of its own.

    Args:
        model: The model, whose adapters are left out.
        parallel: How model and batches are spread over ranks.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig | None = None) -> None:
        self._policy = find_sibling(self.ctx, "lend_weights")
        if self._policy is not None and self._policy.adapted and self._policy.config.plain == model.plain:
            self.engine = cast(TrainEngine, self._policy.engine)
            return
        self._policy = None
        device = choose_device(self.ctx.devices)
        parallel = parallel or ParallelConfig()
        frozen = load_parallel(model.plain, parallel, device).requires_grad_(False)
        self.engine = TrainEngine(frozen, optim=None, parallel=parallel, device=device, world_size=self.ctx.world_size)

    @endpoint(collect=first())
    def note(self) -> str:
        """As :meth:`.Learner.note`."""
        return self.engine.note

    @endpoint(collect=nothing())
    def rest(self) -> None:
        """As :meth:`.Learner.rest`. A policy that serves as the frozen model rests by itself."""
        if self._policy is None:
            self.engine.rest()

    def score(self, batch: Batch, column: str, *, top: int = 0) -> dict[str, Jagged]:
        """Compute the log-probabilities of the tokens with loss as ``column``, 0 elsewhere: see
        :func:`score_tokens`. With ``top`` also ``teacher_top``, of the so many most probable ids."""

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            scores = score_tokens(self.engine.model, batch, micro, top=top)
            return {column: scores.logprobs, **({} if scores.top is None else {fields.TEACHER_TOP: scores.top})}

        with contextlib.nullcontext() if self._policy is None else cast(Any, self._policy.model).disable_adapter():
            names = (column, fields.TEACHER_TOP) if top else (column,)
            return self.engine.evaluate(batch, compute, names, {fields.TEACHER_TOP: (2 * top,)})


class Reference(FrozenModel):
    """The model that the policy is kept close to. The arguments are those of :class:`FrozenModel`."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def logprobs(self, batch: Batch) -> Batch:
        """Compute ``ref_logprobs`` of the tokens with loss, 0 elsewhere."""
        return Batch(self.score(batch, fields.REF_LOGPROBS), batch.meta)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), readonly=True)
    def answer_values(self, batch: Batch) -> Batch:
        """As :meth:`.Policy.answer_values`, under the frozen weights."""
        return Batch({fields.ANSWER_VALUES: sum_rows(self.logprobs(batch).jagged(fields.REF_LOGPROBS))})


class FollowingReference(Learner):
    """A reference that becomes the policy now and then. It has checkpoints, because nothing else has its weights.

    Args:
        model: The model that it is at first.
        parallel: How model and batches are spread over ranks, as those of the policy in the same processes.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig | None = None) -> None:
        super().__init__(replace(model, dropout=False), parallel=parallel)
        self.engine.model.requires_grad_(False)

    @endpoint(collect=nothing())
    def follow(self, share: float) -> None:
        """Move ``share`` of the way to the weights that the policy has now; 1 makes this model the policy.

        The rounding at random of weights in bfloat16 depends on the number of the policy's optimizer steps, and is the
        same on ranks that hold the same weights.
        """
        policy = find_sibling(self.ctx, "lend_weights")
        assert policy is not None  # the configuration has both in the same processes
        with self.engine.awake(), policy.engine.awake():
            followed = dict(policy.model.named_parameters())
            first_seed = policy.engine.step_count * len(followed)
            for seed, (name, parameter) in enumerate(self.model.named_parameters(), first_seed):
                move_parameter(parameter, followed[name], share, seed)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def logprobs(self, batch: Batch) -> Batch:
        """As :meth:`.Reference.logprobs`."""

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            return {fields.REF_LOGPROBS: score_tokens(self.model, batch, micro).logprobs}

        return Batch(self.engine.evaluate(batch, compute, (fields.REF_LOGPROBS,)), batch.meta)


class Teacher(FrozenModel):
    """The model that the policy learns from. Each id means the same token to both, whatever their sizes are.

    Args:
        model: The model.
        parallel: How model and batches are spread over ranks.
        vocabulary: The number of the policy's ids, over which distributions are where not all of them stand for text.
        top_k: The log-probabilities of so many most probable ids are computed beside the sampled token's.
    """

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig | None = None, *, vocabulary: int, top_k: int = 0
    ) -> None:
        super().__init__(model, parallel)
        self.vocabulary, self.top_k = vocabulary, top_k

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), returns="ref", readonly=True)
    def logprobs(self, batch: Batch) -> Batch:
        """Compute ``teacher_logprobs`` of the tokens with loss, 0 elsewhere, and ``teacher_top`` likewise.

        ``teacher_top`` has the log-probabilities of the ``top_k`` most probable ids and then these ids, if asked for.
        """
        limit, holes = batch.meta.get("text_ids") or (self.vocabulary, ())
        top = min(self.top_k, limit - len(holes))
        batch = batch.with_meta(text_ids=(limit, holes))
        return Batch(self.score(batch, fields.TEACHER_LOGPROBS, top=top), batch.meta)
