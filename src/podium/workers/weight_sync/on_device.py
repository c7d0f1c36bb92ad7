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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from podium.models.buckets import checksum
from podium.runtime import wait
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from podium.runtime import Call, Handle
    from podium.workers.policy import Policy
    from podium.workers.weight_sync.receiver import WeightReceiver

__all__ = ["DeviceLoans", "Lent", "Loan", "Site", "lend", "open_loan", "route", "site_of"]

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


class DeviceLoans:
    """The controller's end: which generators copy the weights on their device, in each sync.

    Args:
        policy: The policy's handle.
    """

    def __init__(self, policy: Handle[Policy]) -> None:
        self._policy = policy
        self._possible = True  # whether a rank of the policy has weights on a device that can share them
        self._refused: dict[Handle[WeightReceiver], str] = {}  # not asked again: handles that nobody opens stay taken
        self._said: list[str] = []
        self._out = False

    def open(self, generators: Sequence[Handle[WeightReceiver]]) -> list[Handle[WeightReceiver]]:
        """Lend the weights, and return the generators that have opened them. The others must get buckets.

        A note says which way the weights go, whenever that changes.
        """
        lenders = self._policy.weight_site() if self._possible else []
        self._possible = any(lender.device for lender in lenders)
        if not self._possible:
            return []
        why: dict[Handle[WeightReceiver], str] = {}
        routes: dict[Handle[WeightReceiver], list[int]] = {}
        for generator in generators:
            way = self._refused.get(generator) or route(lenders, generator.device_site())
            if isinstance(way, str):
                why[generator] = way
            else:
                routes[generator] = way
        refused = self._lend(routes, len(lenders)) if routes else {}
        self._refused |= refused
        why |= refused
        self._say(len(generators) - len(why), list(why.values()))
        return [generator for generator in generators if generator not in why]

    def refuse(self, generator: Handle[WeightReceiver], why: str) -> None:
        """Lend nothing to this generator from now on."""
        self._refused[generator] = why
        emit(Note(f"weight sync: {why}; a generator gets its weights through host memory from now on"))

    def end(self) -> None:
        """Let the policy let go of what it lent. Idempotent."""
        if self._out:
            self._out = False
            self._policy.lend_weights([])

    def _lend(
        self, routes: Mapping[Handle[WeightReceiver], list[int]], ranks: int
    ) -> dict[Handle[WeightReceiver], str]:
        """Lend the weights to these generators; return why some of them cannot open theirs."""
        counts = [sum(way.count(rank) for way in routes.values()) for rank in range(ranks)]
        self._out = True
        lent = self._policy.lend_weights(counts)
        loans = [list(loan.loans) for loan in lent]
        refused: dict[Handle[WeightReceiver], str] = {}
        calls: dict[Handle[WeightReceiver], Call[list[str]]] = {}
        for generator, way in routes.items():
            if why := next((lent[rank].why for rank in way if lent[rank].why), ""):
                refused[generator] = why
            else:
                calls[generator] = generator.open_weights.submit([loans[rank].pop() for rank in way])
        wait([*calls.values()])  # none of them may still be opening when an error ends the sync
        for generator, call in calls.items():
            if why := next(filter(None, call.result()), ""):
                refused[generator] = why
        return refused

    def _say(self, opened: int, why: list[str]) -> None:
        text = [f"{opened} of {opened + len(why)} generators copy the policy's weights on their device, by CUDA IPC"]
        text += [f"{why.count(reason)} get them through host memory: {reason}" for reason in dict.fromkeys(why)]
        if text != self._said:
            self._said = text
            emit(Note("weight sync: " + "; ".join(text)))


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
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
