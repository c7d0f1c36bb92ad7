"""The resources of this machine, found without loading a framework, and how to show a process only its accelerators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from podium.errors import ConfigError
from podium.runtime.messages import Node

__all__ = ["MEMORY", "accelerators", "machine", "visibility"]

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of memory that this machine has."""

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


def accelerators() -> list[str]:
    """Ids of the accelerators that this process may use, as its visibility variable spells them."""
    for variable in _VARIABLES:
        given = os.environ.get(variable)
        if given is not None:
            return [part.strip() for part in given.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
    for pattern in ("nvidia[0-9]*", "davinci[0-9]*"):
        if found := list(Path("/dev").glob(pattern)):
            return [str(at) for at in range(len(found))]
    return [str(at) for at in range(len(list(Path("/dev/dri").glob("renderD*"))))] if Path("/dev/kfd").exists() else []


def visibility(devices: Sequence[int], all_devices: Sequence[str]) -> dict[str, str]:
    """The environment that shows a worker process its own devices and no others; empty on a machine without any."""
    if not all_devices:
        return {}
    mine = ",".join(all_devices[device] for device in devices)
    if Path("/dev/kfd").exists():
        return {"HIP_VISIBLE_DEVICES": mine}
    if list(Path("/dev").glob("davinci[0-9]*")):
        return {"ASCEND_RT_VISIBLE_DEVICES": mine}
    return {"CUDA_VISIBLE_DEVICES": mine}


def machine(all_devices: Sequence[str], nodes: int = 1) -> list[Node]:
    """This machine as a node, or as several nodes that each have all of it.

    Raises:
        ConfigError: ``nodes`` is below 1.
    """
    if nodes < 1:
        raise ConfigError(f"connect(nodes={nodes}): a backend has at least one node")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    has = {"cpu": float(cores), "gpu": float(len(all_devices)), "memory": float(MEMORY)}
    return [Node("localhost" if nodes == 1 else f"node-{at}", has) for at in range(nodes)]
