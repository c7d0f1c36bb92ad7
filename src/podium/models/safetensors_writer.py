"""Write safetensors files from tensors where they lie, with their checksums."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_TYPES: Final = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}


class Part(NamedTuple):
    """A tensor of a file, or a stretch of one and the place of its first element in the whole tensor."""

    name: str
    values: Tensor
    offsets: Sequence[int] | None = None


def write_safetensors(path: Path, parts: list[Part]) -> dict[str, Any]:
    """Write ``parts`` to a safetensors file, as torch.distributed.checkpoint reads it where they have offsets.

    Returns:
        Its size and checksum, once it is on the disk.

    Raises:
        OSError: The disk refuses.
    """
    parts.sort(key=lambda part: -part.values.element_size())  # so that each begins at a multiple of its own size
    metadata = {"format": "pt"}
    if places := {part.name: {"saved_offsets": list(part.offsets)} for part in parts if part.offsets is not None}:
        metadata |= {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, values, _ in parts:
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _TYPES[values.dtype], "shape": [*values.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, head = hashlib.sha256(), len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        for block in (head, *(_bytes(part.values) for part in parts)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(head) + end, "sha256": digest.hexdigest()}


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
