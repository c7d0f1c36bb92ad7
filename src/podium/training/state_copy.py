"""The state of a learner on its way to the disk: copied while nothing changes it, written beside later calls.

    all ranks   plan: who writes which tensor ─▶ copy to host memory ─▶ train on
    a thread of each rank                                          └──▶ write files with their checksums ─▶ sync

The model itself is copied by :mod:`.model_files`, as transformers loads it. The files here are safetensors, too. They
are laid out as torch.distributed.checkpoint's own reader of safetensors expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from podium.models.safetensors_writer import Part, write_safetensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


class StateCopy:
    """What this rank writes of a state, in host memory.

    Each tensor, or each shard of one, is written by one rank. So the ranks of a replicated model share the work, and
    together hold one copy. All ranks make theirs at the same time.

    Args:
        state: All tensors of this rank by name, shards of FSDP2 among them.
        files: The number of the file of each tensor of any rank, from 1.
        rank: Place of this rank.
        gather: Returns the values of all ranks in rank order.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        files: Mapping[str, int],
        rank: int,
        gather: Callable[[SavePlan], list[SavePlan]],
    ) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plans, _ = planner.create_global_plan(gather(planner.create_local_plan()))
        self._rank, self._last = rank, max(files.values())
        self._files: dict[int, list[Part]] = {}
        for item in planner.finish_plan(plans[rank]).items:
            assert item.tensor_data is not None
            values = cast(Tensor, planner.resolve_data(item)).to("cpu", copy=True)
            part = Part(item.index.fqn, values, [*item.tensor_data.chunk.offsets])
            self._files.setdefault(files[part.name], []).append(part)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the copy into ``folder``, which exists, and let go of it.

        Returns:
            The sizes and checksums of this rank's files, as of :func:`.file_sums`. The files are on the disk.

        Raises:
            OSError: The disk refuses.
        """
        sums: dict[str, Any] = {}
        for number in sorted(self._files):
            name = f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{self._last:05d}.safetensors"
            sums[name] = write_safetensors(folder / name, self._files.pop(number))
        return sums
