"""Projections that read the same input, joined into one matrix without a second copy of the weights.

    before   q_proj.weight -> storage 1     k_proj.weight -> storage 2     v_proj.weight -> storage 3
    after    q_proj.weight -> rows 0:Nq     k_proj.weight -> rows Nq:Nk    v_proj.weight -> rows Nk:  of ONE storage

The `nn.Parameter` objects stay the same, so optimizers, gradients, `state_dict` and copies in place go on as before;
what they write, the joined matrix shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["fuse_projections", "joined"]

_GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def fuse_projections(model: nn.Module) -> None:
    """Re-point q/k/v and gate/up weights and biases of every decoder layer as views of one storage each.

    Idempotent. To be called again after something replaced the parameters' data (``model.to(...)``,
    ``load_state_dict(assign=True)``); copies in place need nothing. Values, gradients and the identity of the
    parameters are kept.
    """
    for layer in model.get_submodule("model.layers").children():
        for owner, names in _GROUPS:
            parts = [layer.get_submodule(f"{owner}.{name}") for name in names]
            joined([part.get_parameter("weight") for part in parts])
            if parts[0].bias is not None:
                joined([part.get_parameter("bias") for part in parts])


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor over the rows of ``parameters``, which become views of it unless they are already."""
    whole = _as_one([parameter.data for parameter in parameters])
    if whole is not None:
        return whole
    # A storage made in inference mode could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
    return whole


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that ``parts`` are consecutive rows of, or None."""
    first = parts[0]
    address = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != address or not part.is_contiguous():
            return None
        address += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
