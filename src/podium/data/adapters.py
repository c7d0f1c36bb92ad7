"""Low-rank adapters of weights, apart from the weights that they change."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor


class Adapter(NamedTuple):
    """An update ``scale * up @ down`` of one weight (Hu et al. 2021, LoRA), whose matrices others hold by name.

    Attributes:
        weight: The name of the weight that is changed.
        down: The name of the matrix ``[rank, in]``.
        up: The name of the matrix ``[out, rank]``.
        scale: The update is multiplied by this number.
        experts: The weight has so many matrices, and the rows of ``down`` and columns of ``up`` are theirs in turn.
        transposed: Whether the weight is ``[in, out]``.
    """

    weight: str
    down: str
    up: str
    scale: float
    experts: int = 1
    transposed: bool = False

    def compute_delta(self, down: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the update, computed in float32, of a weight of ``dtype``."""
        down, up = down.float(), up.float()
        if self.experts > 1:
            down = down.view(self.experts, -1, down.shape[1])
            up = up.view(len(up), -1, self.experts).permute(2, 0, 1)
        delta = (up @ down) * self.scale
        return (delta.mT if self.transposed else delta).to(dtype)


@torch.no_grad()
def merge_adapters(adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapted weight with its adapters merged, one at a time, on the device of the adapters' matrices.

    Args:
        adapters: Those of one weight follow one another.
        tensors: The matrices of the adapters, and the weights without adapters, by name. They stay as they are.
    """
    for name, of_weight in groupby(adapters, attrgetter("weight")):
        value = tensors[name]
        for adapter in of_weight:
            down, up = tensors[adapter.down], tensors[adapter.up]
            value = value.to(down.device) + adapter.compute_delta(down, up, value.dtype)
        yield name, value
