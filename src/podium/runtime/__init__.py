"""The control layer: workers, endpoints, pools, groups and calls over any backend."""

from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.calls import Call
from podium.runtime.cluster import Cluster, backend_class, backends, colocate, connect
from podium.runtime.collect import Collect, concat, first, gather, nothing, reduce
from podium.runtime.context import WorkerContext
from podium.runtime.dispatch import Arguments, Dispatch, RowPlan, Split, World, broadcast, only, scatter, shard
from podium.runtime.endpoint import Endpoint, endpoint
from podium.runtime.group import Colocated, WorkerGroup
from podium.runtime.markers import per_rank
from podium.runtime.mesh import Mesh
from podium.runtime.messages import Capabilities, Death, Node, Packed, Place, ProcessSpec, Reply, Request
from podium.runtime.pool import ResourcePool, Slot
from podium.runtime.replicas import Replicas
from podium.runtime.worker import Bound, Worker

__all__ = [
    "Arguments",
    "Backend",
    "Bound",
    "Call",
    "Capabilities",
    "Cluster",
    "Collect",
    "Colocated",
    "Death",
    "Dispatch",
    "Endpoint",
    "Mesh",
    "Node",
    "Packed",
    "Place",
    "ProcessHandle",
    "ProcessSpec",
    "Replicas",
    "Reply",
    "Request",
    "ResourcePool",
    "RowPlan",
    "Slot",
    "Split",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "World",
    "backend_class",
    "backends",
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
]
