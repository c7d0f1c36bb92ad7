"""The whole model's weights under Hugging Face's names: gathered from shards, adapters merged in."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from podium.data.adapters import Adapter, merge_adapters
from podium.data.gathering import gather_rows, is_divided
from podium.devices import round_by_name
from podium.models.buckets import Piece, WeightInfo, cut
from podium.models.loading import plain_model
from podium.models.value_head import is_of_value_head

_BASE_LAYER = ".base_layer"
_ADAPTER = "lora_"


class WholeWeights:
    """A model's whole tensors by Hugging Face's names, tied ones once. Each is gathered when it is asked for. A value
    head is left out.

    With a sharded model all ranks ask together and in the same order, since each tensor is gathered from all.

    Args:
        model: The model, or peft's wrapper of one.
        merged: Whether adapters are merged into the weights. Otherwise their matrices are tensors of their own, after
            the weights, and the parameters that they are trained on are frozen.

    Attributes:
        adapters: The adapters that are not merged.
        adapted: The weights into which adapters are merged.
        tensors: The model's own tensors in the order of ``manifest``; its weights where ``is_plain`` is True.
        manifest: Name, shape and bytes an element of each whole tensor, in the model's order.
        sharded: Whether a tensor is spread over several ranks.
        is_plain: Whether ``tensors`` are the whole tensors of ``manifest``: neither sharded nor with adapters to merge.
    """

    def __init__(self, model: nn.Module, *, merged: bool = True) -> None:
        inner = plain_model(model)
        tensors = dict((*inner.named_parameters(), *_persistent_buffers(inner)))
        tensors = {name: tensor for name, tensor in tensors.items() if not is_of_value_head(name)}
        self._named = {_own_name(name): tensor for name, tensor in tensors.items() if _ADAPTER not in name}
        matrices = {name: tensor for name, tensor in tensors.items() if _ADAPTER in name}
        adapters = _find_adapters(inner, matrices)
        frozen = {name for name, tensor in self._named.items() if isinstance(tensor, nn.Parameter)}
        frozen = {name for name in frozen if adapters and not merged and not self._named[name].requires_grad}
        self._merged = {adapter.weight: adapter for adapter in adapters if merged}
        self.adapted = tuple(self._merged)
        self._matrices = matrices
        self.adapters = () if merged else adapters
        self._named |= {} if merged else matrices
        self._held: tuple[str, Tensor] | None = None  # a gathered tensor of which the next bucket has more pieces
        self.tensors = list(self._named.values())
        self.manifest = tuple(
            WeightInfo(name, tuple(t.shape), t.element_size(), name in frozen) for name, t in self._named.items()
        )
        self.sharded = any(map(is_divided, self.tensors))
        self.is_plain = not self.sharded and not self._merged

    @torch.no_grad()
    def gather(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one whole tensor on the model's device. It may be the parameter itself: copy what you keep.

        A weight with an adapter is merged in float32, and then rounded by :func:`.round_by_name`.

        Args:
            name: The name of the tensor.
            dtype: The data type of a weight with an adapter. Default: its own.
        """
        value = gather_rows(self._named[name].detach())
        if (adapter := self._merged.get(name)) is None:
            return value
        matrices = {matrix: gather_rows(self._matrices[matrix].detach()) for matrix in (adapter.down, adapter.up)}
        dtype = dtype or value.dtype
        ((_, value),) = merge_adapters([adapter], {name: value.to(dtype).float(), **matrices})
        return round_by_name(value, name, dtype)

    def bucket(self, index: int, bucket_bytes: int) -> list[Tensor]:
        """Return the rows of each piece of bucket ``index`` of those that :func:`.cut` makes; views of the model's own
        tensors where those are whole.

        Buckets are asked for in order, and no more than one tensor is gathered at a time.
        """
        return [self._rows(piece) for piece in cut(self.manifest, bucket_bytes)[index]]

    def _rows(self, piece: Piece) -> Tensor:
        if self._held is None or self._held[0] != piece.name or not piece.start:
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


def _find_adapters(model: nn.Module, matrices: Mapping[str, Tensor]) -> tuple[Adapter, ...]:
    """Return peft's adapters, which name their ``matrices``."""
    names = {id(matrix): name for name, matrix in matrices.items()}
    adapters: list[Adapter] = []
    # peft wraps a module once for each of its parameters that have adapters: experts twice, other layers once.
    for name, module in model.named_modules():
        layer = cast(Any, module)
        for adapter in layer.active_adapters if hasattr(module, "get_delta_weight") else ():
            if embedding := adapter in layer.lora_embedding_A:
                down, up = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            else:
                down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            experts = getattr(layer, "num_experts", 1)
            transposed = not layer._did_swap_in_out_features if experts > 1 else embedding or layer.fan_in_fan_out
            weight = f"{_own_name(name)}.{getattr(module, 'parameter_name', 'weight')}"
            scale = layer.scaling[adapter]
            adapters.append(Adapter(weight, names[id(down)], names[id(up)], scale, experts, transposed))
    return tuple(adapters)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
