"""The facts about a lane that are kept on the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from podium.rollout.engines.draw import Draw

__all__ = ["LANE", "keep_draw"]

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


def keep_draw(records: Any, result: Draw, lanes: Sequence[int]) -> None:
    """Remember of a draw what the lanes' requests ask for: the kept ids, and the most probable ones."""
    if result.top_B2J is not None:
        for lane, top_2J in zip(lanes, result.top_B2J, strict=True):
            if records["live"][lane]:
                records["top"][lane].append(top_2J)
    if result.kept_ids_BK is None or result.kept_sizes_B is None:
        return
    sizes = result.kept_sizes_B.tolist()
    order = result.kept_ids_BK[:, : max(sizes)].cpu()
    for row, lane in enumerate(lanes):
        if records["live"][lane]:
            records["kept"][lane].append(order[row, : sizes[row]].clone())
