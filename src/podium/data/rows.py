"""The base class of values that have rows, and the rule for joining parts. Nothing here needs torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from podium.errors import DataError


class Rows(ABC):
    """A value made of rows: a Batch, a Jagged or a reference.

    ``shard`` splits such an argument, and ``concat`` joins such results. A class of your own can derive from this one.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Self:
        """Return the rows ``start:stop``, clipped to the rows that there are, as Python does."""

    @abstractmethod
    def take(self, index: Any) -> Self:
        """Return rows in the order of ``index``, which holds row numbers from 0."""

    @classmethod
    @abstractmethod
    def concat(cls, parts: Sequence[Any], names: Sequence[str] = ()) -> Self:
        """Return all rows of ``parts``, in order.

        Args:
            names: What errors call each part, such as "rank 2". By default they number the parts.

        Raises:
            DataError: The parts do not fit together. The message names two that differ.
        """

    def map_tensors(self, change: Callable[[Any], Any]) -> Any:
        """Return the same rows with ``change(tensor)`` in place of every tensor and reference."""
        return self

    def fetch(self) -> Any:
        """Return the same rows with tensors in place of references.

        Raises:
            RefLostError: The process that owned the bytes has ended.
        """
        return self.map_tensors(lambda tensor: tensor.fetch() if isinstance(tensor, Rows) else tensor)

    def token_lengths(self) -> list[int] | None:
        """Return the number of tokens in each row, or None if these rows have no tokens."""
        return None

    def row_groups(self) -> list[int] | None:
        """Return the group of each row, or None if these rows have none. Rows of a group cost less if they are
        processed together.
        """
        return None


def alike(parts: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """Return those of ``parts`` (tensors, references or arrays) that have rows, or the first part if none has any.

    Raises:
        DataError: There are no parts, one has no dimensions, or two differ in their dtype or in the shape of a row.
    """
    if not parts:
        raise DataError("cannot join zero parts: their dtype is unknown")
    for at, part in enumerate(parts):
        if not part.shape:
            raise DataError(f"{part_name(names, at)} is a single number, without dimensions, which has no rows")
    full = [at for at, part in enumerate(parts) if part.shape[0]] or [0]
    first = parts[full[0]]
    for at in full[1:]:
        if parts[at].dtype != first.dtype or parts[at].shape[1:] != first.shape[1:]:
            raise DataError(
                f"{part_name(names, full[0])} has rows of {_row(first)} and {part_name(names, at)} has rows of "
                f"{_row(parts[at])}; only rows of one dtype and shape can be joined"
            )
    return [parts[at] for at in full]


def part_name(names: Sequence[str], at: int) -> str:
    """Return what an error calls part ``at``."""
    return names[at] if names else f"part {at}"


def _row(part: Any) -> str:
    return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape[1:])}"
