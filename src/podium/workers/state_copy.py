"""The state of a learner on its way to the disk: copied while nothing changes it, written beside later calls.

    all ranks   plan: who writes which tensor ─▶ copy to host memory ─▶ train on
    a thread of each rank                                          └──▶ write files with their checksums ─▶ sync

The files are safetensors. They go to the disk from the copies themselves, and are laid out as
torch.distributed.checkpoint's own reader of safetensors expects them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from podium.errors import CheckpointError
from podium.workers.manifest import explain

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["StateCopy"]

_TYPES: Final = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}


class _Part(NamedTuple):
    """A tensor, or a shard of one, and the place of its first element in the whole tensor."""

    name: str
    offsets: list[int]
    values: Tensor


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
        self._files: dict[int, list[_Part]] = {}
        for item in planner.finish_plan(plans[rank]).items:
            assert item.tensor_data is not None
            values = cast(Tensor, planner.resolve_data(item)).to("cpu", copy=True)
            part = _Part(item.index.fqn, [*item.tensor_data.chunk.offsets], values)
            self._files.setdefault(files[part.name], []).append(part)

    def write(self, path: str) -> dict[str, Any]:
        """Write the copy into the directory ``path``, which is created if it is missing, and let go of it.

        Returns:
            The sizes and checksums of this rank's files, as of :func:`.file_sums`. The files are on the disk.

        Raises:
            CheckpointError: The disk refuses. The message says why, and what to do.
        """
        sums: dict[str, Any] = {}
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            for number in sorted(self._files):
                name = f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{self._last:05d}.safetensors"
                sums[name] = _write_file(Path(path) / name, self._files.pop(number))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {explain(error)}") from error
        return sums


def _write_file(path: Path, parts: list[_Part]) -> dict[str, Any]:
    """Write ``parts`` to a safetensors file. Returns its size and checksum once it is on the disk. Raises OSError."""
    parts.sort(key=lambda part: -part.values.element_size())  # so that each begins at a multiple of its own size
    places = {part.name: {"saved_offsets": part.offsets} for part in parts}
    header: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    }
    end = 0
    for name, _, values in parts:
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _TYPES[values.dtype], "shape": [*values.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, head = hashlib.sha256(), len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        for block in (head, *(_bytes(part.values) for part in parts)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(head) + end, "sha256": digest.hexdigest()}


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
