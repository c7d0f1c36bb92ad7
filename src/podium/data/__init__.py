"""What flows between Podium's rooms: batches of named columns, and references to tensors that are elsewhere."""

from podium.data import fields
from podium.data.batch import Batch, Column
from podium.data.in_place import InPlace
from podium.data.jagged import Jagged, RowIndex
from podium.data.memory import concat_tensors, copy_tensor
from podium.data.refs import TensorRef
from podium.data.store import Block, BlockInfo, MemoryStore, PlainBlock, TensorStore, Usage, lay_out
from podium.data.structure import fetch, keep
from podium.data.values import concat_values

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
    "TensorRef",
    "TensorStore",
    "Usage",
    "concat_tensors",
    "concat_values",
    "copy_tensor",
    "fetch",
    "fields",
    "keep",
    "lay_out",
]
