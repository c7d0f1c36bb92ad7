"""The whole model's weights under Hugging Face's names: gathered from shards, adapters merged in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from podium.errors import CheckpointError
from podium.workers.models import plain_model

__all__ = ["copy_weights", "full_weights", "is_plain"]

_BASE_LAYER = ".base_layer."
_ADAPTER = "lora_"


def is_plain(model: nn.Module) -> bool:
    """Whether the model's parameters are its whole weights: neither sharded nor below adapters."""
    return not hasattr(model, "peft_config") and not any(hasattr(p, "full_tensor") for p in model.parameters())


@torch.no_grad()
def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, one at a time, tied ones once; on the model's device.

    With a sharded model all ranks iterate together, since each tensor is gathered from all. A tensor may be the
    parameter itself: copy what you keep.
    """
    inner = plain_model(model)
    merged = {f"{name}.weight": module for name, module in inner.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in (*inner.named_parameters(), *_persistent_buffers(inner)):
        if _ADAPTER in name:
            continue
        plain = name.replace(_BASE_LAYER, ".")
        value = _whole(tensor)
        if plain in merged:
            layer = cast(Any, merged[plain])
            for adapter in layer.active_adapters:
                value = value + _delta(layer, adapter, value.dtype)
        yield plain, value


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor] | Iterator[tuple[str, Tensor]], model: nn.Module) -> None:
    """Write ``weights`` into a plain model's own tensors, in place.

    Raises:
        CheckpointError: a name or a shape that the model has not, or a tensor of the model that was not given.
    """
    own = dict((*model.named_parameters(), *_persistent_buffers(model)))
    tied = dict(model.named_parameters(remove_duplicate=False))
    missing = set(own)
    for name, value in weights.items() if isinstance(weights, dict) else weights:
        target = own.get(name, tied.get(name))
        if target is None or target.shape != value.shape:
            shape = None if target is None else list(target.shape)
            raise CheckpointError(f"weights do not fit the model: {name} is {list(value.shape)} there and {shape} here")
        target.copy_(value)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"weights leave out {len(missing)} tensors of the model, e.g. {sorted(missing)[0]}")


def _whole(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return cast(Any, value).full_tensor() if hasattr(value, "full_tensor") else value


def _delta(layer: Any, adapter: str, dtype: torch.dtype) -> Tensor:
    down, up = _whole(layer.lora_A[adapter].weight), _whole(layer.lora_B[adapter].weight)
    delta = (up.float() @ down.float()) * layer.scaling[adapter]
    return (delta.T if layer.fan_in_fan_out else delta).to(dtype)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
