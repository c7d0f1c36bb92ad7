"""A value head on a language model: a critic that shares the model with the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.models.loading import plain_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME: Final = "podium_value_head"


def add_value_head(body: PreTrainedModel) -> None:
    """Add a head with one output, which is zero, and whose parameters are trained. The body may be on meta."""
    layer = cast(Any, body.get_output_embeddings())
    weight = getattr(layer, "base_layer", layer).weight  # peft wraps a layer that has adapters
    device = "cpu" if weight.is_meta else weight.device
    head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype, device=device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    body.add_module(_NAME, head)


def find_value_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of :func:`add_value_head`; None where there is none."""
    return cast("nn.Linear | None", getattr(plain_model(model), _NAME, None))


def is_of_value_head(name: str) -> bool:
    """Whether a tensor with this name in a model belongs to its value head. The files of a model hold none of these."""
    return f".{_NAME}." in f".{name}"


def run_value_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the value of each hidden state, ``[..., H] -> [...]``, in float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float(), head.bias.float())[..., 0]
