"""Weight sync: the policy's weights, by version, become those that the generators draw from.

    ColocatedSync   policy's parameters ◀──reads── engine          one call; a copy only of sharded or adapted weights
    StreamedSync    policy ──bucket──▶ store ──bucket──▶ engine    written into the engine's own tensors

A streamed sync. The controller passes names and references; the bytes go from the policy to the generators.

    policy       put 0 │ put 1 │ put 2 │ put 3 │                   each bucket is gathered and stored once
    machine A          │ copy 0│ copy 1│ copy 2│ copy 3│ finish    all generators of a machine read the same memory
    machine B          │ copy 0│ copy 1│ copy 2│ copy 3│ finish    the store holds at most two buckets

Of a policy with adapters the first sync brings the weights that they are trained on, and each sync the adapters, which
the engine merges.

Where the weights can be read in place, the policy puts nothing and the generators copy from its own tensors. That is so
on a CPU where the backend shares memory, and on a GPU for generators whose processes compute on the policy's device
(:mod:`.on_device`). The latter has not been measured on a GPU yet.
"""

from podium.workers.weight_sync.controller import ColocatedSync, StreamedSync, WeightSync

__all__ = ["ColocatedSync", "StreamedSync", "WeightSync"]
