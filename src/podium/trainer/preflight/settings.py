"""Checks of a configuration against what is installed and what this machine has. This module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from podium.algorithms import check_functions
from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, resolve_reward
from podium.rollout.engines import check_installed
from podium.rollout.tasks import check_data
from podium.runtime import Capabilities, Node
from podium.trainer.config import PlacementConfig, PPOConfig, SFTConfig
from podium.trainer.schedules import load_schedule

__all__ = ["check_placement", "check_settings"]


def check_settings(config: PPOConfig | SFTConfig, *, reward: bool = True) -> None:
    """Check that the files, functions and packages that ``config`` names are there.

    A reward that is named by its module is not loaded: the run imports it in a process of its own.

    Args:
        config: The configuration of the run.
        reward: Whether the run uses ``config.reward.name``, because the script gave no function in its place.

    Raises:
        ConfigError: A function, a package or a model's directory is missing; the message says what to do.
        DataError: A file of the data is missing.
    """
    check_data(config.data)
    name = config.reward.name
    if reward and name not in NAMED_REWARDS and (":" not in name or name.rpartition(":")[0].endswith(".py")):
        resolve_reward(name)
    load_schedule(config.run.schedule)
    check_installed(config.engine.name)
    for tracker in config.run.trackers:
        if find_spec(tracker) is None:
            raise ConfigError(f"run.trackers names {tracker}, which is not installed: pip install 'podium[trackers]'")
    paths = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    if isinstance(config, PPOConfig):
        check_functions(config.algorithm)
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        if path.startswith(("/", "./", "../", "~")) and not Path(path).exists():
            raise ConfigError(f"{key} = {path!r}: there is no such directory")


def check_placement(placement: PlacementConfig, backend: str, can: Capabilities, nodes: Sequence[Node] = ()) -> None:
    """Check that a backend can hold the worker processes.

    Args:
        placement: Where the roles go.
        backend: Name of the backend, for errors.
        can: What the backend can do.
        nodes: The backend's nodes, as far as they are known.

    Raises:
        ConfigError: The backend has no collectives over several ranks, or its nodes have too few cores.
    """
    if placement.ranks > 1 and not can.collectives:
        raise ConfigError(
            f"placement.ranks = {placement.ranks}: {backend} has no collectives over several ranks; set it to 1, or "
            "use the backend local"
        )
    cores = [int(node.resources.get("cpu", 0)) for node in nodes]
    if nodes and placement.cpus and sum(count // placement.cpus for count in cores) < placement.processes:
        raise ConfigError(
            f"placement.cpus = {placement.cpus}: {placement.processes} worker process(es) of so many cores do not fit "
            f"into {' + '.join(map(str, cores))} cores; lower it, or leave it out for an equal share"
        )
