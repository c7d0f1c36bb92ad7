"""Models of which each rank holds a shard, read from safetensors files without the rest.

    all ranks     lay the model out on meta ─▶ agree that it can be read in parts ─▶ shard by FSDP2 ─▶ allocate shards
    each rank     read the rows of its own shards ─▶ check that each parameter was read

Shards are rows, and the rows of a tensor lie side by side in its file, so that a rank reads one stretch of each.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from podium.devices import compute_dtype, return_large_blocks
from podium.errors import ConfigError
from podium.workers.attention import choose_attention
from podium.workers.config import ModelConfig, ParallelConfig
from podium.workers.models import checkpoint_layers, lay_out, load_model, plain_model
from podium.workers.parallel import check_collectives, shard_model
from podium.workers.weight_files import stored_tensors

__all__ = ["load_parallel"]

_log = logging.getLogger("podium")
_LARGE: Final = 1 << 30  # bytes of parameters, from which on the memory of a rank is worth a line in the log
_CHUNK: Final = 1 << 24  # bytes that are read at a time
_SAMPLE: Final = 1 << 12  # bytes of each tensor that ranks compare
_SHOWN: Final = 20
_DTYPES: Final = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}


class _Place(NamedTuple):
    """Where a tensor lies: its file, its first byte in it, its data type and its shape."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: list[int]


def load_parallel(
    config: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    *,
    spared: Sequence[str] = (),
    change: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """Load the model for training by ``parallel``. With ``fsdp2`` each rank reads no more than its shards, if it can.

    A model that cannot be read in parts is loaded whole by each rank, and not yet sharded. The log says why if the
    model is large. All ranks of the default process group call this together where ``parallel`` shards.

    Args:
        spared: As of :func:`.load_model`.
        change: Replaces parts of the model before it is sharded. Parameters that it makes are on ``device``, and are
            not read.

    Raises:
        ConfigError: As :func:`.load_model`; or the ranks' files differ, or are changed during the load.
    """
    if parallel.strategy == "fsdp2":
        check_collectives()
        model, places, reason = _laid_out(config, spared)
        if model is not None and change is not None:
            change(model)
        if model is not None and not reason:
            reason = _unread(model, places)
        if model is not None and not reason:
            reason = _compute_buffers(model, device)
        every = _gather((reason, "" if reason else _digest(places)))
        reason = next((reason for reason, _ in every if reason), "")
        if model is not None and not reason:
            if len(set(every)) > 1:
                raise ConfigError(
                    f"model.path={config.path!r}: its files differ from rank to rank; give all machines the same ones"
                )
            return _read_shards(model, config, parallel, device, places)
        del model
        _say(config, spared, reason)
    model = load_model(config, device, spared=spared)
    if change is not None:
        change(plain_model(model))
    return model


def _laid_out(config: ModelConfig, spared: Sequence[str]) -> tuple[PreTrainedModel | None, dict[str, _Place], str]:
    """Return the model on meta, the places of its tensors, and why it cannot be read in parts; "" if it can."""
    if config.config:
        return None, {}, "its weights are random"
    if config.lora is not None:
        return None, {}, "it has adapters"
    stored = stored_tensors(config.path)
    if not stored:
        return None, {}, "model.path is no directory with safetensors files"
    model = lay_out(config, spared=spared)
    if getattr(model.config, "quantization_config", None) is not None:
        return None, {}, "its weights are quantized"
    if getattr(model, "_weight_conversions", None) != []:
        return None, {}, "transformers converts its files' tensors or their names"
    places: dict[str, _Place] = {}
    for file in {tensor.file: None for tensor in stored.values()}:
        places |= _places(file)
    if odd := sorted(stored.keys() - places.keys()):
        return None, {}, f"{odd[0]} has a data type that is not read in parts"
    return model, places, ""


def _unread(model: PreTrainedModel, places: Mapping[str, _Place]) -> str:
    """Return why the files do not give all parameters and kept buffers under their own names; "" if they do."""
    wanted = _wanted(model)
    absent = [names[0] for names, _ in wanted if not any(name in places for name in names)]
    if absent:
        return f"its files lack {', '.join(absent[:_SHOWN])}"
    twice = [names for names, _ in wanted if sum(name in places for name in names) > 1]
    if twice:
        return f"its files hold {' and '.join(twice[0])}, which are one tensor"
    if model.config.get_text_config().tie_word_embeddings:
        head, embedding = cast("Any", model.get_output_embeddings()), cast("Any", model.get_input_embeddings())
        if head is not None and head.weight is not embedding.weight and head.weight.is_meta:
            return "its files hold tied weights twice"
    for names, tensor in wanted:
        place = next(places[name] for name in names if name in places)
        if place.shape != list(tensor.shape):
            return f"its files hold {names[0]} as {place.shape}, and the model as {list(tensor.shape)}"
    return ""


def _wanted(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors on meta that files have to give, each with all of its names."""
    kept = set(model.state_dict().keys())
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        if tensor.is_meta and name in kept:
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> str:
    """Compute the buffers that no file holds on ``device``, as transformers does at the end of a load.

    Returns why that fails; "" if it does not. A value that is in no buffer by chance shows that each was computed.
    """
    kept, fresh = set(model.state_dict().keys()), dict[int, Tensor]()
    for module in model.modules():
        cast(Any, module)._is_hf_initialized = False
    for parameter in model.parameters():
        cast(Any, parameter)._is_hf_initialized = True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, own = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if name in kept:
            cast(Any, buffer)._is_hf_initialized = True
        elif buffer.is_meta:
            module._buffers[own] = fresh.setdefault(id(buffer), _marked(buffer, device))
    try:
        with torch.random.fork_rng(devices=[]):
            model.initialize_weights()
    except Exception as error:  # noqa: BLE001 - whatever an architecture raises, it is loaded whole instead
        return f"its buffers cannot be computed alone: {' '.join(str(error).split())}"
    for name, buffer in model.named_buffers():
        if name not in kept and (buffer.is_meta or bool(_is_mark(buffer).any())):
            return f"its buffer {name} is not computed by transformers"
    return ""


def _marked(buffer: Tensor, device: torch.device) -> Tensor:
    mark = float("nan") if buffer.is_floating_point() else (0 if buffer.dtype == torch.bool else _least(buffer))
    return torch.full_like(buffer, mark, device=device)


def _is_mark(buffer: Tensor) -> Tensor:
    if buffer.dtype == torch.bool or buffer.is_complex():
        return torch.zeros((), dtype=torch.bool)
    return buffer.isnan() if buffer.is_floating_point() else buffer == _least(buffer)


def _least(buffer: Tensor) -> int:
    return torch.iinfo(buffer.dtype).min if not buffer.dtype.is_complex else 0


def _read_shards(
    model: PreTrainedModel,
    config: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    places: Mapping[str, _Place],
) -> PreTrainedModel:
    """Shard the model on meta, and read this rank's shards."""
    return_large_blocks(device)
    names = [next(name for name in names if name in places) for names, _ in _wanted(model)]
    model.config.name_or_path = config.path
    with contextlib.suppress(OSError):  # the model's own configuration says enough where the file is absent
        model.generation_config = GenerationConfig.from_pretrained(config.path)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    shard_model(model, dist.get_world_size(), device, compute_dtype(device, parallel.precision))
    cast(Any, model)._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name in names:
            _read(places[name], tensors[name])
    model.eval()
    choose_attention(model, config.attention)
    return model


def _read(place: _Place, tensor: Tensor) -> None:
    """Read this rank's rows of the tensor at ``place`` into ``tensor``, and convert them to its data type."""
    first, own = 0, tensor
    if hasattr(tensor, "to_local"):
        own = cast(Tensor, cast(Any, tensor).to_local())
        first = min(place.shape[0], dist.get_rank() * -(-place.shape[0] // dist.get_world_size()))
    size, flat = place.dtype.itemsize, own.view(-1)
    begin = place.begin + first * torch.Size(place.shape[1:]).numel() * size
    scratch = torch.empty(min(_CHUNK, flat.numel() * size), dtype=torch.uint8)
    with place.file.open("rb", buffering=0) as file:
        for start in range(0, flat.numel(), _CHUNK // size):
            target = flat[start : start + _CHUNK // size]
            part = scratch[: target.numel() * size]
            _fill(file, part, begin + start * size)
            target.copy_(part.view(place.dtype))


def _fill(file: FileIO, part: Tensor, begin: int) -> None:
    """Fill ``part`` with the bytes of the file from ``begin`` on. Raises ConfigError if the file ends before."""
    view, done = part.numpy().data, 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], begin + done)
        if not count:
            raise ConfigError(f"{file.name} has become shorter while it was read; copy the file again")
        done += count


def _places(file: Path) -> dict[str, _Place]:
    """Return the places of a safetensors file's tensors, whose header has been checked."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = cast("dict[str, Any]", json.loads(stream.read(length)))
    return {
        name: _Place(file, 8 + length + one["data_offsets"][0], _DTYPES[one["dtype"]], one["shape"])
        for name, one in header.items()
        if name != "__metadata__" and one["dtype"] in _DTYPES
    }


def _digest(places: Mapping[str, _Place]) -> str:
    """Return a checksum of the layout of the files and the beginning of each tensor."""
    digest = hashlib.sha256()
    for name, place in sorted(places.items()):
        size = min(_SAMPLE, torch.Size(place.shape).numel() * place.dtype.itemsize)
        digest.update(json.dumps([name, place.file.name, place.begin, str(place.dtype), place.shape]).encode())
        with place.file.open("rb", buffering=0) as file:
            digest.update(os.pread(file.fileno(), size, place.begin))
    return digest.hexdigest()


def _gather(value: tuple[str, str]) -> list[tuple[str, str]]:
    every = [value] * dist.get_world_size()
    if len(every) > 1:
        dist.all_gather_object(every, value)
    return every


def _say(config: ModelConfig, spared: Sequence[str], reason: str) -> None:
    """Log why a large model is loaded whole by each rank."""
    if dist.get_rank() == 0:
        size = sum(parameter.nbytes for parameter in lay_out(config, spared=spared).parameters())
        if size >= _LARGE:
            _log.warning("each rank loads the whole model (%.1f GiB) before it is sharded: %s", size / 2**30, reason)
