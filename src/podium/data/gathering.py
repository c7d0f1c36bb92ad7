"""Whole tensors from the rows that FSDP2 has divided among ranks."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether the tensor's rows are divided among ranks: it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, on its device; the tensor itself if it is not divided. All its ranks call together.

    ``full_tensor()`` does the same. But where ranks share a GPU, and therefore communicate by gloo, it ends their
    processes by SIGSEGV (torch 2.11, seen on an H100), while a plain ``all_gather`` works there.
    """
    if not is_divided(tensor):
        return tensor
    divided = cast(Any, tensor)
    mesh, shape = divided.device_mesh, tuple(tensor.shape)
    if mesh.ndim != 1 or not divided.placements[0].is_shard(0):
        return divided.full_tensor()
    local = cast(Tensor, divided.to_local())
    rows = -(-shape[0] // mesh.size())  # of each rank but the last ones, which may have fewer or none
    part = local.new_zeros((rows, *shape[1:]))
    part[: len(local)] = local
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    cast(Any, dist).all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts)[: shape[0]]
