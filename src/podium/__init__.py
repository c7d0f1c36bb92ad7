"""Podium: reinforcement-learning post-training of language models from one ordinary Python script.

>>> import podium
>>> with podium.connect("local") as cluster:
...     pool = cluster.pool([4])
"""

import sys
from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if sys.platform == "win32":
    raise ImportError(
        "Podium does not run on Windows, because its workers and graders need Linux processes and sockets: install "
        "WSL (wsl --install), and install podium inside WSL"
    )

if TYPE_CHECKING:
    from podium.data import Batch as Batch, Jagged as Jagged, TensorRef as TensorRef
    from podium.errors import (
        CallCancelled as CallCancelled,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        ContextFull as ContextFull,
        DataError as DataError,
        DeadlineExceeded as DeadlineExceeded,
        EndpointError as EndpointError,
        GenerationError as GenerationError,
        LostTooOften as LostTooOften,
        NoRowsError as NoRowsError,
        PlacementError as PlacementError,
        PodiumError as PodiumError,
        RefLostError as RefLostError,
        RewardError as RewardError,
        SerializationError as SerializationError,
        StoreFullError as StoreFullError,
        WorkerDied as WorkerDied,
        WorkerStartError as WorkerStartError,
    )
    from podium.runtime import (
        Call as Call,
        Cluster as Cluster,
        Handle as Handle,
        Mesh as Mesh,
        ResourcePool as ResourcePool,
        Worker as Worker,
        WorkerContext as WorkerContext,
        broadcast as broadcast,
        colocate as colocate,
        concat as concat,
        connect as connect,
        endpoint as endpoint,
        first as first,
        gather as gather,
        nothing as nothing,
        only as only,
        per_rank as per_rank,
        reduce as reduce,
        scatter as scatter,
        shard as shard,
        wait as wait,
    )
    from podium.trainer import PPOTrainer as PPOTrainer, SFTTrainer as SFTTrainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)

__version__ = "0.1.0"
