"""The base of adapters: the parameters that they are trained on, and that no checkpoint holds."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from podium.data.gathering import gather_rows
from podium.errors import CheckpointError
from podium.models.buckets import checksum
from podium.models.config import ModelConfig

BASE: Final = "base"
"""The name of the base's checksum in a checkpoint of adapters."""


@torch.no_grad()
def base_checksum(model: nn.Module) -> Tensor:
    """Return int64 ``[1]`` that says whether two models have the same frozen parameters.

    The number does not depend on the number of ranks. All ranks call this together if the model is sharded, because
    each parameter is gathered from all.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            value = gather_rows(parameter.detach())
            digest.update(f"{name} {value.dtype} {list(value.shape)} {checksum(value)};".encode())
    return torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])


def check_scale(folder: Path, config: ModelConfig) -> None:
    """Check that ``config`` gives the adapters of the checkpoint in ``folder`` the scale with which they were trained.

    Raises:
        CheckpointError: Their alpha was another one, so that they would change the model by more or by less.
    """
    file = folder / "adapter_config.json"
    if config.lora is None or not file.is_file():  # the adapters of random weights have no such file
        return
    alpha = json.loads(file.read_bytes()).get("lora_alpha")
    if alpha != config.lora.alpha:
        raise CheckpointError(
            f"the checkpoint {folder} holds adapters that were trained with alpha = {alpha}, and model.lora.alpha = "
            f"{config.lora.alpha:g} makes another model of them: set model.lora.alpha to {alpha}"
        )


def name_base(model: nn.Module, config: ModelConfig) -> Any:
    """Return peft's configuration of the adapters of ``model``, in which the base has the name that others find it by:
    that of the hub, or the absolute path of a directory."""
    peft_config: Any = next(iter(cast(Any, model).peft_config.values()))
    local = Path(config.path).expanduser()
    peft_config.base_model_name_or_path = str(local.absolute()) if local.is_dir() else config.path
    return peft_config
