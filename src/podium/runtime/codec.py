"""Values to bytes and back: pickle protocol 5 with every large buffer out of band.

torch's own reduction of a tensor is in band and sends the whole storage of a row slice; the one here sends the bytes of
the slice, as a buffer that the reader may map. cloudpickle carries what lives in ``__main__`` or a notebook by value.
Tensors arrive on the CPU and detached, whatever device they came from, with their attributes. Two tensors over the same
memory arrive apart.

A reference (``podium.data.TensorRef``) crosses as the names of its blocks; the blocks themselves go beside the message.
In a worker it becomes a tensor, unless its endpoint asks for references: see :func:`read_references`.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] - it has none

from podium.data import Rows
from podium.errors import DataError, RefLostError, SerializationError, StoreFullError
from podium.exceptions import describe_error
from podium.runtime.rows import kind_of

if TYPE_CHECKING:
    import torch

    from podium.data import Block, BlockInfo, TensorRef

T = TypeVar("T")
Rebuild = tuple[Callable[..., Any], tuple[Any, ...]]
Reading = Literal["tensor", "readonly", "ref"]
"""What a reference becomes: a tensor of the reader's own, a tensor that must not be written to, or itself."""

Opener = Callable[["BlockInfo"], "Block"]
"""Makes the block that came beside a message."""

FEW_RUNS = 8
"""So many runs of a reference travel as a list of numbers, which pickles faster than an array."""

_PLAIN = (int, float, str, bool, bytes, type(None))
_RAISED = (Exception, SystemExit, GeneratorExit)  # by pickle, which runs code of any class, but for Ctrl-C


class _Here(threading.local):
    """How this thread reads references, and the blocks of the message that it reads."""

    def __init__(self) -> None:
        self.mode: Reading = "ref"
        self.blocks: Sequence[Opener] = ()
        self.made: dict[int, Block] = {}
        self.opened: dict[tuple[int, bool], tuple[Block, Any]] = {}
        self.taken: list[tuple[int, int]] = []  # where the tensors that were made begin and end, in order
        self.lent: list[tuple[Block, Any]] = []


_here = _Here()


class _Encoder(cloudpickle.CloudPickler):
    blocks: list[Any] | None = None
    places: dict[int, int]

    def reducer_override(self, obj: Any) -> Any:
        match _reduction(obj.__class__):
            case "default":
                return NotImplemented
            case "code":
                return NotImplemented if _is_ours(obj) else cast(Any, super()).reducer_override(obj)
            case "tensor":
                return _reduce_tensor(obj) or NotImplemented
            case _:
                return _reduce_ref(obj, self.blocks, self.places)


@lru_cache(maxsize=1024)
def _reduction(cls: type[Any]) -> Literal["default", "code", "tensor", "ref"]:
    """How values of a type are pickled. It is asked for every object of a message."""
    if cls is FunctionType or issubclass(cls, type):
        return "code"
    if kind_of(cls) != "tensor":
        return "default"
    return "ref" if issubclass(cls, Rows) else "tensor"


def _is_ours(code: Any) -> bool:
    """Whether a class or function is found under its name in one of Podium's modules, so that plain pickle carries it.
    cloudpickle finds that out too, and takes longer."""
    module: str = code.__module__ or ""
    return module.startswith("podium.") and getattr(sys.modules.get(module), code.__qualname__, None) is code


def read_references(mode: Reading, read: Callable[[], T]) -> T:
    """The result of ``read()``. References that this thread decodes meanwhile become ``mode``, and others stay."""
    before, _here.mode = _here.mode, mode
    _here.lent = []
    try:
        return read()
    finally:
        _here.mode = before


def check_lent_memory(method: str) -> None:
    """Compare what this thread read as readonly with its checksums, where blocks are checked.

    Raises:
        DataError: ``method`` wrote to what it read.
    """
    lent, _here.lent = _here.lent, []
    for block, memory in lent:
        if not block.is_intact(memory):
            raise DataError(f"{method} declares readonly=True and wrote to tensors made by {block.info.label}")


def encode(
    value: object, where: str = "a value", blocks: list[Block] | None = None
) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """``value`` as pickle bytes and the buffers that belong to it, each of them contiguous.

    Args:
        blocks: Receives the blocks that ``value`` refers to, each once. They are carried beside the message, in this
            order. None where a backend has no store of its own: its blocks are plain and travel inside.

    Raises:
        SerializationError: The value does not pickle. The message names ``where`` and the part that fails.
    """
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5), []
    buffers: list[pickle.PickleBuffer] = []
    try:
        return _dump(value, buffers, blocks), buffers
    except _RAISED as error:
        raise SerializationError(f"{where} does not pickle: {_blame(value)}{describe_error(error)}") from error


def _dump(value: object, buffers: list[pickle.PickleBuffer], blocks: list[Block] | None) -> bytes:
    stream = io.BytesIO()
    encoder = cast(Any, _Encoder(stream, protocol=5, buffer_callback=buffers.append))
    encoder.blocks, encoder.places = blocks, {}
    encoder.dump(value)
    return stream.getvalue()


def decode(
    data: bytes | memoryview, buffers: Iterable[Any], where: str = "a value", blocks: Sequence[Opener] = ()
) -> Any:
    """The value again. Tensors share memory with ``buffers``, which must be writable.

    Args:
        blocks: Functions that make the blocks which came beside the message, in the order of ``encode``.

    Raises:
        SerializationError: The value does not unpickle. The message names ``where``.
        RefLostError, StoreFullError, DataError: A reference in the value cannot be read.
    """
    if blocks:
        _here.blocks = blocks
    try:
        return pickle.loads(data, buffers=buffers)
    except (RefLostError, StoreFullError, DataError, KeyboardInterrupt):
        raise
    except _RAISED as error:
        raise SerializationError(f"{where} does not unpickle: {describe_error(error)}") from error
    finally:
        if blocks or _here.opened:
            _here.blocks = ()
            _here.made.clear()
            _here.opened.clear()
            _here.taken.clear()


class _Copier(_Encoder):
    stays: Callable[[Any], bool]
    reductions: Mapping[type[Any], Callable[[Any], Rebuild]]
    kept: list[Any]

    def persistent_id(self, obj: Any) -> int | None:
        if not self.stays(obj) and _reduction(obj.__class__) != "ref":
            return None
        self.kept.append(obj)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        reduce = self.reductions.get(obj.__class__)
        return reduce(obj) if reduce is not None else super().reducer_override(obj)


class _Loader(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.kept[pid]


def copy_value(
    value: T,
    stays: Callable[[Any], bool] = lambda obj: False,
    reductions: Mapping[type[Any], Callable[[Any], Rebuild]] = MappingProxyType({}),
) -> T:
    """Return ``value`` as a message would bring it here, so that a later change of the original is not seen.

    Args:
        stays: Whether an object is in the copy as it is. So are references, which do not change.
        reductions: How objects of further types are pickled.

    What does not pickle, or does not unpickle in this process, is returned as it is.
    """
    stream, buffers, kept = io.BytesIO(), list[pickle.PickleBuffer](), list[Any]()
    try:
        copier = cast(Any, _Copier(stream, protocol=5, buffer_callback=buffers.append))
        copier.stays, copier.reductions, copier.kept, copier.blocks, copier.places = stays, reductions, kept, None, {}
        copier.dump(value)
        stream.seek(0)
        loader = cast(Any, _Loader(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers]))
        loader.kept = kept
        return loader.load()
    except _RAISED:  # the call itself fails with it, and says where
        return value


def _blame(value: object, depth: int = 6) -> str:
    """The path to the part of a value that does not pickle, up to ``depth`` levels deep; "" if it is the whole."""
    if depth == 0:
        return ""
    for key, entry in _parts(value):
        try:
            _dump(entry, [], [])
        except _RAISED:
            return f"{key!r} ({type(entry).__name__}): {_blame(entry, depth - 1)}"
    return ""


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a mapping or sequence, the columns of a Batch, or the attributes of another object, by name."""
    if isinstance(value, dict) or (issubclass(type(value), Rows) and hasattr(value, "keys")):
        table = cast(Any, value)
        return [(key, table[key]) for key in table.keys()]  # noqa: SIM118 - to iterate over Rows need not give names
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(cast("Iterable[Any]", value))
    return () if isinstance(value, type | FunctionType) else getattr(value, "__dict__", {}).items()


def _reduce_ref(ref: TensorRef, blocks: list[Block] | None, places: dict[int, int]) -> Rebuild:
    from podium.data import PlainBlock

    parts: list[tuple[Any, ...]] = []
    for block, offset, rows in ref.parts:
        carried: Any = block
        if type(block) is not PlainBlock:
            if blocks is None:
                raise TypeError(
                    "its tensors are in a store, and this backend cannot send references: call .get() first"
                )
            carried = places.setdefault(id(block), len(blocks))
            if carried == len(blocks):
                blocks.append(block)
        parts.append((carried, block.info, offset, rows))
    runs: Any = ref.runs.tolist() if len(ref.runs) <= FEW_RUNS else ref.runs
    return _ref, (parts, runs, ref.dtype, tuple(ref.shape))


def _ref(parts: Sequence[tuple[Any, ...]], runs: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    import numpy as np

    from podium.data.refs import Part, TensorRef

    reference = TensorRef(
        [Part(_block(at, info), offset, rows) for at, info, offset, rows in parts],
        np.array(runs, np.int64).reshape(-1, 3) if isinstance(runs, list) else runs,
        dtype=dtype,
        shape=shape,
    )
    if _here.mode == "ref":
        return reference
    tensor = reference.assemble(_open_values, readonly=_here.mode == "readonly")
    return _apart(tensor) if _here.mode == "tensor" else tensor


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy if it shares memory with another tensor of this message: the reader may write to each."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    at = bisect_left(_here.taken, (start, end))
    if any(begins < end and start < ends for begins, ends in _here.taken[max(0, at - 1) : at + 1]):
        return tensor.clone()
    _here.taken.insert(at, (start, end))
    return tensor


def _block(at: int | Block, info: BlockInfo) -> Block:
    if not isinstance(at, int):
        return at
    if at not in _here.made:
        _here.made[at] = _here.blocks[at](info)
    return _here.made[at]


def _open_values(block: Block, readonly: bool) -> Any:
    """A block's bytes, opened once for all that one message refers to in it."""
    key = id(block), readonly
    if key not in _here.opened:
        _here.opened[key] = block, block.read(readonly=readonly)
        if _here.mode == "readonly" and block.info.checksum is not None:
            _here.lent.append(_here.opened[key])
    return _here.opened[key][1]


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    import torch

    from podium.data.memory import flat_bytes, is_plain

    if not is_plain(tensor):
        return None
    raw = pickle.PickleBuffer(flat_bytes(tensor).data) if tensor.numel() else None
    parameter = type(tensor) is torch.nn.Parameter
    facts = raw, tensor.dtype, tuple(tensor.shape), parameter, tensor.requires_grad and tensor.is_leaf
    attributes = tensor.__dict__  # which torch's own reduction carries, too, and frameworks mark parameters by
    return (_tensor, facts, attributes, None, None, _set_attributes) if attributes else (_tensor, facts)


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, requires_grad: bool) -> torch.Tensor:
    import torch

    flat = torch.empty(0, dtype=dtype) if raw is None else torch.frombuffer(raw, dtype=dtype)
    tensor = flat.reshape(shape) if len(shape) != 1 else flat
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)
