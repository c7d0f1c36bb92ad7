"""How transformers lays the tensors of a model out in files.

A mixture of experts has one tensor for all experts in memory, and one for each expert in the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from podium.models.loading import plain_model
from podium.models.whole_weights import WholeWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Stored(NamedTuple):
    """A tensor of the files: its name and its shape. Those of one parameter follow one another in it."""

    name: str
    shape: list[int]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)  # of a file, whose sizes torch may not take


ModelLayout = Mapping[str, Sequence[Stored]]
"""By parameter or persistent buffer, the tensors of the files that it is."""


def model_layout(model: nn.Module) -> ModelLayout | None:
    """Return how transformers lays the tensors of ``model`` out in files.

    It is found by letting transformers convert tensors that hold their own places.

    Returns:
        The layout. None where a parameter is more than stretches of itself in the files, because transformers
        transposes it or joins it with another one; or where the model is not one of transformers.
    """
    from transformers import PreTrainedModel  # only here: a controller names this module, and makes no model

    inner = plain_model(model)
    if not isinstance(inner, PreTrainedModel):
        return None
    marked: dict[str, Tensor] = {}
    begins: list[tuple[int, str, tuple[int, ...]]] = []
    at = 0
    for info in WholeWeights(inner).manifest:
        shape = (*info.shape[:-1], min(2, info.shape[-1])) if len(info.shape) > 1 else info.shape
        count = torch.Size(shape).numel()
        marked[info.name] = torch.arange(at, at + count).view(shape)
        begins.append((at, info.name, info.shape))
        at += count
    written = _as_written(inner, marked)
    parts_by_name: dict[str, list[tuple[int, Stored]]] = {name: [] for name in marked}
    starts = torch.tensor([begin for begin, *_ in begins])
    for name, places_ in written.items():
        flat = places_.reshape(-1)
        if not len(flat) or not bool((flat.diff() == 1).all()):
            return None
        begin, owner, shape = begins[int(torch.searchsorted(starts, flat[0], right=True)) - 1]
        if int(flat[-1]) >= begin + marked[owner].numel():
            return None
        width = [shape[-1]] if len(shape) > 1 else []
        parts_by_name[owner].append((int(flat[0]), Stored(name, [*places_.shape[: places_.ndim - len(width)], *width])))
    layout = {name: [stored for _, stored in sorted(parts)] for name, parts in parts_by_name.items()}
    is_complete = all(
        sum(part.numel for part in layout[name]) == torch.Size(shape).numel() for _, name, shape in begins
    )
    return layout if is_complete else None


def _as_written(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, files and memory had the same names
        return tensors
    try:
        return revert_weight_conversion(model, dict(tensors))
    except Exception:  # noqa: BLE001 - a conversion that does not take such tensors is none of stretches
        return {}
