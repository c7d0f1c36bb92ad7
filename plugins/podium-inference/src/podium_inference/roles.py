"""The roles of a run without training, in their worker processes."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from podium.algorithms import AlgorithmConfig
from podium.runs.config import InferenceConfig
from podium.runtime import Cluster, Handle
from podium.telemetry import Waiting, emit
from podium.trainer.checks.placement import reserve_places
from podium.trainer.roles import close_role, inference_arguments, list_classes, start_workers
from podium.training import ParallelConfig
from podium.training.config import Precision
from podium.workers import Generator, Policy, RewardModel

__all__ = ["InferenceRoles", "start_generator", "start_scorer"]


class InferenceRoles(NamedTuple):
    """Handles of the roles of a run without training."""

    generator: Handle[Generator]
    reward: Handle[RewardModel] | None = None
    rollout: Handle[Any] | None = None


@contextmanager
def start_generator(cluster: Cluster, config: InferenceConfig) -> Iterator[InferenceRoles]:
    """Start a generator with its own model, and the other roles of a run without training. The end of the block ends
    them."""
    classes = list_classes(config)
    bound = {role: classes[role].bind(**inference_arguments(role, config)) for role in config.roles}
    with start_workers(cluster, config, bound) as (started, (generator,)):
        yield InferenceRoles(generator, started.get("reward"), started.get("rollout"))


@contextmanager
def start_scorer(
    cluster: Cluster, config: InferenceConfig, precision: Precision | Mapping[str, Any] = "auto"
) -> Iterator[Handle[Policy]]:
    """Start a policy that is not trained, for the loss of held-out examples; end it with the block.

    It computes in ``precision``, as ``parallel.precision`` says it of a run.
    """
    parallel, algorithm = ParallelConfig(precision=precision), AlgorithmConfig(loss="cross_entropy")
    bound = Policy.bind(config.model, parallel=parallel, algorithm=algorithm)
    ranks = config.placement.ranks_of("policy") if cluster.capabilities.collectives else 1
    with reserve_places(cluster, ranks, config.placement) as pool, ExitStack() as stack:
        emit(Waiting(f"loading {config.model.path or 'a new model'} for policy", 0, len(pool)))
        policy = cluster.start(bound, pool, seed=config.run.seed, timeout_s=config.run.timeout_s)
        stack.push(partial(close_role, policy))
        yield policy
