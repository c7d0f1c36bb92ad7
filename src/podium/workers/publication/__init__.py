"""From the policy to the generators, by version: two ways behind one contract.

    colocated   policy's parameters <──reads── engine             one call; a copy only of what is sharded or adapted
    streamed    policy ──bucket──▶ store ──bucket──▶ engine's own model, in place

Streamed, from the controller, which holds names and references and no bytes:

    policy    put 0 │ put 1 │ put 2 │ put 3 │                       a bucket: gathered, adapters merged, stored once
    machine A       │ copy 0│ copy 1│ copy 2│ copy 3│ open          a machine; however many generators read it there
    machine B       │ copy 0│ copy 1│ copy 2│ copy 3│ open          never more than two buckets are in the store
"""

from podium.workers.publication.colocated import ColocatedPublication
from podium.workers.publication.contract import Publication
from podium.workers.publication.streamed import BUCKET_BYTES, StreamedPublication

__all__ = ["BUCKET_BYTES", "ColocatedPublication", "Publication", "StreamedPublication"]
