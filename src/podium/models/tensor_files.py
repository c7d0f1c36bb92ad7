"""Where the tensors of a model lie in its safetensors files, and the reading of stretches of them.

    as it is    model.norm.weight            ◀── model.norm.weight
    fused       experts.gate_up_proj [E, …]  ◀── experts.0.gate_proj, experts.0.up_proj, experts.1.gate_proj, …

Rows of a fused tensor are whole experts, so that a stretch of rows needs the files' tensors of these experts only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from podium.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK: Final = 1 << 24  # bytes that are read at a time
_SAMPLE: Final = 1 << 12  # bytes of each tensor that ranks compare
_DTYPES: Final = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
_FUSIONS: Final = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


class Place(NamedTuple):
    """A tensor in a file: the file, its first byte in it, its data type and its shape."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: list[int]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Source(NamedTuple):
    """A tensor of the model: its shape, and the places of which the elements follow one another in it."""

    shape: list[int]
    places: list[Place]


def places(file: Path) -> dict[str, Place]:
    """Return the places of a safetensors file's tensors, whose header has been checked, if they have usual types."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = cast("dict[str, Any]", json.loads(stream.read(length)))
    return {
        name: Place(file, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _DTYPES
    }


def find_sources(model: PreTrainedModel, stored: Mapping[str, Place]) -> dict[str, Source] | None:
    """Return the sources of a model's tensors by name; None if transformers converts tensors in an unknown way.

    Args:
        model: A model that transformers has loaded from tensors of these names, and that knows its conversions.
    """
    used = cast("Sequence[Any] | None", getattr(model, "_weight_conversions", None))
    if used is None:
        return None
    if not used:
        return {name: Source(location.shape, [location]) for name, location in stored.items()}
    try:
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
    except ImportError:
        return None
    converters = {
        pattern: conversion
        for conversion in used
        if isinstance(conversion, WeightConverter)
        for pattern in conversion.source_patterns
    }
    if not all(_fuses(converter) for converter in converters.values()):
        return None
    renamings = [conversion for conversion in used if not isinstance(conversion, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Source] = {}
    fused: dict[str, dict[str, list[Place]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, [*dict.fromkeys(converters.values())], prefix, state)
        if pattern is not None and target in state:
            fused.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
            continue
        if target not in state and name in state:
            target = name
        sources[target] = Source(stored[name].shape, [stored[name]])
    for target, by_pattern in fused.items():
        order = next(converters[pattern] for pattern in by_pattern).source_patterns
        source = _fuse([by_pattern.get(pattern, []) for pattern in order])
        if source is None:
            return None
        sources[target] = source
    return sources


def _fuses(converter: Any) -> bool:
    """Whether a conversion only puts the matrices of experts side by side, in the order of its source patterns."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    return steps in _FUSIONS and len(converter.target_patterns) == 1


def _fuse(parts: Sequence[Sequence[Place]]) -> Source | None:
    """Return the source of a tensor from the places of its parts, which have one for each expert."""
    experts = len(parts[0])
    columns = {tuple(location.shape[1:]) for part in parts for location in part}
    heights = [{location.shape[0] for location in part if location.shape} for part in parts]
    if (
        any(len(part) != experts for part in parts)
        or len(columns) != 1
        or any(len(heights_of_part) != 1 for heights_of_part in heights)
    ):
        return None
    rows = sum(height for heights_of_part in heights for height in heights_of_part)
    return Source(
        [experts, rows, *columns.pop()], [location for expert in zip(*parts, strict=True) for location in expert]
    )


def digest(sources: Iterable[Source]) -> str:
    """Return a checksum of the places, and of the first bytes at each of them."""
    hasher = hashlib.sha256()
    for location in (location for source in sources for location in source.places):
        size = min(_SAMPLE, location.numel * location.dtype.itemsize)
        hasher.update(json.dumps([location.file.name, location.begin, str(location.dtype), location.shape]).encode())
        with location.file.open("rb", buffering=0) as file:
            hasher.update(os.pread(file.fileno(), size, location.begin))
    return hasher.hexdigest()


def read(source: Source, first: int, target: Tensor) -> None:
    """Read the elements of a tensor from number ``first`` on into ``target``, a vector of any data type and device.

    Raises:
        ConfigError: A file is shorter than its header said.
    """
    begin, end = first, first + target.numel()
    at = 0  # the number of a place's first element
    for location in source.places:
        start, stop = max(begin, at), min(end, at + location.numel)
        if start < stop:
            _read_place(location, start - at, target[start - begin : stop - begin])
        at += location.numel


def _read_place(place: Place, first: int, target: Tensor) -> None:
    size = place.dtype.itemsize
    scratch = torch.empty(min(_CHUNK, target.numel() * size), dtype=torch.uint8)
    with place.file.open("rb", buffering=0) as file:
        for start in range(0, target.numel(), _CHUNK // size):
            piece = target[start : start + _CHUNK // size]
            part = scratch[: piece.numel() * size]
            _fill(file, part, place.begin + (first + start) * size)
            piece.copy_(part.view(place.dtype))


def _fill(file: FileIO, part: Tensor, begin: int) -> None:
    """Fill ``part`` with the bytes of the file from ``begin`` on. Raises ConfigError if the file ends before."""
    view, done = part.numpy().data, 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], begin + done)
        if not count:
            raise ConfigError(f"{file.name} has become shorter while it was read; copy the file again")
        done += count


def read_rows(source: Source, tensor: Tensor) -> None:
    """Read this rank's rows of ``tensor``, or all of them where it is whole."""
    rows_here, first = tensor, 0
    if hasattr(tensor, "to_local"):
        rows_here = cast(Tensor, cast(Any, tensor).to_local())
        rows = -(-source.shape[0] // dist.get_world_size())  # of all ranks but the last
        first = min(source.shape[0], dist.get_rank() * rows) * torch.Size(source.shape[1:]).numel()
    read(source, first, rows_here.view(-1))
