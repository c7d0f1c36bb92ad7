"""The bytes of tensors, and large copies into memory that was used before.

To map a fresh page takes longer than the copy that fills it, and the allocator returns every large block to the system.
Blocks for large copies are therefore kept, and used again once the last tensor in them is gone.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from podium.data.store import Bytes

SMALLEST = 1 << 20  # bytes; below it the allocator is as good
KEPT_IDLE = 1 << 30  # bytes kept while nobody uses them; the longest idle go first
_NUMPYS = (torch.float32, torch.int64, torch.int32, torch.bool, torch.uint8, torch.float16, torch.float64)
"""Types that numpy has too, the frequent ones."""


class _Blocks:
    """Idle blocks. A block comes back here when its last user is gone."""

    def __init__(self) -> None:
        self._idle: dict[int, Bytes] = {}  # by id, the longest idle first
        self._lock = threading.RLock()  # a collection within the lock may return a block

    def take(self, nbytes: int) -> Bytes:
        """Return uninitialized uint8 ``[nbytes]``."""
        with self._lock:
            fits = [block for block in list(self._idle.values()) if nbytes <= block.nbytes <= 2 * nbytes]
            best = min(fits, key=lambda block: block.nbytes, default=None)
            block = None if best is None else self._idle.pop(id(best), None)  # a collection may have let it go
            if block is None:
                block = np.empty(nbytes, dtype=np.uint8)
        lent = block[:nbytes]
        weakref.finalize(lent, self._give_back, block)
        return lent

    def _give_back(self, block: Bytes) -> None:
        with self._lock:
            self._idle[id(block)] = block
            while sum(idle.nbytes for idle in list(self._idle.values())) > KEPT_IDLE:
                self._idle.pop(next(iter(self._idle)))


_blocks = _Blocks()


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is an ordinary strided one, whose bytes, dtype and shape are all there is to it."""
    kind = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return kind and not tensor.is_nested and not tensor.is_quantized and tensor.device.type != "meta"


def flat_bytes(tensor: Tensor) -> Bytes:
    """Return uint8 ``[nbytes]`` of a plain tensor, on the CPU. The result is a view where it can be one."""
    if tensor.dtype in _NUMPYS and _is_flat(tensor):  # the rule, and half of torch's steps
        return cast(Bytes, tensor.detach().numpy().reshape(-1).view(np.uint8))  # pyright: ignore[reportUnknownMemberType]
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 1:  # torch calls a single element contiguous at any stride, and views no bytes of it
        flat = flat.as_strided((1,), (1,))
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return cast(Bytes, flat.view(torch.uint8).numpy()) if flat.numel() else np.zeros(0, np.uint8)  # pyright: ignore[reportUnknownMemberType]


def tensor_over(memory: Bytes) -> Tensor:
    """Return a uint8 tensor ``[n]`` over ``memory``, n > 0, also where numpy marks the memory as read-only."""
    if memory.flags.writeable:
        return torch.from_numpy(memory)  # pyright: ignore[reportUnknownMemberType]
    pages = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    cast(Any, pages).keeps = memory
    return torch.frombuffer(pages, dtype=torch.uint8)


def concat_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along the first dimension, as ``torch.cat`` does. A large result on the CPU takes used memory.

    One thread makes the copies. A second one gains little, because memory is the limit, and would wait long where
    workers keep the other cores busy.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    nbytes = math.prod(shape) * first.element_size()
    if nbytes < SMALLEST or not all(
        part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and _is_flat(part) and not part.requires_grad
        for part in parts
    ):
        return torch.cat(list(parts))
    joined = _blocks.take(nbytes)
    at = 0
    for part in parts:
        np.copyto(joined[at : at + part.nbytes], flat_bytes(part))
        at += part.nbytes
    return tensor_over(joined).view(first.dtype).view(shape)


def copy_bytes(source: Bytes) -> Bytes:
    """Copy uint8 ``[n]``. A large copy takes used memory."""
    if source.nbytes < SMALLEST:
        return source.copy()
    copy = _blocks.take(source.nbytes)
    np.copyto(copy, source)
    return copy


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Do ``target.copy_(source)``, by memcpy where both are plain: torch's own loop also reads what it overwrites."""
    alike = target.dtype == source.dtype and target.shape == source.shape
    if source.nbytes >= SMALLEST and alike and _is_flat(target) and _is_flat(source):
        np.copyto(flat_bytes(target), flat_bytes(source))
    else:
        target.copy_(source)


def _is_flat(tensor: Tensor) -> bool:
    """Return whether the tensor's bytes lie in the machine's memory, in order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
