"""The whole model's weights under Hugging Face's names: gathered from shards, adapters merged in."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from podium.data.gathering import gather_rows, is_divided
from podium.models.buckets import Piece, WeightInfo, cut
from podium.models.loading import plain_model

__all__ = ["WholeWeights", "full_weights"]

_BASE_LAYER = ".base_layer"
_ADAPTER = "lora_"


class WholeWeights:
    """A model's whole tensors by Hugging Face's names, tied ones once. Each is gathered when it is asked for.

    With a sharded model all ranks ask together and in the same order, since each tensor is gathered from all.

    Attributes:
        tensors: The model's own tensors in the order of ``manifest``; its weights where ``is_plain`` is True.
        manifest: Name, shape and bytes an element of each whole tensor, in the model's order.
        sharded: Whether a tensor is spread over several ranks.
        is_plain: Whether the parameters are the whole weights: neither sharded nor with adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = plain_model(model)
        # peft wraps a module once for each of its parameters that have adapters: experts twice, other layers once.
        self._layers = {
            f"{_own_name(name)}.{getattr(module, 'parameter_name', 'weight')}": cast(Any, module)
            for name, module in inner.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        tensors = (*inner.named_parameters(), *_persistent_buffers(inner))
        self._named = {_own_name(name): tensor for name, tensor in tensors if _ADAPTER not in name}
        self._held: tuple[str, Tensor] | None = None  # a gathered tensor of which the next bucket has more pieces
        self.tensors = list(self._named.values())
        self.manifest = tuple(WeightInfo(name, tuple(t.shape), t.element_size()) for name, t in self._named.items())
        self.sharded = any(map(is_divided, self.tensors))
        self.is_plain = not self.sharded and not self._layers

    @torch.no_grad()
    def gather(self, name: str) -> Tensor:
        """Return one whole tensor, adapters merged, on the model's device. It may be the parameter itself: copy what
        you keep."""
        value = gather_rows(self._named[name].detach())
        layer = self._layers.get(name)
        for adapter in layer.active_adapters if layer is not None else ():
            value = value + _delta(layer, adapter, value.dtype)
        return value

    def bucket(self, index: int, bucket_bytes: int) -> list[Tensor]:
        """Return the rows of each piece of bucket ``index`` of those that :func:`.cut` makes; views of the model's own
        tensors where those are whole.

        Buckets are asked for in order, and no more than one tensor is gathered at a time.
        """
        if index == 0:
            self._held = None
        return [self._rows(piece) for piece in cut(self.manifest, bucket_bytes)[index]]

    def _rows(self, piece: Piece) -> Tensor:
        if self._held is None or self._held[0] != piece.name:
            self._held = piece.name, self.gather(piece.name)
        tensor = self._held[1]
        if not tensor.ndim or piece.stop == len(tensor):
            self._held = None
        return tensor[piece.start : piece.stop] if tensor.ndim else tensor


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors, one at a time: see :class:`WholeWeights`."""
    weights = WholeWeights(model)
    for info in weights.manifest:
        yield info.name, weights.gather(info.name)


def _own_name(name: str) -> str:
    """The name that a module or a tensor has without adapters."""
    return name.replace(_BASE_LAYER, "")


def _delta(layer: Any, adapter: str, dtype: torch.dtype) -> Tensor:
    if embedding := adapter in layer.lora_embedding_A:
        down, up = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    down, up = gather_rows(down.detach()).float(), gather_rows(up.detach()).float()
    if (experts := getattr(layer, "num_experts", 1)) > 1:
        down = down.view(experts, -1, down.shape[1])
        up = up.view(len(up), -1, experts).permute(2, 0, 1)
        delta = (up @ down) * layer.scaling[adapter]
        return (delta if layer._did_swap_in_out_features else delta.mT).to(dtype)
    delta = (up @ down) * layer.scaling[adapter]
    return (delta.T if embedding or layer.fan_in_fan_out else delta).to(dtype)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
