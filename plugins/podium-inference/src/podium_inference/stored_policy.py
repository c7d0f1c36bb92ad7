"""The model of a policy's checkpoint whose directory cannot be loaded as a model: with adapters, or in another layout.

It is read without the optimizer, and written in the formats of transformers and peft.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from podium.errors import CheckpointError, ConfigError
from podium.exceptions import read_text
from podium.models.adapters import BASE, base_checksum, check_scale, name_base
from podium.models.config import ModelConfig
from podium.models.loading import load_model, save_pretrained
from podium.models.manifest import check_manifest, refusal_of
from podium.models.model_files import RESUME
from podium.models.other_parts_search import find_other_parts
from podium.models.tokenizers import load_tokenizer
from podium.models.whole_weights import full_weights

__all__ = ["load_stored", "write_adapters", "write_whole"]

_PREFIX = "model."


def load_stored(folder: Path, config: ModelConfig) -> nn.Module:
    """Return the policy that :meth:`.Learner.save` wrote into ``folder``, on any number of ranks. It is on the CPU.

    Args:
        folder: The directory of the policy in a checkpoint.
        config: The model of the run. A model with adapters is returned with peft's wrapper.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model than ``config`` makes.
        ConfigError: As :func:`.load_model`.
    """
    check_manifest(folder)
    check_scale(folder, config)
    model = load_model(replace(config, gradient_checkpointing=False))
    reader = HuggingFaceStorageReader(str(folder / RESUME if (folder / RESUME).is_dir() else folder))
    try:
        stored = cast(Mapping[str, Any], reader.read_metadata().state_dict_metadata)
        adapters = BASE in stored  # and their base is the run's, by its checksum
        named = (
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad or not adapters
        )
        parameters = {f"{_PREFIX}{name}": parameter.detach() for name, parameter in named}
        sizes = {name: entry.size for name, entry in stored.items() if name.startswith(_PREFIX)}
        if sizes != {name: value.shape for name, value in parameters.items()}:
            odd = sorted(
                name for name in parameters.keys() | sizes.keys() if name not in parameters or name not in sizes
            )
            raise CheckpointError(
                f"the checkpoint {folder} is of another model than the run's model.path and model.config give: "
                f"{', '.join(odd[:3]) or 'shapes'} differ; put the model back with which the run began"
            )
        base = {BASE: torch.zeros(1, dtype=torch.int64)} if adapters else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            state_dict_loader.load({**parameters, **base}, storage_reader=reader, no_dist=True)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
    if adapters and not torch.equal(base[BASE], base_checksum(model)):
        raise CheckpointError(
            f"the checkpoint {folder} holds adapters of another base than model.path={config.path!r} has now: give the "
            f"model that the run began with, and its model.dtype, which is {config.dtype} here"
        )
    return model


def write_whole(model: nn.Module, config: ModelConfig, to: Path) -> None:
    """Write the model, adapters merged, and its tokenizer into ``to``, as transformers and vLLM load them.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    weights = {name: tensor.clone() for name, tensor in full_weights(model)}
    others = find_other_parts(model, config)
    save_pretrained(model, weights, to, load_tokenizer(config.tokenizer_source), others)


def write_adapters(model: nn.Module, config: ModelConfig, to: Path) -> None:
    """Write the adapters, the name of their base and the tokenizer into the directory ``to``, as peft loads them.

    Raises:
        ConfigError: The base has random weights, so that nobody else has it.
        CheckpointError: The directory cannot be written.
    """
    if config.config:
        raise ConfigError(
            "the base of the adapters has random weights (model.config): write the merged model with --merge"
        )
    name_base(model, config)
    try:
        cast(Any, model).save_pretrained(str(to), save_embedding_layers=False)
        load_tokenizer(config.tokenizer_source).save_pretrained(str(to))
    except (OSError, SafetensorError) as error:
        reason = refusal_of(error) or read_text(error)
        raise CheckpointError(f"cannot write the adapters to {to}: {reason}") from error
