"""Which model an engine reads, and how new weights reach it.

shared      policy's model  <---- engine reads the very same parameters; a refresh costs nothing
copied      policy's model, sharded (FSDP2) or of another dtype  --gather, cast-->  plain copy  <---- engine
received    engine's own model  <--copy in place--  rows of tensors that somebody sends
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from podium.data import copy_tensor
from podium.errors import ConfigError
from podium.rollout.engines.base import Engine
from podium.rollout.engines.config import EngineConfig

__all__ = ["ModelEngine", "ModelSource", "check_shapes"]

EMPTY = "this engine generates from a copy of the model, which holds no weights before refresh()"


class ModelSource:
    """The model that an engine reads: ``model`` itself, or a plain copy where it is sharded or of another dtype.

    A copy holds no weights before the first ``gather``; ``empty`` says so until then.

    Raises:
        ConfigError: a copy is needed and the model is not one that ``transformers`` can build from its configuration.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        own = next(model.parameters()).dtype
        self._source = model
        self._copied = any(map(_is_sharded, model.parameters())) or dtype not in (None, own)
        self.model = _empty_copy(model, dtype or own) if self._copied else model
        self.empty = EMPTY if self._copied else ""
        self._targets: dict[str, Tensor] = {}

    def gather(self) -> None:
        """Copy what the source now holds into the model that is read, a tensor at a time; nothing where it is shared.

        A collective where the source is sharded: every rank walks the parameters in the same order.
        """
        if not self._copied:
            return
        with torch.inference_mode(False), torch.no_grad():
            given = dict(self._source.named_parameters())
            for name, parameter in self.model.named_parameters():
                whole = given[name].full_tensor() if _is_sharded(given[name]) else given[name]  # pyright: ignore[reportAttributeAccessIssue]
                copy_tensor(parameter, whole)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """What :meth:`Engine.check_weights` does."""
        needed = [name for name, _ in self.model.named_parameters()]
        check_shapes(shapes, {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}, needed)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one of the model's own tensors, a view."""
        if name not in self._targets:
            self._targets = self.model.state_dict(keep_vars=True)
        target = self._targets[name].detach()
        return target if not target.ndim else target[start:stop]

    def load(self, name: str, start: int, values: Tensor) -> None:
        """Copy ``values`` over the rows of ``name`` from ``start`` on."""
        with torch.inference_mode(False), torch.no_grad():
            copy_tensor(self.rows(name, start, start + len(values) if values.ndim else 0), values)


class ModelEngine(Engine):
    """An engine over a model of this process: its weights are that model's, or those of its plain copy.

    Args:
        config: ``dtype`` is used here.
        model: See :class:`ModelSource`.
    """

    converts_dtype: ClassVar[bool] = False
    """Whether the engine itself converts the model's weights to ``config.dtype``, so that no copy has to."""

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        dtype = None if config.dtype is None or self.converts_dtype else getattr(torch, config.dtype)
        self._source = ModelSource(model, dtype)
        super().__init__(config, model, self._source.empty)
        text_config: Any = self.model.config.get_text_config()
        self.vocabulary = text_config.vocab_size
        self.positions = getattr(text_config, "max_position_embeddings", None)

    @property
    def model(self) -> Any:
        """The model that the engine computes with."""
        return self._source.model

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._source.check(shapes)

    def load(self, name: str, start: int, values: Tensor) -> None:
        self._source.load(name, start, values)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.rows(name, start, stop)

    def loaded(self) -> None:
        """Nothing is derived from the weights."""

    def reread(self) -> None:
        self._source.gather()


def check_shapes(given: Mapping[str, Sequence[int]], known: Mapping[str, Sequence[int]], needed: Sequence[str]) -> None:
    """Raise ConfigError unless ``given`` has all of ``needed``, nothing that is not ``known``, and its shapes."""
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        raise ConfigError(
            f"the weights do not fit the engine's model: missing {missing[:4] or 'none'} ({len(missing)}), "
            f"unknown {unknown[:4] or 'none'} ({len(unknown)}); they must be the full tensors of the same architecture"
        )
    for name, shape in given.items():
        if tuple(shape) != tuple(known[name]):
            raise ConfigError(f"weight {name} has shape {list(shape)}; the engine's model has {list(known[name])}")


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
