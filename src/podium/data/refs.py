"""A tensor that is somewhere else: its shape is here, its bytes stay in the store of the worker that made them.

A reference is a list of *parts*, tensors in blocks, and *runs* of rows over them. Row operations change the runs:

    parts   0: block of rank 0, rows 0..99      1: block of rank 1, rows 0..99
    runs    (0, 10, 20) (1, 0, 5) (0, 3, 4)     part, first row, row after the last    -> a tensor of 16 rows

Legend: R runs, Q ranges of rows asked for, K rows.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from podium.data.memory import concat_tensors, copy_bytes
from podium.data.store import Block, BlockInfo, Bytes, PlainBlock
from podium.errors import DataError

__all__ = ["Part", "RowIndex", "TensorRef", "flat_bytes", "is_plain", "row_numbers"]

Ints = npt.NDArray[np.int64]
RowIndex = Sequence[int] | Tensor


class Part(NamedTuple):
    """One tensor in a block: where its bytes begin, and how many rows it has."""

    block: Block
    offset: int
    rows: int


class TensorRef:
    """Stands for a tensor ``[B, …]`` that a worker keeps.

    Made by endpoints with ``returns="ref"``. As an argument of a call it arrives as an ordinary tensor, which the
    worker may write to without harm to anyone. When the last reference in the last process is gone, the memory is free.

    >>> ref = TensorRef.of(torch.arange(6).view(3, 2))
    >>> ref.shape, ref.take([2, 0]).get()
    (torch.Size([3, 2]), tensor([[4, 5],
            [0, 1]]))
    """

    __slots__ = ("__weakref__", "_parts", "_runs", "dtype", "shape")

    def __init__(self, parts: Sequence[Part], runs: Ints, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._parts = tuple(parts)
        self._runs = runs
        self.dtype = dtype
        self.shape = torch.Size(shape)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRef:
        """A reference to a copy of ``tensor`` in this process, which travels with every message that refers to it."""
        flat = flat_bytes(tensor)
        block = PlainBlock(flat.copy(), BlockInfo(flat.nbytes, "the controller"))
        return cls.in_block(block, 0, tensor.dtype, tensor.shape)

    @classmethod
    def in_block(cls, block: Block, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> TensorRef:
        """The tensor whose bytes begin at ``offset`` of ``block``."""
        rows = shape[0] if len(shape) else 1
        if not math.prod(shape):
            return cls((), np.zeros((0, 3), np.int64), dtype, shape)
        return cls((Part(block, offset, rows),), np.array([[0, 0, rows]], np.int64), dtype, shape)

    @classmethod
    def concat(cls, refs: Sequence[TensorRef | Tensor]) -> TensorRef:
        """All rows in order; no byte of a reference is touched. Those without rows have no say in the dtype, as in
        ``torch.cat``.

        Raises:
            DataError: none, or of different dtypes or row shapes.
        """
        if not refs:
            raise DataError("cannot join zero references: their dtype is unknown")
        given = [TensorRef.of(ref) if isinstance(ref, Tensor) else ref for ref in refs]
        given = [ref for ref in given if not ref.shape or len(ref)] or given[:1]
        first = given[0]
        if any(ref.dtype != first.dtype or ref.shape[1:] != first.shape[1:] or not ref.shape for ref in given):
            raise DataError(f"references of different dtypes or row shapes cannot be joined: {given}")
        places: dict[Part, int] = {}
        runs: list[Ints] = []
        for ref in given:
            numbers = np.array([places.setdefault(part, len(places)) for part in ref._parts], np.int64)
            moved = ref._runs.copy()
            moved[:, 0] = numbers[moved[:, 0]] if len(numbers) else 0
            runs.append(moved)
        rows = sum(len(ref) for ref in given)
        return cls(tuple(places), _merged(np.concatenate(runs)), first.dtype, (rows, *first.shape[1:]))

    # -- what is known without the bytes ---------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that it stands for."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def places(self) -> tuple[str, ...]:
        """Who made the bytes, such as "policy.rollout of rank 1 on node-0"."""
        return tuple(dict.fromkeys(part.block.info.label for part in self._parts))

    @property
    def parts(self) -> Sequence[Part]:
        """The tensors it is made of."""
        return self._parts

    @property
    def runs(self) -> Ints:
        """int64 ``[R, 3]``: part, first row, row after the last."""
        return self._runs

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

    # -- rows --------------------------------------------------------------------------------------------------------

    def slice(self, start: int, stop: int) -> TensorRef:
        """Rows ``start:stop``, clipped as Python does."""
        start, stop, _ = slice(start, stop).indices(len(self))
        return self.ranges(np.array([start]), np.array([max(start, stop)]))

    def take(self, index: RowIndex) -> TensorRef:
        """Rows in the order of ``index`` (int64 ``[K]`` or a sequence of ints, all in 0..B-1)."""
        rows = cast(Ints, row_numbers(index).cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise DataError(f"row index outside 0..{len(self) - 1}: {rows.min()}..{rows.max()}")
        return self.ranges(rows, rows + 1)

    def ranges(self, starts: Ints, stops: Ints) -> TensorRef:
        """The rows ``starts[q]:stops[q]`` for each q of Q ranges, in that order."""
        rows = int((stops - starts).sum())
        shape = (rows, *self.shape[1:])
        if not rows or not len(self._runs):
            return TensorRef((), np.zeros((0, 3), np.int64), self.dtype, shape)
        runs = _cut(self._runs, np.asarray(starts, np.int64), np.asarray(stops, np.int64))
        used, numbers = np.unique(runs[:, 0], return_inverse=True)
        runs[:, 0] = numbers
        parts = [self._parts[part] for part in cast("list[int]", used.tolist())]
        return TensorRef(parts, _merged(runs), self.dtype, shape)

    def __getitem__(self, key: slice | RowIndex) -> TensorRef:
        if isinstance(key, slice) and key.step in (None, 1):
            return self.slice(*key.indices(len(self))[:2])
        if isinstance(key, Tensor | list):
            chosen = torch.as_tensor(key)
            if chosen.dtype == torch.bool and chosen.shape == self.shape[:1]:
                return self.take(chosen.nonzero()[:, 0])
            return self.take(chosen)
        raise DataError(
            f"a reference can be cut by rows, as ref[2:5] or ref[[0, 3]], not by {key!r}; .get() the tensor"
        )

    # -- the bytes ---------------------------------------------------------------------------------------------------

    def get(self, *, readonly: bool = False) -> Tensor:
        """The tensor, on the CPU; the caller's own to change unless ``readonly``.

        Raises:
            RefLostError: the process that owned the bytes has ended.
        """
        return self.assemble(lambda block, _: block.read(), readonly=readonly)

    def __await__(self) -> Generator[Any, None, Tensor]:
        return asyncio.to_thread(self.get).__await__()

    def prefetch(self) -> TensorRef:
        """Begin to bring the bytes here, where that takes time; returns itself."""
        for part in self._parts:
            part.block.prefetch()
        return self

    def assemble(self, open_block: Callable[[Block, bool], Bytes], *, readonly: bool = False) -> Tensor:
        """The tensor, of blocks that ``open_block`` opens, with whether they are only read: a view where it lies in one
        run."""
        if not len(self._runs):
            return torch.empty(self.shape, dtype=self.dtype)
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        only_read = readonly or len(self._runs) > 1
        whole = [open_block(block, only_read)[offset : offset + rows * width] for block, offset, rows in self._parts]
        if len(self._runs) > 1:
            row_shape = (-1, *self.shape[1:])
            tensors = [_tensor(memory).view(self.dtype).view(row_shape) for memory in whole]
            runs = cast("list[list[int]]", self._runs.tolist())
            return concat_tensors([tensors[part][start:stop] for part, start, stop in runs])
        _, start, stop = cast("list[int]", self._runs[0].tolist())
        memory = whole[0][start * width : stop * width]
        own = memory if readonly or memory.flags.writeable else copy_bytes(memory)
        return _tensor(own).view(self.dtype).view(self.shape)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a TensorRef has no {name!r}")
        raise self._elsewhere(f".{name}")

    def _elsewhere(self, what: str) -> DataError:
        return DataError(
            f"{what} of a reference: its {self.nbytes} bytes are elsewhere: {self!r}; pass it to a "
            "worker, which finds a tensor, or bring it here by .get(), or batch.fetch()"
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
            f"torch's {getattr(function, '__name__', 'function')}() of a reference, whose bytes are elsewhere; pass it "
            "to a worker, which finds a tensor, or bring it here by .get(), or batch.fetch()"
        )

    def __copy__(self) -> TensorRef:
        return self

    def __deepcopy__(self, memo: Any) -> TensorRef:
        return self  # it never changes, and neither do the bytes it stands for

    def __reduce__(self) -> Any:
        raise TypeError(
            "a reference travels as an argument or a result of a call; to save it, .get() gives a tensor and "
            "batch.fetch() a batch of them"
        )


def row_numbers(index: RowIndex) -> Tensor:
    """``index`` as int64 ``[K]``.

    Raises:
        DataError: it is a mask, has fractions, or more dimensions than one.
    """
    rows = torch.as_tensor(index)
    if not rows.numel():
        return rows.new_zeros(0, dtype=torch.int64)
    if rows.dim() != 1 or rows.dtype == torch.bool or rows.is_floating_point():
        name = str(rows.dtype).removeprefix("torch.")
        raise DataError(
            f"rows are taken by their numbers, int64 [K], not by {name}{list(rows.shape)}; of a mask: "
            "take(mask.nonzero()[:, 0])"
        )
    return rows.to(torch.int64)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary strided tensor, whose bytes are all there is to it."""
    kind = type(tensor) in (Tensor, torch.nn.Parameter)
    return kind and tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def flat_bytes(tensor: Tensor) -> Bytes:
    """uint8 ``[nbytes]`` of a plain tensor, on the CPU; a view where it can be."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return cast(Bytes, flat.view(torch.uint8).numpy()) if flat.numel() else np.zeros(0, np.uint8)  # pyright: ignore[reportUnknownMemberType]


def _tensor(memory: Bytes) -> Tensor:
    """uint8 ``[n]`` over ``memory``, n > 0, also where numpy marks it as read-only."""
    if memory.flags.writeable:
        return torch.from_numpy(memory)  # pyright: ignore[reportUnknownMemberType]
    pages = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    cast(Any, pages).keeps = memory
    return torch.frombuffer(pages, dtype=torch.uint8)


def _cut(runs: Ints, starts: Ints, stops: Ints) -> Ints:
    """The runs of Q ranges, none of them empty or outside, of the rows that ``runs`` stand for."""
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


def _merged(runs: Ints) -> Ints:
    """The same rows in as few runs as there can be."""
    if len(runs) < 2:
        return runs
    heads = np.ones(len(runs), bool)
    heads[1:] = (runs[1:, 0] != runs[:-1, 0]) | (runs[1:, 1] != runs[:-1, 2])
    tails = np.append(heads[1:], True)
    return np.stack([runs[heads, 0], runs[heads, 1], runs[tails, 2]], axis=1)
