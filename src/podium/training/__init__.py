"""The forward pass, the backward pass and the optimizer step of one rank."""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.training.config import OptimConfig as OptimConfig, ParallelConfig as ParallelConfig
    from podium.training.train_engine import StepResult as StepResult, TrainEngine as TrainEngine
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
