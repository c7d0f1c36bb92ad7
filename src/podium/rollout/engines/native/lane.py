"""What is known of a lane on the CPU."""

import numpy as np

__all__ = ["LANE"]

# The position of a lane at step s is ``base + s``; its length is reached when s is ``end``.
# ``kind`` numbers the parameters that it draws by. ``known`` positions of its text have keys and values, ``exact`` of
# them as a prefill computes them. The lane that was freed first has the lowest ``used``; 0 where nothing is to keep.
LANE = np.dtype(
    [
        *(("live", bool), ("stops", bool), ("streams", bool), ("kind", int), ("base", int), ("end", int)),
        *(("known", int), ("exact", int), ("used", int), ("reused", int), ("request", object), ("versions", object)),
        *(("kept", object), ("top", object), ("guided", bool), ("guide", object)),
    ]
)
