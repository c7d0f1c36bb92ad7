"""Data parallel training: replicas whose gradients are added, or parameters sharded by FSDP2.

Both give the *sum* over ranks of each rank's gradient, never the mean: losses carry weights that were normalized over
the global batch, so that sums are right whatever the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.workers.config import ParallelConfig
from podium.workers.models import plain_model

__all__ = ["DataParallel", "FullyShard", "Replicate", "make_parallel"]


class DataParallel(ABC):
    """What the training loop asks of a way to be parallel. ``model`` is the module to call."""

    model: nn.Module

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @abstractmethod
    def prepare(self) -> None:
        """Zero the gradients before the first micro-batch of a step."""

    @abstractmethod
    def micro_batches(self, own: int, device: torch.device) -> int:
        """How many forward and backward passes this rank makes when its rows fill ``own`` micro-batches."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Add the gradients of all ranks; returns their global norm, a scalar that is equal on all ranks."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the gradients."""

    def gather(self, values: Tensor) -> Tensor:
        """A small tensor ``[M]`` of every rank, ``[world size, M]``."""
        if self.world_size == 1:
            return values[None]
        every = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(every, values)
        return torch.stack(every)

    def gather_uneven(self, values: Tensor) -> list[Tensor]:
        """A tensor ``[M]`` of every rank in rank order, where each rank has an M of its own."""
        if self.world_size == 1:
            return [values]
        counts = self.gather(torch.tensor([len(values)], device=values.device)).flatten().tolist()
        padded = values.new_zeros(max(1, *counts))
        padded[: len(values)] = values
        return [row[:count] for row, count in zip(self.gather(padded), counts, strict=True)]


class Replicate(DataParallel):
    """A whole model on each rank. Gradients are views of one flat buffer for each dtype, so that adding them up is one
    all-reduce, their norm one kernel, and no gradient is ever copied."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        super().__init__(world_size)
        self.model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        dtypes = {p.dtype: p.device for p in self._trained}
        self._flat = {
            dtype: torch.zeros(sum(p.numel() for p in self._trained if p.dtype == dtype), dtype=dtype, device=device)
            for dtype, device in dtypes.items()
        }
        self._views = list(self._cut())

    def _cut(self) -> Iterator[Tensor]:
        used = dict.fromkeys(self._flat, 0)
        for p in self._trained:
            yield self._flat[p.dtype][used[p.dtype] : used[p.dtype] + p.numel()].view_as(p)
            used[p.dtype] += p.numel()

    def prepare(self) -> None:
        for flat in self._flat.values():
            flat.zero_()
        for parameter, view in zip(self._trained, self._views, strict=True):
            parameter.grad = view

    def micro_batches(self, own: int, device: torch.device) -> int:
        return own

    def reduce(self) -> Tensor:
        if self.world_size > 1:
            for flat in self._flat.values():
                dist.all_reduce(flat)
        return torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in self._flat.values()]).norm()

    def scale(self, factor: float) -> None:
        for flat in self._flat.values():
            flat.mul_(factor)


class FullyShard(DataParallel):
    """FSDP2: each decoder layer, and the rest, is sharded over the ranks.

    All ranks make the same number of passes, because each pass gathers parameters from all; ranks with fewer
    micro-batches add passes of weight zero. Gradients are scattered after every micro-batch: to keep whole ones until
    the last would cost what sharding saves.
    """

    def __init__(self, model: nn.Module, world_size: int, device: torch.device, precision: torch.dtype) -> None:
        super().__init__(world_size)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if not dist.is_initialized():
            raise ConfigError("parallel.strategy=fsdp2 needs torch.distributed; start the worker on a cluster's pool")
        mesh = init_device_mesh(device.type, (world_size,))
        mixed = precision != torch.float32
        policy = (
            MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
        )
        for layer in _decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # else evaluation leaves it whole
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                shard = cast(Any, module)
                shard.set_gradient_divide_factor(1.0)
                shard.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        self.model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def prepare(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def micro_batches(self, own: int, device: torch.device) -> int:
        return int(self.gather(torch.tensor([own], device=device)).max())

    def reduce(self) -> Tensor:
        grads = [p.grad for p in self._trained if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        return cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm

    def scale(self, factor: float) -> None:
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def make_parallel(
    model: nn.Module, config: ParallelConfig, *, world_size: int, device: torch.device, precision: torch.dtype
) -> DataParallel:
    """The way to be parallel that ``config`` names, over all ranks of the default process group, whose models are made
    equal to the first rank's."""
    if world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
    if config.compile:
        for layer in _decoder_layers(model):
            layer.compile(dynamic=True)
    if config.strategy == "fsdp2":
        return FullyShard(model, world_size, device, precision)
    return Replicate(model, world_size)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, by the names that transformers gives for such purposes."""
    names = set(getattr(plain_model(model), "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
