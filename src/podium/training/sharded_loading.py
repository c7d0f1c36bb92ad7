"""Models of which each rank holds a shard, read from safetensors files without the rest.

    all ranks     lay the model out on meta ─▶ agree that it can be read in parts ─▶ shard by FSDP2 ─▶ allocate shards
    each rank     read the rows of its own shards ─▶ check that each parameter was read

Shards are rows, and the rows of a tensor lie side by side in its file, so that a rank reads one stretch of each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from podium.devices import compute_dtype, return_large_blocks
from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.models.attention import choose_attention
from podium.models.config import ModelConfig
from podium.models.loading import checkpoint_layers, lay_out, load_model, plain_model
from podium.models.progress import count_progress
from podium.models.tensor_files import Place, Source, digest, find_sources, places, read_rows
from podium.models.weight_files import read_stored_tensors
from podium.training.config import ParallelConfig
from podium.training.data_parallel import check_collectives, shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("podium")
_LARGE: Final = 1 << 30  # bytes of parameters, from which on the memory of a rank is worth a line in the log
_SHOWN: Final = 20


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
        model, sources, reason = _lay_out(config, spared)
        settled = model is not None and choose_attention(model, config.attention)
        if model is not None and change is not None:
            change(model)
        if model is not None and not reason:
            reason = _unread(model, sources)
        if model is not None and not reason:
            reason = _compute_buffers(model, device)
        every = _gather((reason, "" if reason else digest(source for _, source in sorted(sources.items()))))
        reason = next((reason for reason, _ in every if reason), "")
        if model is not None and not reason:
            if len(set(every)) > 1:
                raise ConfigError(
                    f"model.path={config.path!r}: its files differ from rank to rank; give all machines the same ones"
                )
            model = _read_shards(model, config, parallel, device, sources)
            if not settled:
                choose_attention(model, config.attention)
            return model
        del model
        _say(config, spared, reason)
    model = load_model(config, device, spared=spared)
    if change is not None:
        change(plain_model(model))
    return model


def _lay_out(config: ModelConfig, spared: Sequence[str]) -> tuple[PreTrainedModel | None, dict[str, Source], str]:
    """Return the model on meta, the places of its tensors, and why it cannot be read in parts; "" if it can."""
    if config.config:
        return None, {}, "its weights are random"
    if config.lora is not None:
        return None, {}, "it has adapters"
    stored = read_stored_tensors(config.path)
    if not stored:
        return None, {}, "model.path is no directory with safetensors files"
    model = lay_out(config, spared=spared)
    if getattr(model.config, "quantization_config", None) is not None:
        return None, {}, "its weights are quantized"
    stored_places: dict[str, Place] = {}
    for file in {tensor.file: None for tensor in stored.values()}:
        stored_places |= places(file)
    if odd := sorted(stored.keys() - stored_places.keys()):
        return None, {}, f"{odd[0]} has a data type that is not read in parts"
    sources = find_sources(model, stored_places)
    if sources is None:
        return None, {}, "transformers converts the tensors of its files"
    return model, sources, ""


def _unread(model: PreTrainedModel, sources: Mapping[str, Source]) -> str:
    """Return why the files do not give all parameters and kept buffers under their own names; "" if they do."""
    wanted = _list_wanted_tensors(model)
    absent = [names[0] for names, _ in wanted if not any(name in sources for name in names)]
    if absent:
        return f"its files lack {', '.join(absent[:_SHOWN])}"
    twice = [names for names, _ in wanted if sum(name in sources for name in names) > 1]
    if twice:
        return f"its files hold {' and '.join(twice[0])}, which are one tensor"
    if model.config.get_text_config().tie_word_embeddings:
        head, embedding = cast("Any", model.get_output_embeddings()), cast("Any", model.get_input_embeddings())
        if head is not None and head.weight is not embedding.weight and head.weight.is_meta:
            return "its files hold tied weights twice"
    for names, tensor in wanted:
        source = next(sources[name] for name in names if name in sources)
        if source.shape != list(tensor.shape):
            return f"its files hold {names[0]} as {source.shape}, and the model as {list(tensor.shape)}"
    return ""


def _list_wanted_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors on meta that files have to give, each with all of its names."""
    kept = set(model.state_dict().keys())
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names_by_id: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        if tensor.is_meta and name in kept:
            names_by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(names_by_id.values())


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> str:
    """Compute the buffers that no file holds on ``device``, as transformers does at the end of a load.

    Returns why that fails; "" if it does not. Each buffer is computed twice, over other values: an element that nobody
    computes differs.
    """
    kept = set(model.state_dict().keys())
    outline = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name not in kept]
    for tensor in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in kept)):
        cast(Any, tensor)._is_hf_initialized = True
    for before in (0, 1):
        first, fresh = dict(model.named_buffers()), dict[int, Tensor]()
        for name, buffer in outline:
            module, _, attribute = name.rpartition(".")
            empty = torch.full_like(buffer, before, device=device)
            model.get_submodule(module)._buffers[attribute] = fresh.setdefault(id(buffer), empty)
        for module in model.modules():
            cast(Any, module)._is_hf_initialized = False
        try:
            with torch.random.fork_rng(devices=[]):
                model.initialize_weights()
        except Exception as error:  # noqa: BLE001 - whatever an architecture raises, it is loaded whole instead
            return f"its buffers cannot be computed alone: {' '.join(read_text(error).split())}"
    for name, buffer in model.named_buffers():
        if name not in kept and not torch.equal(buffer.nan_to_num(), first[name].nan_to_num()):
            return f"its buffer {name} is not computed by transformers"
    return ""


def _read_shards(
    model: PreTrainedModel,
    config: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    sources: Mapping[str, Source],
) -> PreTrainedModel:
    """Shard the model on meta, and read this rank's shards."""
    return_large_blocks(device)
    names = [next(name for name in names if name in sources) for names, _ in _list_wanted_tensors(model)]
    model.config.name_or_path = config.path
    with contextlib.suppress(OSError):  # the model's own configuration says enough where the file is absent
        model.generation_config = transformers.GenerationConfig.from_pretrained(config.path)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    precision = compute_dtype(device, parallel.choice.compute)
    shard_model(model, dist.get_world_size(), device, precision, parallel.choice.output == "float32")
    cast(Any, model)._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name in count_progress(names):
            read_rows(sources[name], tensors[name])
    return model.eval()


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
