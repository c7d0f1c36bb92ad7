"""The place of a worker among the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from podium.runtime.mesh import Mesh

__all__ = ["WorkerContext", "current_context"]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A worker's place, fixed for its life.

    Attributes:
        rank, world_size: Place among the processes of the group.
        local_rank, local_world_size: Place among those on the same node.
        node: Name of the node.
        devices: Indices of the accelerators that this worker owns, valid in its own process; empty on a CPU.
        role: Name under which the worker was started.
        threads: Number of threads for computing, this worker's share of the node's cores.
        rendezvous: URL by which the processes of the group find each other (torch.distributed's ``init_method``); ""
            where the backend has no collectives.
        meshes: Meshes by name. "default" is always there, and is ``Mesh(dp=world_size)`` unless given.
        colocated: The other workers in the same worker process, by name, as plain objects.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "localhost"
    devices: tuple[int, ...] = ()
    role: str = ""
    threads: int = 1
    rendezvous: str = ""
    meshes: Mapping[str, Mesh] = field(default_factory=lambda: MappingProxyType({"default": Mesh(dp=1)}))
    colocated: Mapping[str, Any] = field(default_factory=_nothing)


current_context: ContextVar[WorkerContext | None] = ContextVar("podium_worker_context", default=None)
"""The place of the worker that is made or runs just now. Workers that it makes itself get the same place."""
