"""The tensors of a nested value: where they are, and the same value with others in their place."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from podium.data.in_place import InPlace
from podium.data.memory import flat_bytes, is_plain
from podium.data.refs import TensorRef
from podium.data.rows import Rows
from podium.data.store import TensorStore, lay_out

__all__ = ["fetch", "keep", "map_tensors"]


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change(tensor)`` for every tensor and reference in it.

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
    """``value`` with references in place of its tensors, which are copied into one block of ``store``.

    A tensor that stands there twice is kept once. :class:`InPlace` tensors are not copied: they move.

    Raises:
        StoreFullError: The store has no room.
    """
    if isinstance(value, InPlace):
        return value.share(store, label)
    found: dict[int, Tensor] = {}

    def note(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and is_plain(tensor):
            found.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(value, note)
    if not found:
        return value
    buffers = [flat_bytes(tensor) for tensor in found.values()]
    block = store.put(buffers, label)
    offsets, _ = lay_out(buffers)
    refs = {
        key: TensorRef.in_block(block, offset, tensor.dtype, tensor.shape)
        for (key, tensor), offset in zip(found.items(), offsets, strict=True)
    }
    return map_tensors(value, lambda tensor: refs.get(id(tensor), tensor))


def fetch(value: Any) -> Any:
    """``value`` with tensors in place of its references.

    Raises:
        RefLostError: A process that owned the bytes of one has ended.
    """
    return map_tensors(value, lambda tensor: tensor.fetch() if isinstance(tensor, TensorRef) else tensor)
