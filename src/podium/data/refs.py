"""References to tensors: the shape is here, and the bytes stay in the store of the worker that made them.

A reference is a list of *parts*, tensors in blocks, and *runs* of rows over them. Row operations change the runs:

    parts   0: block of rank 0, rows 0..99      1: block of rank 1, rows 0..99
    runs    (0, 10, 20) (1, 0, 5) (0, 3, 4)     part, first row, row after the last    -> a tensor of 16 rows

Legend: R runs, Q ranges of rows asked for, K rows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from podium.data.memory import concat_tensors, copy_bytes, flat_bytes, tensor_over
from podium.data.rows import Rows, alike
from podium.data.store import Block, BlockInfo, Bytes, PlainBlock, refuse_pickle
from podium.errors import DataError

Ints = npt.NDArray[np.int64]
_NO_RUNS: Final[Ints] = np.zeros((0, 3), np.int64)
RowIndex = Sequence[int] | Tensor | npt.NDArray[np.integer[Any]]


class Part(NamedTuple):
    """One tensor in a block: where its bytes begin, and how many rows it has."""

    block: Block
    offset: int
    rows: int


class TensorRef(Rows):
    """A reference to a tensor ``[B, …]`` that a worker keeps.

    Endpoints with ``returns="ref"`` make references. A worker that gets a reference as an argument receives an ordinary
    tensor, and may write to it without changing the original. The memory is freed with the last reference in any
    process.

    >>> ref = TensorRef.of(torch.arange(6).view(3, 2))
    >>> ref.shape, ref.take([2, 0]).get()
    (torch.Size([3, 2]), tensor([[4, 5],
            [0, 1]]))
    """

    __slots__ = ("__weakref__", "dtype", "parts", "runs", "shape")

    is_nested: Final = False

    def __init__(
        self, parts: Sequence[Part] = (), runs: Ints = _NO_RUNS, *, dtype: torch.dtype, shape: Sequence[int]
    ) -> None:
        self.parts = tuple(parts)  # the tensors that it is made of
        self.runs = runs  # int64 [R, 3]: part, first row, row after the last
        self.dtype = dtype
        self.shape = torch.Size(shape)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRef:
        """Refer to a copy of ``tensor`` in this process, which travels with every message that refers to it."""
        flat = flat_bytes(tensor)
        block = PlainBlock(flat.copy(), BlockInfo(flat.nbytes, "the controller"))
        return cls.in_block(block, 0, tensor.dtype, tensor.shape)

    @classmethod
    def in_block(cls, block: Block, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> TensorRef:
        """Refer to the tensor whose bytes begin at ``offset`` of ``block``."""
        if not math.prod(shape):
            return cls(dtype=dtype, shape=shape)
        rows = shape[0] if len(shape) else 1
        return cls([Part(block, offset, rows)], np.array([[0, 0, rows]], np.int64), dtype=dtype, shape=shape)

    @classmethod
    def concat(cls, parts: Sequence[TensorRef | Tensor], names: Sequence[str] = ()) -> TensorRef:
        """Return all rows in order. The bytes are not read, and a part without rows may have any dtype.

        Raises:
            DataError: There are no parts, or they have different dtypes or row shapes.
        """
        refs = [TensorRef.of(part) if isinstance(part, Tensor) else part for part in alike(parts, names)]
        places: dict[Part, int] = {}
        runs: list[Ints] = []
        for ref in refs:
            numbers = np.array([places.setdefault(part, len(places)) for part in ref.parts], np.int64)
            moved = ref.runs.copy()
            moved[:, 0] = numbers[moved[:, 0]] if len(numbers) else 0
            runs.append(moved)
        shape = (sum(len(ref) for ref in refs), *refs[0].shape[1:])
        return cls(tuple(places), _merge_runs(np.concatenate(runs)), dtype=refs[0].dtype, shape=shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def places(self) -> tuple[str, ...]:
        """The makers of the bytes, such as "policy.rollout of rank 1 on node-0"."""
        return tuple(dict.fromkeys(part.block.info.label for part in self.parts))

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a reference to a tensor without dimensions has no rows")
        return self.shape[0]

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        first, *others = self.places or ("empty",)
        more = f" and {len(others)} more" if others else ""
        return f"TensorRef({name}{list(self.shape)}, {first}{more})"

    def slice(self, start: int, stop: int) -> TensorRef:
        """Return the rows ``start:stop``, clipped as Python does."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if start == 0 and stop == len(self):
            return self  # a reference never changes
        return self.ranges(np.array([start]), np.array([max(start, stop)]))

    def take(self, index: RowIndex) -> TensorRef:
        """Return rows in the order of ``index`` (int64 ``[K]`` or a sequence of ints, all in 0..B-1)."""
        rows = cast(Ints, row_numbers(index, len(self)).cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
        return self.ranges(rows, rows + 1)

    def ranges(self, starts: Ints, stops: Ints) -> TensorRef:
        """Return the rows ``starts[q]:stops[q]`` for each q of Q ranges, in that order."""
        return RowRanges(starts, stops).of(self)

    def __getitem__(self, key: slice | RowIndex) -> TensorRef:
        if isinstance(key, slice) and key.step in (None, 1):
            return self.slice(*key.indices(len(self))[:2])
        if isinstance(key, Tensor | np.ndarray | list):
            chosen = torch.as_tensor(key)
            mask = chosen.dtype == torch.bool and chosen.shape == self.shape[:1]
            return self.take(chosen.nonzero()[:, 0] if mask else chosen)
        raise DataError(
            f"a reference can be cut by rows, as ref[2:5] or ref[[0, 3]], not by {key!r}; .get() the tensor"
        )

    def get(self, *, readonly: bool = False) -> Tensor:
        """Return the tensor, on the CPU. The caller may change it unless ``readonly``.

        Raises:
            RefLostError: The process that owned the bytes has ended.
        """
        return self.assemble(lambda block, _: block.read(), readonly=readonly)

    def fetch(self) -> Tensor:
        return self.get()

    def map_tensors(self, change: Callable[[Any], Any]) -> Any:
        return change(self)

    def __await__(self) -> Generator[Any, None, Tensor]:
        return asyncio.to_thread(self.get).__await__()

    def prefetch(self) -> TensorRef:
        """Begin to fetch the bytes into this process, if fetching takes time. Returns the reference itself."""
        for part in self.parts:
            part.block.prefetch()
        return self

    def assemble(self, open_block: Callable[[Block, bool], Bytes], *, readonly: bool = False) -> Tensor:
        """Return the tensor, a view of a block where it lies in one run.

        Args:
            open_block: Opens a block. Its second argument says whether the bytes are only read.
        """
        if not len(self.runs):
            return torch.empty(self.shape, dtype=self.dtype)
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        runs = cast("list[list[int]]", self.runs.tolist())
        runs_by_block = [
            open_block(block, readonly or len(runs) > 1)[offset : offset + rows * width]
            for block, offset, rows in self.parts
        ]
        cut = [runs_by_block[part][start * width : stop * width] for part, start, stop in runs]
        if len(cut) == 1 and not readonly and not cut[0].flags.writeable:
            cut = [copy_bytes(cut[0])]
        row_shape = (-1, *self.shape[1:]) if self.shape else ()
        return concat_tensors([tensor_over(memory).view(self.dtype).view(row_shape) for memory in cut])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a TensorRef has no {name!r}")
        raise self._elsewhere(f".{name}")

    def _elsewhere(self, what: str) -> DataError:
        return DataError(
            f"{what} of a reference: its {self.nbytes} bytes are not in this process: {self!r}; pass the reference "
            "to a worker, which receives a tensor, or fetch the tensor by .get() or batch.fetch()"
        )

    def _calculate(self, *others: object) -> NoReturn:
        raise self._elsewhere("arithmetic or writing")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _calculate
    __floordiv__ = __mod__ = __pow__ = __matmul__ = __rmatmul__ = __and__ = __or__ = __xor__ = _calculate
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __invert__ = _calculate
    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = _calculate
    __bool__ = __float__ = __int__ = __index__ = _calculate

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        raise DataError(
            f"torch's {getattr(function, '__name__', 'function')}() of a reference, whose bytes are not in this "
            "process; pass the reference to a worker, which receives a tensor, or fetch the tensor by .get() or "
            "batch.fetch()"
        )

    def __copy__(self) -> TensorRef:
        return self

    def __deepcopy__(self, memo: Any) -> TensorRef:
        return self  # a reference never changes, and neither do the bytes that it refers to

    def __reduce__(self) -> Any:
        return refuse_pickle()


class RowRanges:
    """The rows ``starts[q]:stops[q]`` for each q of Q ranges, to be taken of several references in that order.

    References that were made together mostly have the same runs, which are then cut once.
    """

    def __init__(self, starts: Ints, stops: Ints) -> None:
        self.rows = int((stops - starts).sum())
        self._starts, self._stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        self._cuts: list[tuple[Ints, list[int], Ints]] = []  # runs, the parts that are used, and the runs that are left

    def of(self, ref: TensorRef) -> TensorRef:
        """Return these rows of ``ref``."""
        shape = (self.rows, *ref.shape[1:])
        if not self.rows or not len(ref.runs):
            return TensorRef(dtype=ref.dtype, shape=shape)
        former_cut = next((cut for cut in self._cuts if np.array_equal(cut[0], ref.runs)), None)
        if former_cut is None:
            runs = _cut(ref.runs, self._starts, self._stops)
            used, numbers = np.unique(runs[:, 0], return_inverse=True)
            runs[:, 0] = numbers
            former_cut = ref.runs, cast("list[int]", used.tolist()), _merge_runs(runs)
            self._cuts.append(former_cut)
        return TensorRef([ref.parts[part] for part in former_cut[1]], former_cut[2], dtype=ref.dtype, shape=shape)


def concat_values(parts: Sequence[Any], names: Sequence[str] = ()) -> Tensor | TensorRef:
    """Return the rows of all parts in order: a reference if any part is one, else a tensor.

    Raises:
        DataError: There are no parts, or they have different dtypes or row shapes.
    """
    if any(isinstance(part, TensorRef) for part in parts):
        return TensorRef.concat(parts, names)
    return concat_tensors(alike(parts, names))


def row_numbers(index: RowIndex, rows: int) -> Tensor:
    """Return ``index`` as int64 ``[K]``, all of it in 0..rows - 1.

    Raises:
        DataError: The index is a mask, has fractions or more dimensions than one, or is outside the rows.
    """
    numbers = torch.as_tensor(index)
    if not numbers.numel():
        return numbers.new_zeros(0, dtype=torch.int64)
    if numbers.dim() != 1 or numbers.dtype == torch.bool or numbers.is_floating_point():
        name = str(numbers.dtype).removeprefix("torch.")
        raise DataError(
            f"rows are taken by their numbers, int64 [K], not by {name}{list(numbers.shape)}; for a mask: "
            "take(mask.nonzero()[:, 0])"
        )
    least, most = int(numbers.min()), int(numbers.max())
    if least < 0 or most >= rows:
        raise DataError(f"row index outside 0..{rows - 1}: {least}..{most}")
    return numbers.to(torch.int64)


def _cut(runs: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return the runs of Q ranges over the rows that ``runs`` stand for. No range reaches outside these rows."""
    starts, stops = starts[stops > starts], stops[stops > starts]
    ends = np.cumsum(runs[:, 2] - runs[:, 1])
    begins = ends - (runs[:, 2] - runs[:, 1])
    first = np.searchsorted(ends, starts, "right")
    last = np.searchsorted(ends, stops - 1, "right")
    counts = last - first + 1
    range_of = np.repeat(np.arange(len(starts)), counts)
    run_of = first[range_of] + np.arange(len(range_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    shift = runs[run_of, 1] - begins[run_of]
    start = np.maximum(starts[range_of], begins[run_of]) + shift
    stop = np.minimum(stops[range_of], ends[run_of]) + shift
    return np.stack([runs[run_of, 0], start, stop], axis=1)


def _merge_runs(runs: Ints) -> Ints:
    """Return the same rows in as few runs as possible."""
    apart = (runs[1:, 0] != runs[:-1, 0]) | (runs[1:, 1] != runs[:-1, 2])
    if apart.all():
        return runs
    heads, tails = np.append(True, apart), np.append(apart, True)
    return np.stack([runs[heads, 0], runs[heads, 1], runs[tails, 2]], axis=1)
