"""The base of the workers that are trained: a model, its optimizer, and checkpoints."""

from __future__ import annotations

from torch import nn

from podium.algorithms import AlgorithmConfig
from podium.data import Batch, fields
from podium.devices import choose_device
from podium.runtime import Worker, endpoint, nothing
from podium.workers.checkpoints import load_checkpoint, save_checkpoint
from podium.workers.config import ModelConfig, OptimConfig, ParallelConfig
from podium.workers.engine import TrainEngine
from podium.workers.models import load_model

__all__ = ["Learner"]


class Learner(Worker):
    """A model, its optimizer, and its checkpoints on all ranks of the group.

    Args:
        model: The model to train.
        optim: The optimizer. None makes a worker that only evaluates.
        parallel: How model and batches are spread over ranks.
        algorithm: The loss and its constants.
    """

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        parallel: ParallelConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
    ) -> None:
        self.config = model
        self.algorithm = algorithm or AlgorithmConfig()
        self.device = choose_device(self.ctx.devices)
        self.engine = TrainEngine(
            self.make_model(),
            optim=optim,
            parallel=parallel or ParallelConfig(),
            device=self.device,
            world_size=self.ctx.world_size,
        )

    @property
    def model(self) -> nn.Module:
        """The model that is trained, in place."""
        return self.engine.model

    def make_model(self) -> nn.Module:
        """Make the model to train, on ``self.device``. A subclass may make another."""
        return load_model(self.config, self.device)

    @endpoint(collect=nothing())
    def save(self, path: str) -> None:
        """Write a checkpoint to resume from: model, optimizer, step and random state, into the directory ``path``.

        Raises:
            CheckpointError: The directory cannot be written.
        """
        save_checkpoint(self.engine, path, rank=self.ctx.rank)

    @endpoint(collect=nothing())
    def load(self, path: str) -> None:
        """Read what :meth:`save` wrote, on this or another number of ranks.

        Raises:
            CheckpointError: There is no finished checkpoint, or it is one of another model.
        """
        load_checkpoint(self.engine, path, rank=self.ctx.rank)

    def weighted(self, batch: Batch) -> Batch:
        """Return ``batch`` with ``loss_weights``, computed over all ranks' rows where it has none.

        ``batch.meta["max_new_tokens"]`` is the constant of the aggregation ``sequence-sum-constant``.
        """
        if fields.LOSS_WEIGHTS in batch:
            return batch
        weights = self.engine.loss_weights(batch, self.algorithm.aggregation, batch.meta.get("max_new_tokens"))
        return batch.with_columns({fields.LOSS_WEIGHTS: weights})
