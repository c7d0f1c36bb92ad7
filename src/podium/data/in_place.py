"""Tensors that stay where readers find them: shared once, read again and again, never copied to be sent.

keep()     tensor ──copy──▶ block ◀── references      what was returned, whatever is written to the tensor later
InPlace    tensor  ═══════  block ◀── references      what is in the tensor when a reader looks
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from podium.data.memory import flat_bytes, is_plain
from podium.data.refs import TensorRef
from podium.data.store import TensorStore, lay_out

__all__ = ["InPlace"]

BLOCK_BYTES: Final = 64 << 20
"""Small tensors share a block up to here: a block takes a descriptor, and moving into one needs that much memory."""


class InPlace:
    """The result of an endpoint that returns references: tensors that the worker goes on writing.

    They move into the store's memory and stay the same objects. The result is a list of their references, or None where
    the store shares no memory with its readers, where blocks are checked (``PODIUM_CHECK_REFS``), or where a tensor is
    not plain, contiguous and on the CPU. Whoever writes while somebody reads must notice it, as a weight sync does.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._places: list[int] = []
        self._refs: list[TensorRef] = []
        self._key = ""

    @property
    def key(self) -> str:
        """Names the references that :meth:`share` gave last; "" once a tensor has other memory than they point to."""
        return self._key if self._places == [tensor.data_ptr() for tensor in self._tensors] else ""

    def share(self, store: TensorStore, label: str) -> list[TensorRef] | None:
        """Move into memory of ``store``, unless done before.

        Raises:
            StoreFullError: there is no memory for it.
        """
        if self.key:
            return self._refs
        if store.checks or not all(_can_move(tensor) for tensor in self._tensors):
            return None
        self._refs = []
        for group in _groups(self._tensors):
            buffers = [flat_bytes(tensor) for tensor in group]
            offsets, nbytes = lay_out(buffers)
            room = store.room(nbytes, label)
            if room is None:
                return None
            block, memory = room
            for tensor, buffer, at in zip(group, buffers, offsets, strict=True):
                home = memory[at : at + buffer.nbytes]
                np.copyto(home, buffer)
                self._refs.append(TensorRef.in_block(block, at, tensor.dtype, tensor.shape))
                tensor.data = torch.from_numpy(home).view(tensor.dtype).view(tensor.shape)  # pyright: ignore[reportUnknownMemberType]
        self._places, self._key = [tensor.data_ptr() for tensor in self._tensors], uuid.uuid4().hex
        return self._refs


def _can_move(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous() and bool(tensor.numel())


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, of at most BLOCK_BYTES each; a larger tensor is alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(math.prod(one.shape) * one.element_size() for one in [*group, tensor]) > BLOCK_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
