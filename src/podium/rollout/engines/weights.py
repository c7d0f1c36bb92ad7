"""Which model an engine reads, and how new weights reach it.

shared      policy's model  <---- engine reads the very same parameters; a refresh costs nothing
copied      policy's model, sharded (FSDP2) or of another dtype  --gather, cast-->  plain copy  <---- engine
received    engine's own model  <--copy in place--  full tensors that somebody sends
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import ConfigError

__all__ = ["ModelSource"]


class ModelSource:
    """The model that an engine reads: ``model`` itself, or a plain copy where it is sharded or of another dtype.

    A copy holds no weights before the first ``refresh``; ``ready`` says so.

    Raises:
        ConfigError: a copy is needed and the model is not one that ``transformers`` can build from its configuration.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        own = next(model.parameters()).dtype
        self._source = model
        self._copied = any(map(_is_sharded, model.parameters())) or dtype not in (None, own)
        self.model = _empty_copy(model, dtype or own) if self._copied else model
        self.ready = not self._copied

    def refresh(self, weights: Mapping[str, Tensor] | None) -> None:
        """Copy ``weights``, or what the source now holds, into the model that is read; nothing where it is shared."""
        if weights is None and not self._copied:
            return
        target = dict(self.model.named_parameters())
        given = dict(self._source.named_parameters()) if weights is None else weights
        _check_names(target, given, set(self.model.state_dict()))
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in target.items():
                value = given[name]
                # A collective: every rank walks the parameters in the same order.
                value = value.full_tensor() if _is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]
                if value.shape != parameter.shape:
                    raise ConfigError(
                        f"weight {name} has shape {list(value.shape)}; the engine's model has {list(parameter.shape)}"
                    )
                parameter.copy_(value)
        self.ready = True


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _empty_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config: Any = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            f"{type(model).__name__} has no transformers configuration, so that no unsharded copy of it can be built "
            "for generation; give the engine an unsharded model of the dtype to generate in"
        )
    device = next(model.parameters()).device
    with torch.inference_mode(False), no_init_weights(), torch.device(device):
        twin = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    twin.tie_weights()
    return twin.eval().requires_grad_(False)


def _check_names(target: Mapping[str, Any], given: Mapping[str, Any], known: set[str]) -> None:
    missing = [name for name in target if name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        raise ConfigError(
            f"the weights do not fit the engine's model: missing {missing[:4] or 'none'} ({len(missing)}), "
            f"unknown {unknown[:4] or 'none'} ({len(unknown)}); they must be the full tensors of the same architecture"
        )
