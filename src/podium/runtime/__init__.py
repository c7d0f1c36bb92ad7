"""The control layer: workers, endpoints, pools, groups and calls over any backend."""

from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.calls.call import Call, wait
from podium.runtime.cluster import Cluster
from podium.runtime.collect import Collect, concat, first, gather, nothing, reduce
from podium.runtime.colocation import Colocated, colocate
from podium.runtime.connecting import backend_class, backends, connect
from podium.runtime.dispatch import (
    Arguments,
    Dispatch,
    Mesh,
    RowPlan,
    Split,
    World,
    broadcast,
    only,
    per_rank,
    scatter,
    shard,
)
from podium.runtime.endpoints import Endpoint, endpoint
from podium.runtime.group import Handle, Replicas, WorkerGroup
from podium.runtime.messages import Capabilities, Death, Node, Packed, Place, ProcessSpec, Reply, Request
from podium.runtime.pool import ResourcePool, Slot
from podium.runtime.profiling import Profile
from podium.runtime.worker import Bound, Worker, WorkerContext

__all__ = ["Cluster", "backend_class", "backends", "connect"]
__all__ += ["Mesh", "ResourcePool", "Slot"]
__all__ += ["Bound", "Colocated", "Handle", "Replicas", "Worker", "WorkerContext", "WorkerGroup", "colocate"]
__all__ += ["Call", "Endpoint", "Profile", "endpoint", "per_rank", "wait"]
__all__ += ["Arguments", "Dispatch", "RowPlan", "Split", "World", "broadcast", "only", "scatter", "shard"]
__all__ += ["Collect", "concat", "first", "gather", "nothing", "reduce"]
__all__ += ["Backend", "Capabilities", "Death", "Node", "Packed", "Place", "ProcessHandle", "ProcessSpec"]
__all__ += ["Reply", "Request"]
