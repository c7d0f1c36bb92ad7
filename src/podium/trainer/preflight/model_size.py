"""Sizes of a model without its weights: it is laid out on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from podium.errors import ConfigError
from podium.workers import LoraConfig, ModelConfig, load_model

__all__ = ["ModelSize", "model_size"]


@dataclass(frozen=True)
class ModelSize:
    """What the memory of a model follows from."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    key_value_width: int
    vocabulary: int


def model_size(model: ModelConfig) -> ModelSize:
    """Sizes of the model that ``model`` describes, without its weights.

    Raises:
        ConfigError: nothing there that transformers knows.
    """
    with torch.device("meta"):
        whole = _from_path(model.path) if model.path else load_model(replace(model, lora=None), "meta")
    settings: Any = whole.config.get_text_config()
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    parameters = sum(p.numel() for p in whole.parameters())
    return ModelSize(
        parameters=parameters,
        trained=parameters if model.lora is None else _adapter_parameters(whole, model.lora),
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        key_value_width=heads * head,
        vocabulary=settings.vocab_size,
    )


def _from_path(path: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: its configuration cannot be read: {error}") from None


def _adapter_parameters(model: PreTrainedModel, lora: LoraConfig) -> int:
    head = model.get_output_embeddings()
    adapted = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (not lora.targets or name.rpartition(".")[2] in lora.targets)
    ]
    return sum(lora.rank * (module.in_features + module.out_features) for module in adapted)
