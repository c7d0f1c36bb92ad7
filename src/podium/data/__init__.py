"""What flows between Podium's rooms: batches of named columns."""

from podium.data import fields
from podium.data.batch import Batch, Column
from podium.data.jagged import Jagged, RowIndex
from podium.data.memory import concat_tensors

__all__ = ["Batch", "Column", "Jagged", "RowIndex", "concat_tensors", "fields"]
