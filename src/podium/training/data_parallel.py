"""Data parallel training: replicas whose gradients are added, or parameters sharded by FSDP2.

Both give the *sum* over ranks of each rank's gradient, never the mean: losses carry weights that were normalized over
the global batch, so that sums are right whatever the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.models.loading import decoder_layers
from podium.training.config import ParallelConfig

T = TypeVar("T")


class DataParallel(ABC):
    """The ranks that train one model, each with the module ``model`` to call.

    Attributes:
        sums: The gradients in float32 of trained parameters of another data type, added up over micro-batches. Such a
            parameter holds no gradient itself.
    """

    equal_passes: ClassVar[bool]
    """Whether all ranks must make the same number of forward and backward passes."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._trained:
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Tensor) -> None:
        """Move the gradient of one micro-batch into the sum."""
        assert parameter.grad is not None
        self.sums[cast(nn.Parameter, parameter)].add_(parameter.grad)
        parameter.grad = None

    @abstractmethod
    def prepare(self, *, zeros: bool = False) -> None:
        """Zero the gradients before the first micro-batch of a step, or, with ``zeros``, in place of all of them."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Add the gradients of all ranks; return their global norm, a scalar that is equal on all ranks."""

    @abstractmethod
    def gradients(self) -> Sequence[Tensor]:
        """Return this rank's gradients, to be changed in place."""

    def gather(self, values: Tensor) -> Tensor:
        """Gather a small tensor ``[M]`` of every rank, ``[world size, M]``."""
        if self.world_size == 1:
            return values[None]
        every = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(every, values)
        return torch.stack(every)

    def gather_objects(self, value: T) -> list[T]:
        """Gather a picklable value of every rank, in rank order. Tensors are on the CPU."""
        every: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(every, value)
        return every


class Replicate(DataParallel):
    """A whole model on each rank. Gradients are views of one flat float32 buffer for each dtype of parameters, so that
    adding them up is one all-reduce, and their norm one kernel. float32 gradients are never copied."""

    equal_passes = False

    def __init__(self, model: nn.Module, world_size: int) -> None:
        super().__init__(model, world_size)
        self._flat: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        for dtype in dict.fromkeys(p.dtype for p in self._trained):
            parameters = [p for p in self._trained if p.dtype == dtype]
            sizes = [p.numel() for p in parameters]
            self._flat.append(torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[-1].device))
            views = [(p, view.view_as(p)) for p, view in zip(parameters, self._flat[-1].split(sizes), strict=True)]
            if dtype == torch.float32:
                self._views = views
            else:
                self.sums |= dict(views)

    def prepare(self, *, zeros: bool = False) -> None:
        for flat in self._flat:
            flat.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def reduce(self) -> Tensor:
        if self.world_size > 1:
            for flat in self._flat:
                dist.all_reduce(flat)
        return torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in self._flat]).norm()

    def gradients(self) -> Sequence[Tensor]:
        return self._flat


def check_collectives() -> None:
    """Raise ConfigError if there are no ranks to shard a model over."""
    if not dist.is_initialized():
        raise ConfigError("parallel.strategy=fsdp2 needs torch.distributed; start the worker on a cluster's pool")


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`shard_model` has sharded the model."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard_model(
    model: nn.Module, world_size: int, device: torch.device, precision: torch.dtype, wide_output: bool
) -> None:
    """Shard each decoder layer, and the rest, over the ranks of the default process group, by FSDP2.

    A shard is a stretch of rows. Parameters on meta stay there, as shards. With ``wide_output`` the rest, of which the
    output layer is part, is gathered without rounding.

    Raises:
        ConfigError: see :func:`check_collectives`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    check_collectives()
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if precision != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if wide_output:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # else evaluation leaves it whole
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


class FullyShard(DataParallel):
    """FSDP2: each decoder layer, and the rest, is sharded over the ranks.

    All ranks make the same number of passes, because each pass gathers parameters from all. Gradients are scattered
    after every micro-batch, because whole gradients would take the memory that sharding saves.
    """

    equal_passes = True

    def __init__(
        self, model: nn.Module, world_size: int, device: torch.device, precision: torch.dtype, wide_output: bool
    ) -> None:
        if not is_sharded(model):
            shard_model(model, world_size, device, precision, wide_output)
        super().__init__(model, world_size)
        low = [p for p in self._trained if p.dtype != torch.float32]
        self.sums |= {p: torch.zeros_like(p, dtype=torch.float32) for p in low}

    def prepare(self, *, zeros: bool = False) -> None:
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter) if zeros and parameter not in self.sums else None
        for gradient in self.sums.values():
            gradient.zero_()

    def reduce(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm(self.gradients())
        return cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm

    def gradients(self) -> Sequence[Tensor]:
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return [*gradients, *self.sums.values()]


def make_parallel(
    model: nn.Module, config: ParallelConfig, *, world_size: int, device: torch.device, precision: torch.dtype
) -> DataParallel:
    """Make the ranks of the default process group train as ``config`` says.

    Their models become the first rank's. A model that is sharded already stays as it is.
    """
    if world_size > 1 and not is_sharded(model):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
    if config.strategy == "fsdp2":
        return FullyShard(model, world_size, device, precision, config.choice.output == "float32")
    return Replicate(model, world_size)
