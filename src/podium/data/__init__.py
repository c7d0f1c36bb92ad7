"""What flows between Podium's packages: batches of named columns, and references to tensors that are elsewhere."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from podium.data import fields
from podium.data.rows import Rows

if TYPE_CHECKING:
    from podium.data.batch import Batch, Column
    from podium.data.in_place import InPlace
    from podium.data.jagged import Jagged
    from podium.data.memory import concat_tensors, copy_tensor
    from podium.data.refs import RowIndex, TensorRef, concat_values
    from podium.data.store import Block, BlockInfo, MemoryStore, PlainBlock, TensorStore, Usage, lay_out
    from podium.data.structure import fetch, keep

_HOMES = {
    "batch": ("Batch", "Column"),
    "in_place": ("InPlace",),
    "jagged": ("Jagged",),
    "memory": ("concat_tensors", "copy_tensor"),
    "refs": ("RowIndex", "TensorRef", "concat_values"),
    "store": ("Block", "BlockInfo", "MemoryStore", "PlainBlock", "TensorStore", "Usage", "lay_out"),
    "structure": ("fetch", "keep"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "Block",
    "BlockInfo",
    "Column",
    "InPlace",
    "Jagged",
    "MemoryStore",
    "PlainBlock",
    "RowIndex",
    "Rows",
]
__all__ += ["TensorRef", "TensorStore", "Usage", "concat_tensors", "concat_values", "copy_tensor", "fetch", "fields"]
__all__ += ["keep", "lay_out"]


def __getattr__(name: str) -> Any:
    """Names are imported on first use, so that the controller splits arrays and lists without loading torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'podium.data' has no attribute {name!r}")
    value = getattr(import_module(f"podium.data.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
