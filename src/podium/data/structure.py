"""The tensors of a nested value: copied into a store, brought back, or moved into a store and shared where they lie.

keep()     tensor ──copy──▶ block ◀── references      what was returned, whatever is written to the tensor later
InPlace    tensor  ═══════  block ◀── references      what is in the tensor when a reader looks
"""

import copy
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from podium.data.memory import flat_bytes, is_plain
from podium.data.refs import TensorRef
from podium.data.rows import Rows
from podium.data.store import TensorStore, lay_out

BLOCK_BYTES: Final = 64 << 20
"""Small tensors share a block up to this size. A block takes a descriptor, and moving needs as much memory again."""


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change(tensor)`` for every tensor and reference in it.

    The function looks into Rows (not into the Python columns of a Batch, nor at the offsets of a Jagged), dict,
    OrderedDict and defaultdict, list and tuple, and nothing else.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Rows):
        return value.map_tensors(change)
    if type(value) in (dict, OrderedDict, defaultdict):
        changed = copy.copy(cast("dict[Any, Any]", value))
        changed.update({key: map_tensors(entry, change) for key, entry in changed.items()})
        return changed
    if type(value) is list:
        return [map_tensors(entry, change) for entry in cast("list[Any]", value)]
    if isinstance(value, tuple):
        before = cast("tuple[Any, ...]", value)
        entries = [map_tensors(entry, change) for entry in before]
        if all(entry is old for entry, old in zip(entries, before, strict=True)):
            return before  # such as a torch.Size
        make: Any = type(before)
        return getattr(make, "_make", make)(entries)  # a named tuple has _make
    return value


def keep(value: Any, store: TensorStore, label: str) -> Any:
    """Return ``value`` with references in place of its tensors, which are copied into one block of ``store``.

    A tensor that occurs twice is kept once. The tensors of an :class:`InPlace` are not copied: they move.

    Raises:
        StoreFullError: The store has no room.
    """
    if isinstance(value, InPlace):
        return value.share(store, label)
    tensors: dict[int, Tensor] = {}

    def note(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and is_plain(tensor):
            tensors.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(value, note)
    if not tensors:
        return value
    buffers = [flat_bytes(tensor) for tensor in tensors.values()]
    block = store.put(buffers, label)
    offsets, _ = lay_out(buffers)
    refs = {
        key: TensorRef.in_block(block, offset, tensor.dtype, tensor.shape)
        for (key, tensor), offset in zip(tensors.items(), offsets, strict=True)
    }
    return map_tensors(value, lambda tensor: refs.get(id(tensor), tensor))


def fetch(value: Any) -> Any:
    """Return ``value`` with tensors in place of its references.

    Raises:
        RefLostError: A process that owned the bytes of one has ended.
    """
    return map_tensors(value, lambda tensor: tensor.fetch() if isinstance(tensor, TensorRef) else tensor)


class InPlace:
    """Tensors that a worker continues to write to, as the result of an endpoint that returns references.

    The tensors move into the store's memory and stay the same objects. The result is a list of their references. It is
    None where the store shares no memory with its readers, where blocks are checked (``PODIUM_CHECK_REFS``), or where a
    tensor is not plain, contiguous and on the CPU. A reader must notice if somebody writes meanwhile, as a weight sync
    does.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._places: list[int] = []
        self._refs: list[TensorRef] = []
        self._key = ""

    @property
    def key(self) -> str:
        """A name for the references that :meth:`share` gave last; "" once a tensor has left the memory of its own."""
        return self._key if self._places == [tensor.data_ptr() for tensor in self._tensors] else ""

    def share(self, store: TensorStore, label: str) -> list[TensorRef] | None:
        """Move the tensors into memory of ``store``, unless they are there already.

        Raises:
            StoreFullError: The store has no room.
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
    """Yield the tensors in order, in groups of at most BLOCK_BYTES; a larger tensor is alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(member.nbytes for member in [*group, tensor]) > BLOCK_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
