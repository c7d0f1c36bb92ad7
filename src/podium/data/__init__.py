"""What flows between Podium's packages: batches of named columns, and references to tensors that are elsewhere."""

from typing import TYPE_CHECKING

from podium.data import fields as fields
from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.data.batch import Batch as Batch, Column as Column
    from podium.data.jagged import Jagged as Jagged
    from podium.data.memory import concat_tensors as concat_tensors, copy_tensor as copy_tensor
    from podium.data.refs import RowIndex as RowIndex, TensorRef as TensorRef, concat_values as concat_values
    from podium.data.rows import Rows as Rows
    from podium.data.sampled_text import completion_texts as completion_texts, sampled_tokens as sampled_tokens
    from podium.data.store import (
        Block as Block,
        BlockInfo as BlockInfo,
        MemoryStore as MemoryStore,
        PlainBlock as PlainBlock,
        TensorStore as TensorStore,
        Usage as Usage,
        lay_out as lay_out,
    )
    from podium.data.structure import InPlace as InPlace, fetch as fetch, keep as keep
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
