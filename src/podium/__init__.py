"""Podium: reinforcement-learning post-training of language models from one ordinary Python script.

>>> import podium
>>> with podium.connect("local") as cluster:
...     pool = cluster.pool([4])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.data import Batch, Jagged, TensorRef
    from podium.runtime import (
        Call,
        Cluster,
        Mesh,
        ResourcePool,
        Worker,
        WorkerContext,
        broadcast,
        colocate,
        concat,
        connect,
        endpoint,
        first,
        gather,
        nothing,
        only,
        per_rank,
        reduce,
        scatter,
        shard,
    )
    from podium.trainer import PPOTrainer, SFTTrainer

__version__ = "0.1.0"

_HOMES = {
    "podium.data": ("Batch", "Jagged", "TensorRef"),
    "podium.runtime": (
        *("Call", "Cluster", "Mesh", "ResourcePool", "Worker", "WorkerContext", "broadcast", "colocate", "concat"),
        *("connect", "endpoint", "first", "gather", "nothing", "only", "per_rank", "reduce", "scatter", "shard"),
    ),
    "podium.trainer": ("PPOTrainer", "SFTTrainer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - by room
    "Batch",
    "Jagged",
    "TensorRef",
    "Call",
    "Cluster",
    "Mesh",
    "ResourcePool",
    "Worker",
    "WorkerContext",
    "broadcast",
    "colocate",
    "concat",
    "connect",
    "endpoint",
    "first",
    "gather",
    "nothing",
    "only",
    "per_rank",
    "reduce",
    "scatter",
    "shard",
    "PPOTrainer",
    "SFTTrainer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that ``import podium`` stays light."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'podium' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
