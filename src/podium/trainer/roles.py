"""The roles of a run in their worker processes, and how new weights reach the generator.

colocated   processes 0..R-1  policy [reference] [critic] estimator generator   the generator reads the policy's weights
split       processes 0..R-1  policy [reference] [critic] estimator
            processes R..     generator                                         weights are streamed after each step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from podium.algorithms import AlgorithmConfig
from podium.errors import ConfigError, PlacementError
from podium.runtime import Bound, Cluster, ResourcePool, Worker, colocate
from podium.trainer.config import InferenceConfig, PlacementConfig, PPOConfig, SFTConfig
from podium.trainer.preflight import check_placement
from podium.workers import (
    ColocatedSync,
    Critic,
    Estimator,
    Generator,
    Learner,
    Policy,
    Reference,
    StreamedSync,
    WeightSync,
)

__all__ = ["RoleWorkers", "Roles", "bind_roles", "start_roles", "started_generator"]

_ROLES: Mapping[str, type[Worker]] = {
    "policy": Policy,
    "reference": Reference,
    "critic": Critic,
    "estimator": Estimator,
    "generator": Generator,
}

RoleWorkers = Mapping[str, type[Worker] | Bound[Any]]
"""By role, a user's own class, or ``MyPolicy.bind(...)`` where its constructor takes other arguments."""


@dataclass(frozen=True)
class Roles:
    """Handles of the roles of one run, and the pools that they stand on."""

    policy: Policy
    generator: Generator | None = None
    reference: Reference | None = None
    critic: Critic | None = None
    estimator: Estimator | None = None
    weight_sync: WeightSync | None = None
    pool: ResourcePool | None = None

    @property
    def learners(self) -> dict[str, Learner]:
        """The roles that are trained and have checkpoints, by name."""
        learners = {"policy": self.policy, "critic": self.critic}
        return {name: worker for name, worker in learners.items() if worker is not None}

    def sync_weights(self, version: int) -> None:
        """Make the policy's weights, as they are now, those that the generator draws from."""
        if self.weight_sync is not None:
            self.weight_sync.sync(version)

    def close(self, cluster: Cluster) -> None:
        """End the workers and give their slots back."""
        if self.weight_sync is not None:
            self.weight_sync.close()
        for handle in (self.generator, self.estimator, self.critic, self.reference, self.policy):
            if handle is not None:
                handle.group.close()
        if self.pool is not None:
            cluster.release(self.pool)


def bind_roles(config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None) -> dict[str, Bound[Any]]:
    """Bind each role of this configuration to its constructor's arguments, in the order in which they are made.

    Raises:
        ConfigError: ``workers`` names a role that does not exist or that this configuration does not use, or holds
            something that is no worker.
    """
    given, arguments = dict(workers or {}), _arguments(config)
    for role in given:
        if role not in arguments:
            raise ConfigError(f"workers[{role!r}]: this run has no such role; its roles are {', '.join(arguments)}")
    bound: dict[str, Bound[Any]] = {}
    for role, kwargs in arguments.items():
        worker = given.get(role, _ROLES[role])
        if not isinstance(worker, Bound) and not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ConfigError(f"workers[{role!r}] is {worker!r}: expected a subclass of Worker, or its .bind(...)")
        bound[role] = worker if isinstance(worker, Bound) else worker.bind(**kwargs)
    return bound


def start_roles(cluster: Cluster, config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None) -> Roles:
    """Start every role where ``config.placement`` puts it.

    Raises:
        ConfigError: There are several ranks on a backend without collectives, or ``workers`` does not fit.
        PlacementError: There is no room for the ranks or their devices.
        WorkerStartError: A constructor raised.
    """
    bound = bind_roles(config, workers)
    placement = config.placement
    check_placement(placement, cluster.backend_name, cluster.capabilities)
    parts = [dict(bound)]
    if placement.layout == "split" and "generator" in bound:
        parts = [{role: worker for role, worker in bound.items() if role != "generator"}]
        parts.append({"generator": bound["generator"]})
    ranks = [placement.ranks, placement.generators][: len(parts)]
    pool = _pool(cluster, sum(ranks), placement)
    started: dict[str, Any] = {}
    try:
        for part, place in zip(parts, pool.split(ranks), strict=True):
            started.update(cluster.start(colocate(**part), place, timeout_s=config.run.timeout_s))
        weight_sync = _weight_sync(started, placement)
    except BaseException:
        for handle in started.values():
            handle.group.close()
        cluster.release(pool)
        raise
    return Roles(**started, weight_sync=weight_sync, pool=pool)


@contextmanager
def started_generator(cluster: Cluster, config: InferenceConfig) -> Iterator[Generator]:
    """Start a generator alone, with its own model, on ``config.placement``'s ranks; end it with the block."""
    pool = _pool(cluster, config.placement.generators, config.placement)
    try:
        generator = cluster.start(
            Generator.bind(config.model, config.engine), pool, name="generator", timeout_s=config.run.timeout_s
        )
        try:
            yield generator
        finally:
            generator.group.close()
    finally:
        cluster.release(pool)


def _weight_sync(started: Mapping[str, Any], placement: PlacementConfig) -> WeightSync | None:
    """How weights reach the generator of these roles; None where there is none."""
    if "generator" not in started:
        return None
    weight_sync: WeightSync = ColocatedSync(started["generator"])
    if placement.layout == "split":
        weight_sync = StreamedSync(started["policy"], [started["generator"]], delta=placement.delta_sync)
    weight_sync.init()
    return weight_sync


def _arguments(config: PPOConfig | SFTConfig) -> dict[str, dict[str, Any]]:
    """Arguments of each role's constructor."""
    model = config.model
    learns: dict[str, Any] = {"model": model, "optim": config.ending_optim, "parallel": config.parallel}
    generator = {"model": model, "engine": config.engine}
    if isinstance(config, SFTConfig):
        policy = {**learns, "algorithm": AlgorithmConfig(loss="cross_entropy")}
        return {"policy": policy, "generator": generator} if config.eval.items else {"policy": policy}
    learns["algorithm"] = config.algorithm
    roles = {"policy": learns}
    if config.algorithm.needs_reference:
        roles["reference"] = {"model": model, "parallel": config.parallel}
    if config.has_critic:
        own = replace(model, path=config.critic.path, config={}) if config.critic.path else model
        optim = replace(config.ending_optim, lr=config.critic.lr)
        roles["critic"] = {**learns, "model": replace(own, lora=None), "optim": optim}
    return {**roles, "estimator": {"algorithm": config.algorithm}, "generator": generator}


def _pool(cluster: Cluster, slots: int, placement: PlacementConfig) -> ResourcePool:
    """One accelerator a slot where this cluster has so many; cores as configured."""
    accelerators = sum(int(node.resources.get("gpu", 0)) for node in cluster.nodes)
    gpus, cpus = (1 if accelerators >= slots else 0), placement.cpus or 0
    try:
        return cluster.pool(spread=slots, gpus=gpus, cpus=cpus, wait_s=placement.wait_s)
    except PlacementError as error:
        raise PlacementError(f"placement of {slots} ranks (placement.ranks, placement.cpus): {error}") from error
