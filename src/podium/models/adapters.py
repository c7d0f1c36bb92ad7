"""Adapters of the layers that a configuration names, which peft makes.

peft takes the names of layers for those of separate experts where a family once had such. It then leaves out linear
layers that have these names too, such as those of a shared expert. Joined experts of other families have no adapters
from it at all. What it leaves out is given to it once more, by the names of the weights.

The base of adapters are the parameters that they are trained on, and that no checkpoint holds.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from podium.data.gathering import gather_rows
from podium.errors import CheckpointError, ConfigError
from podium.models.buckets import checksum
from podium.models.config import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE: Final = "base"
"""The name of the base's checksum in a checkpoint of adapters."""


def with_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """Return ``model`` with adapters, which alone require gradients.

    Raises:
        ConfigError: A target matches no layer, or a layer into which adapters cannot be merged.
    """
    _check_targets(model, lora.targets)
    weights = list(_list_weights(model, lora.targets))
    layers = [path for path, _ in model.named_modules()]
    names_of_layers = {path.removesuffix(".weight").rpartition(".")[2] for path in _list_weights(model, ())}
    names = list(lora.targets) or "all-linear"
    if weights and not any(_has_name(path, name) for path in layers for name in lora.targets or layers):
        names = list[str]()  # peft refuses names of joined experts alone
    adapted = _wrap(model, lora, seed, names, () if names else weights)
    unread = adapted.peft_config["default"].target_modules if names else lora.targets
    _check_known([name for name in lora.targets if name in unread], weights, names_of_layers)
    if left_out := _find_left_out(adapted, weights):
        adapted = _wrap(adapted.unload(), lora, seed, names, left_out)
        if lost := _find_left_out(adapted, weights):
            raise ConfigError(f"model.lora.targets: peft makes no adapters of {', '.join(lost[:4])}: name other layers")
    return cast("PreTrainedModel", adapted)


def _wrap(model: PreTrainedModel, lora: LoraConfig, seed: int, layers: Sequence[str], weights: Sequence[str]) -> Any:
    """Return the model with peft's adapters of the layers and weights of these names."""
    import peft

    others = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and not _is_linear(layer)]
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=cast("list[str]", layers),
        exclude_modules=others if others and layers == "all-linear" else None,
        target_parameters=[*weights] or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")  # peft's own patterns, for experts
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft 0.21 reads it
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora: {error}") from error


def _is_linear(layer: nn.Linear) -> bool:
    """Whether a layer answers as a linear one, which adapters add to. Llama 4 and PhiMoE choose their experts by a
    subclass that answers with a tuple."""
    if type(layer).forward is nn.Linear.forward:
        return True
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            answer: Any = layer(layer.weight.new_zeros(1, layer.in_features))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
    return isinstance(answer, torch.Tensor) and answer.shape == (1, layer.out_features)


def _has_name(place: str, name: str) -> bool:
    """Whether a layer or a weight at this place in the model has the name, which may have parts of its place."""
    return f".{place}".endswith(f".{name}")


def _list_weights(model: PreTrainedModel, targets: Sequence[str]) -> Iterator[str]:
    """Yield the places of all weights with these names, or, without names, of those of linear layers and experts except
    the output layer."""
    from transformers.pytorch_utils import Conv1D

    output: Any = model.get_output_embeddings()
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) or (targets and isinstance(layer, nn.Embedding)):
            is_own = layer is not output and (not isinstance(layer, nn.Linear) or _is_linear(layer))
            if any(_has_name(path, name) for name in targets) if targets else is_own:
                yield f"{path}.weight"
        elif not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            for name, weight in layer.named_parameters(recurse=False):  # the matrices of joined experts [E, ..., ...]
                joined = f"{path}.{name}"
                if weight.ndim == 3 and (not targets or any(_has_name(joined, target) for target in targets)):
                    yield joined


def _find_left_out(adapted: Any, weights: Iterable[str]) -> list[str]:
    """Return the places of those ``weights`` that have no adapters."""
    layers = {f"{path}.weight" for path in adapted.targeted_module_names}
    return sorted({*weights} - layers - {*adapted.targeted_parameter_names})


def _check_known(targets: Iterable[str], weights: Sequence[str], known: Iterable[str]) -> None:
    """Check that each of the ``targets`` is the name of one of the ``weights`` or their layers. Those that joined
    experts had when they were separate are not among them, since peft has replaced them.

    Args:
        known: Names that the model has.

    Raises:
        ConfigError: A target is no such name.
    """
    for target in targets:
        if not any(_has_name(path.removesuffix(".weight"), target) for path in weights):
            raise ConfigError(
                f"model.lora.targets has {target!r}, and no linear layer, embedding or expert of the model has this "
                f"name; it has {', '.join(sorted(known))}"
            )


def _check_targets(model: PreTrainedModel, targets: Iterable[str]) -> None:
    """Check that what adapters of these layers learn can be merged into the weights.

    Raises:
        ConfigError: It cannot; names the layer.
    """
    from transformers.pytorch_utils import Conv1D

    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for target in targets:
        for name, layer in model.named_modules():
            if _has_name(name, target):
                if not isinstance(layer, nn.Linear | nn.Embedding | Conv1D):
                    reason = f"{name} is a {type(layer).__name__}, neither a linear layer nor an embedding"
                elif isinstance(layer, nn.Linear) and not _is_linear(layer):
                    reason = f"{name} is a {type(layer).__name__}, which does not answer as a linear layer does"
                elif others := set(places[id(layer.weight)]) - {f"{name}.weight"}:
                    shared = ", ".join(sorted(other.removesuffix(".weight") for other in others))
                    reason = f"{name} shares its weight with {shared}, so that an adapter of one cannot be merged"
                else:
                    continue
                raise ConfigError(f"model.lora.targets: {reason}; leave {target} out")


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
