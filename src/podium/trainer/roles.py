"""The roles of a run on their ranks: who is started where, and how new weights reach the generator.

colocated   hosts 0..R-1: policy [reference] [critic] estimator generator    the generator reads the policy's weights
split       hosts 0..R-1: policy [reference] [critic] estimator
            hosts R..   : generator                                          weights are streamed after each step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from podium.algorithms import PolicyLoss, SFTLoss, ValueLoss
from podium.errors import ConfigError, PlacementError
from podium.runtime import Bound, Cluster, Node, ResourcePool, Worker, colocate
from podium.trainer.config import InferenceConfig, PPOConfig, SFTConfig
from podium.trainer.sections import PlacementConfig
from podium.workers import (
    ColocatedPublication,
    Critic,
    Estimator,
    Generator,
    Policy,
    Publication,
    Reference,
    StreamedPublication,
)

__all__ = ["ROLES", "RoleWorkers", "Roles", "bind_roles", "spread", "start_roles", "started_generator"]

ROLES: Mapping[str, type[Worker]] = {
    "policy": Policy,
    "reference": Reference,
    "critic": Critic,
    "estimator": Estimator,
    "generator": Generator,
}

RoleWorkers = Mapping[str, type[Worker] | Bound[Any]]
"""A user's own class for a role, or ``MyPolicy.bind(...)`` where its constructor takes other arguments."""


@dataclass(frozen=True)
class Roles:
    """Handles of the roles of one run, and the pools that they stand on."""

    policy: Policy
    generator: Generator | None = None
    reference: Reference | None = None
    critic: Critic | None = None
    estimator: Estimator | None = None
    publication: Publication | None = None
    pool: ResourcePool | None = None

    def publish(self, version: int) -> None:
        """Make the policy's weights, as they are now, those that the generator draws from."""
        if self.publication is not None:
            self.publication.publish(version)

    def close(self, cluster: Cluster) -> None:
        """End the workers and give their slots back."""
        if self.publication is not None:
            self.publication.close()
        for handle in (self.generator, self.estimator, self.critic, self.reference, self.policy):
            if handle is not None:
                handle.group.close()
        if self.pool is not None:
            cluster.release(self.pool)


def bind_roles(config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None) -> dict[str, Bound[Any]]:
    """Each role of this configuration with its constructor's arguments, in the order in which they are made.

    Raises:
        ConfigError: ``workers`` names a role that there is not or that this configuration does not use, or holds
            something that is no worker.
    """
    given = dict(workers or {})
    arguments = _arguments(config)
    for role in given:
        if role not in arguments:
            raise ConfigError(f"workers[{role!r}]: this run has no such role; its roles are {', '.join(arguments)}")
    bound: dict[str, Bound[Any]] = {}
    for role, kwargs in arguments.items():
        worker = given.get(role, ROLES[role])
        if not isinstance(worker, Bound) and not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ConfigError(f"workers[{role!r}] is {worker!r}: expected a subclass of Worker, or its .bind(...)")
        bound[role] = worker if isinstance(worker, Bound) else worker.bind(**kwargs)
    return bound


def start_roles(cluster: Cluster, config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None) -> Roles:
    """Start every role where ``config.placement`` puts it.

    Raises:
        ConfigError: several ranks on a backend without collectives, or ``workers`` does not fit.
        PlacementError: the ranks or their devices cannot be had.
        WorkerStartError: a constructor raised.
    """
    bound = bind_roles(config, workers)
    placement = config.placement
    if placement.ranks > 1 and not cluster.capabilities.collectives:
        raise ConfigError(
            f"placement.ranks = {placement.ranks}: {cluster.backend_name} has no collectives over several ranks; "
            "set it to 1, or take the backend local"
        )
    parts = [dict(bound)]
    if placement.layout != "colocated" and "generator" in bound:
        parts = [{role: worker for role, worker in bound.items() if role != "generator"}]
        parts.append({"generator": bound["generator"]})
    ranks = [placement.ranks, placement.generators][: len(parts)]
    pool = _pool(cluster, sum(ranks), placement)
    started: dict[str, Any] = {}
    try:
        for part, place in zip(parts, pool.split(ranks), strict=True):
            started.update(cluster.start(colocate(**part), place, timeout_s=config.run.timeout_s))
        publication = _publication(started, placement.layout)
    except BaseException:
        for handle in started.values():
            handle.group.close()
        cluster.release(pool)
        raise
    return Roles(**started, publication=publication, pool=pool)


@contextmanager
def started_generator(cluster: Cluster, config: InferenceConfig) -> Iterator[Generator]:
    """A generator alone, with its own model, on ``config.placement``'s ranks; ended with the block."""
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


def _publication(started: Mapping[str, Any], layout: str) -> Publication | None:
    """How weights reach the generator of these roles; None where there is none."""
    if "generator" not in started:
        return None
    publication: Publication = ColocatedPublication(started["generator"])
    if layout != "colocated":
        delta = layout == "split-delta"
        publication = StreamedPublication(started["policy"], [started["generator"]], delta=delta)
    publication.init()
    return publication


def _arguments(config: PPOConfig | SFTConfig) -> dict[str, dict[str, Any]]:
    model, parallel = config.model, config.parallel
    if isinstance(config, SFTConfig):
        roles: dict[str, dict[str, Any]] = {
            "policy": {"model": model, "optim": config.ending_optim, "parallel": parallel, "loss": SFTLoss()}
        }
        if config.eval.items:
            roles["generator"] = {"model": model, "engine": config.engine}
        return roles
    roles = {
        "policy": {
            "model": model,
            "optim": config.ending_optim,
            "parallel": parallel,
            "loss": PolicyLoss(config.algorithm),
        }
    }
    if config.algorithm.needs_reference:
        roles["reference"] = {"model": model, "parallel": parallel}
    if config.has_critic:
        own = replace(model, path=config.critic.path, config={}) if config.critic.path else model
        roles["critic"] = {
            "model": replace(own, lora=None),
            "optim": replace(config.ending_optim, lr=config.critic.lr),
            "parallel": parallel,
            "loss": ValueLoss(config.algorithm),
        }
    roles["estimator"] = {"config": config.algorithm}
    roles["generator"] = {"model": model, "engine": config.engine}
    return roles


def _pool(cluster: Cluster, slots: int, placement: PlacementConfig) -> ResourcePool:
    """One accelerator a slot where this cluster has so many; cores as configured."""
    nodes = cluster.nodes
    accelerators = sum(int(node.resources.get("gpu", 0)) for node in nodes)
    gpus, cpus = (1 if accelerators >= slots else 0), placement.cpus or 0
    counts = spread(slots, {"gpu": gpus, "cpu": cpus}, nodes)
    try:
        return cluster.pool(counts, gpus=gpus, cpus=cpus, wait_s=placement.wait_s)
    except PlacementError as error:
        raise PlacementError(f"placement of {slots} ranks (placement.ranks, placement.cpus): {error}") from error


def spread(slots: int, want: Mapping[str, float], nodes: Sequence[Node]) -> list[int]:
    """Slots on each node: on as few nodes as hold them all, as evenly as these allow; ``[slots]`` if none do.

    Args:
        want: what each slot holds, by name.
    """
    for taken in (True, False):  # what others hold may be given back while the pool is waited for
        rooms = sorted((_room(node, want, slots, taken) for node in nodes), reverse=True)
        count = next((count for count in range(1, len(rooms) + 1) if sum(rooms[:count]) >= slots), 0)
        if count:
            counts: list[int] = []
            for left, room in zip(range(count, 0, -1), reversed(rooms[:count]), strict=True):
                counts.append(min(room, (slots - sum(counts)) // left))
            return counts[::-1]
    return [slots]


def _room(node: Node, want: Mapping[str, float], slots: int, taken: bool) -> int:
    """How many of ``slots`` fit on a node, beside what others have taken of it or in place of them."""
    others = node.taken.values() if taken else ()
    free = {name: node.resources.get(name, 0) - sum(held.get(name, 0) for held in others) for name in want}
    return max(0, min([slots, *(int((free[name] + 1e-9) // amount) for name, amount in want.items() if amount)]))
