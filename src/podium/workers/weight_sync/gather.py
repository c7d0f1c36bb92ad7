"""The whole model's weights under Hugging Face's names: gathered from shards, adapters merged in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from podium.data import copy_tensor
from podium.errors import CheckpointError
from podium.workers.models import plain_model

__all__ = ["WeightInfo", "WeightManifest", "WholeWeights", "copy_weights", "full_weights"]

_BASE_LAYER = ".base_layer."
_ADAPTER = "lora_"


class WeightInfo(NamedTuple):
    """A whole tensor's name, shape and bytes an element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int


class WeightManifest(NamedTuple):
    """What a policy's weights are at one moment. Equal manifests are those of equal weights.

    Attributes:
        weights: all tensors, whole and with adapters merged, in the order in which they are gathered.
        step: how often the policy has been updated.
        place: names the memory that ``Policy.weights_in_place`` returned references to; "" where the weights are not in
            such memory.
    """

    weights: tuple[WeightInfo, ...]
    step: int
    place: str


class WholeWeights:
    """A model's whole tensors by Hugging Face's names, tied ones once. Each is gathered when it is asked for.

    With a sharded model all ranks ask together and in the same order, since each tensor is gathered from all.

    Attributes:
        sharded: whether a tensor is spread over several ranks.
        is_plain: whether the parameters are the whole weights: neither sharded nor below adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = plain_model(model)
        self._layers = {
            f"{name}.weight": cast(Any, module)
            for name, module in inner.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        tensors = (*inner.named_parameters(), *_persistent_buffers(inner))
        self._tensors = {name.replace(_BASE_LAYER, "."): tensor for name, tensor in tensors if _ADAPTER not in name}
        self.sharded = any(hasattr(tensor, "full_tensor") for tensor in self._tensors.values())
        self.is_plain = not self.sharded and not self._layers

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own tensors in the order of :meth:`manifest`; its weights where ``is_plain`` is True."""
        return list(self._tensors.values())

    def manifest(self) -> list[WeightInfo]:
        """Name, shape and bytes an element of each tensor, in the model's order."""
        return [WeightInfo(name, tuple(t.shape), t.element_size()) for name, t in self._tensors.items()]

    @torch.no_grad()
    def gather(self, name: str) -> Tensor:
        """One whole tensor, adapters merged, on the model's device. It may be the parameter itself: copy what you
        keep."""
        value = _whole(self._tensors[name])
        layer = self._layers.get(name)
        for adapter in layer.active_adapters if layer is not None else ():
            value = value + _delta(layer, adapter, value.dtype)
        return value


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, one at a time: see :class:`WholeWeights`."""
    weights = WholeWeights(model)
    for info in weights.manifest():
        yield info.name, weights.gather(info.name)


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor] | Iterator[tuple[str, Tensor]], model: nn.Module) -> None:
    """Write ``weights`` into a plain model's own tensors, in place.

    Raises:
        CheckpointError: the model has no tensor of that name or shape, or a tensor of the model was not given.
    """
    own = dict((*model.named_parameters(), *_persistent_buffers(model)))
    tied = dict(model.named_parameters(remove_duplicate=False))
    missing = set(own)
    for name, value in weights.items() if isinstance(weights, dict) else weights:
        target = own.get(name, tied.get(name))
        if target is None or target.shape != value.shape:
            shape = None if target is None else list(target.shape)
            raise CheckpointError(f"weights do not fit the model: {name} is {list(value.shape)} there and {shape} here")
        copy_tensor(target, value)
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
