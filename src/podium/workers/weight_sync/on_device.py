"""Weights that lie on the device that a generator computes on: opened in its process, and copied on the device.

    policy       lend ──handles, checksums──▶ │        │ end: let go of the handles
    generator             open (or refuse) ──▶│ copy, check, close

A loan lasts for one sync, so that no handle outlives the tensor that it leads to. A generator that cannot open its
handles refuses before anything is written, and gets the weights in buckets like any other. So does, in the same sync
and later, one to which a tensor came with another checksum than it was sent with.

The handles are those of torch.multiprocessing: CUDA IPC for a tensor on a GPU, shared memory for one on the CPU, which
tests use.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from podium.exceptions import read_text
from podium.models.buckets import checksum

_DEVICE_INDEX = 6  # the place of the device's index among the arguments of rebuild_cuda_tensor


class Site(NamedTuple):
    """Where a process has its weights.

    Attributes:
        device: The GPU's own name, equal in all processes; "" for a device that shares no tensors between processes.
        process: The process's id.
        why: Why the weights cannot be read where they are; "" where they can.
    """

    device: str
    process: int
    why: str = ""


class Loan(NamedTuple):
    """Handles of all weights for one process, which opens each once, and the checksums of the weights."""

    handles: bytes
    sums: list[int]


class Lent(NamedTuple):
    """What a rank of the policy lends: a loan for each reader, or why there is none."""

    loans: list[Loan]
    why: str = ""


def site_of(device: torch.device, why: str = "") -> Site:
    """Return the site of the calling process on ``device``."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return Site(name, os.getpid(), why)


def lend(tensors: Sequence[Tensor], readers: int) -> tuple[Lent, list[Tensor]]:
    """Make loans of ``tensors`` for so many readers, once the device has computed what they hold.

    Returns:
        The loans, and what has to be kept until the readers are done.
    """
    if not readers:
        return Lent([]), []
    _wait_for(tensors)
    kept: list[Tensor] = []
    loans: list[Loan] = []
    try:
        sums = [checksum(tensor) for tensor in tensors]
        for _ in range(readers):
            aliases = [_alias(tensor) for tensor in tensors]
            kept += aliases
            loans.append(Loan(_pickle([reduce_tensor(alias) for alias in aliases]), sums))
    except (OSError, RuntimeError) as error:
        return Lent([], _first_line(error)), kept
    return Lent(loans), kept


def open_loan(loan: Loan, device: torch.device) -> list[Tensor]:
    """Return tensors over the memory that was lent. Let go of them before the sync ends.

    Args:
        device: The reader's device. Its index may differ from the index that the same device has for the lender.

    Raises:
        OSError, RuntimeError: The driver refuses, or the lender's process has ended.
    """
    return [rebuild(*_on(rebuild, arguments, device)) for rebuild, arguments in pickle.loads(loan.handles)]


def route(lenders: Sequence[Site], readers: Sequence[Site]) -> list[int] | str:
    """Return which rank of the policy lends to each rank of a generator; or why the weights go another way."""
    chosen: list[int] = []
    for reader in readers:
        near = [
            (rank, lender) for rank, lender in enumerate(lenders) if lender.device and lender.device == reader.device
        ]
        if not near:
            return "it is on another device" if reader.device else "its device shares no tensors between processes"
        rank, lender = next(((rank, candidate) for rank, candidate in near if not candidate.why), near[0])
        if lender.why:
            return lender.why
        if lender.process == reader.process:
            return "it is in the policy's own process"
        chosen.append(rank)
    return chosen


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory with a storage of its own, which keeps the memory.

    torch marks a storage for each handle that is made of it, and takes the marks off with the storage. A parameter
    lives as long as the run, and would gather them.
    """
    source = tensor.detach()
    whole_storage = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source.untyped_storage())  # pyright: ignore[reportUnknownMemberType]
    storage = torch.from_dlpack(whole_storage).untyped_storage()
    alias = torch.empty(0, dtype=source.dtype, device=source.device)
    return alias.set_(storage, source.storage_offset(), source.shape, source.stride())  # pyright: ignore[reportUnknownMemberType]


def _on(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of ``rebuild``, with this process's own index of the device."""
    if rebuild is not rebuild_cuda_tensor:
        return arguments
    return (*arguments[:_DEVICE_INDEX], device.index, *arguments[_DEVICE_INDEX + 1 :])


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _wait_for(tensors: Sequence[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {read_text(error).partition(chr(10))[0]}"
