"""Values to bytes and back: pickle protocol 5 with every large buffer out of band.

torch's own reduction of a tensor is in band and sends the whole storage of a row slice; the one here sends the bytes of
the slice, as a buffer that the reader may map. cloudpickle carries what lives in ``__main__`` or a notebook by value.
Tensors arrive on the CPU and detached, whatever device they came from.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] - it has none

from podium.errors import SerializationError

if TYPE_CHECKING:
    import torch

__all__ = ["decode", "encode"]

Rebuild = tuple[Callable[..., Any], tuple[Any, ...]]


class _Encoder(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj) or NotImplemented
        return cast(Any, super()).reducer_override(obj)


def encode(value: object, where: str = "a value") -> tuple[bytes, list[pickle.PickleBuffer]]:
    """``value`` as pickle bytes and the buffers that belong to it, each of them contiguous.

    Raises:
        SerializationError: it does not pickle; names ``where`` and the part of the value that fails.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        cast(Any, _Encoder(stream, protocol=5, buffer_callback=buffers.append)).dump(value)
    except Exception as error:  # pickle runs code of any class: whatever it raises is our user's to see
        raise SerializationError(f"{where} does not pickle: {_blame(value)}{type(error).__name__}: {error}") from error
    return stream.getvalue(), buffers


def decode(data: bytes | memoryview, buffers: Iterable[Any], where: str = "a value") -> Any:
    """The value again. Tensors share memory with ``buffers``, which must be writable.

    Raises:
        SerializationError: it does not unpickle; names ``where``.
    """
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as error:  # unpickling runs code of any class: whatever it raises is our user's to see
        raise SerializationError(f"{where} does not unpickle: {type(error).__name__}: {error}") from error


def _blame(value: object, depth: int = 4) -> str:
    """Which entry of a mapping or sequence is at fault, ``depth`` levels deep; "" if it is the whole."""
    if depth == 0:
        return ""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    elif isinstance(value, list | tuple):
        entries = list(enumerate(value))  # pyright: ignore[reportUnknownArgumentType]
    for key, entry in entries:
        try:
            cloudpickle.dumps(entry)  # pyright: ignore[reportUnknownMemberType]
        except Exception:  # noqa: BLE001 - the search is for the entry that raises, whatever it raises
            return f"{key!r} ({type(entry).__name__}): {_blame(entry, depth - 1)}"
    return ""


def _reduce_tensor(tensor: torch.Tensor) -> Rebuild | None:
    import torch

    plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    if not plain or (type(tensor) not in (torch.Tensor, torch.nn.Parameter)):
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    parameter = type(tensor) is torch.nn.Parameter
    if flat.numel() == 0:
        return _empty_tensor, (tensor.dtype, tuple(tensor.shape), parameter, tensor.requires_grad)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    raw = pickle.PickleBuffer(cast(Any, flat.view(torch.uint8)).numpy())
    return _tensor, (raw, tensor.dtype, tuple(tensor.shape), parameter, tensor.requires_grad and tensor.is_leaf)


def _tensor(
    raw: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _empty_tensor(dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, requires_grad: bool) -> torch.Tensor:
    import torch

    tensor = torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad=requires_grad) if parameter else tensor
