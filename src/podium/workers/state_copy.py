"""The state of a learner on its way to the disk: copied while nothing changes it, written beside later calls.

all ranks   plan: who writes which tensor ─▶ copy to host memory ─▶ train on
a thread of each rank                                          └──▶ write files ─▶ sync ─▶ checksums
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from podium.errors import CheckpointError
from podium.workers.manifest import explain, file_sums

__all__ = ["StateCopy"]


class StateCopy:
    """What this rank writes of a state, in host memory.

    Each tensor, or each shard of one, is written by one rank. So the ranks of a replicated model share the work, and
    together hold one copy. All ranks make theirs at the same time.

    Args:
        state: All tensors of this rank by name, shards of FSDP2 among them.
        files: The number of the file of each tensor of any rank, from 1.
        rank, ranks: Place of this rank, and number of ranks.
        gather: Returns the values of all ranks in rank order.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        files: Mapping[str, int],
        rank: int,
        ranks: int,
        gather: Callable[[SavePlan], list[SavePlan]],
    ) -> None:
        self._files, self._rank, self._ranks = dict(files), rank, ranks
        self._planner = _Copies()
        self._planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plans, _ = self._planner.create_global_plan(gather(self._planner.create_local_plan()))
        self._planner.finish_plan(plans[rank])
        self._planner.copy()

    def write(self, path: str) -> dict[str, Any]:
        """Write the copy into the directory ``path``, which is created if it is missing, and let go of it.

        Returns:
            The :func:`.file_sums` of this rank's files, which are on the disk.

        Raises:
            CheckpointError: The disk refuses. The message says why, and what to do.
        """
        writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping=self._files, save_distributed=True)
        plan = writer.prepare_global_plan([self._planner.plan] * self._ranks)[self._rank]
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            with torch.no_grad():
                written = writer.write_data(plan, self._planner).wait()
            return file_sums(Path(path) / name for name in sorted({one.storage_data.relative_path for one in written}))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explain(error)}") from error


class _Copies(DefaultSavePlanner):
    """A plan with copies of the tensors that it names."""

    def copy(self) -> None:
        """Copy the tensors, and forget the state, which may change from here on."""
        self._copied: dict[Any, Tensor] = {}
        for item in self.plan.items:
            self._copied[item.index] = cast(Tensor, super().resolve_data(item)).to("cpu", copy=True)
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copied.pop(write_item.index)  # a file that is written needs no copy any more
