"""An engine over a torch model of this process, and how new weights reach that model.

shared      policy's model  <---- engine reads the same parameters; a refresh costs nothing
copied      policy's model, sharded (FSDP2) or of another dtype  --gather, cast-->  plain copy  <---- engine
received    engine's own model  <--copy in place--  rows of tensors that somebody sends
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from podium.data import copy_tensor
from podium.data.gathering import gather_rows, is_divided
from podium.devices import widen_kept_tensors
from podium.errors import ConfigError
from podium.rollout.engines.base import Engine

if TYPE_CHECKING:
    from podium.rollout.engines.config import EngineConfig


class ModelEngine(Engine):
    """An engine over a model of this process.

    Args:
        config: ``dtype`` is used here.
        model: The engine reads this model, or a plain copy where it is sharded or of another dtype than ``config``
            asks for. A copy holds no weights before the first ``refresh``.

    Attributes:
        model: The model that the engine computes with.

    Raises:
        ConfigError: A copy is needed, and ``transformers`` cannot build the model from its configuration.
    """

    converts_dtype: ClassVar[bool] = False
    """Whether the engine itself converts the model's weights to ``config.dtype``, so that no copy has to."""

    model: Any

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        model_dtype = next(model.parameters()).dtype
        dtype = model_dtype if config.dtype is None or self.converts_dtype else getattr(torch, config.dtype)
        self.copied = any(map(is_divided, model.parameters())) or dtype != model_dtype
        refusal = "this engine generates from a copy of the model, which has no weights yet: call refresh() first"
        super().__init__(config, model, refusal if self.copied else "")
        self._given = model
        self.model = _empty_copy(model, dtype) if self.copied else model
        self._targets: dict[str, Tensor] = {}
        text_config: Any = self.model.config.get_text_config()
        self.vocabulary = text_config.vocab_size
        self.positions = getattr(text_config, "max_position_embeddings", None)

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        model_shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        missing = [name for name, _ in self.model.named_parameters() if name not in shapes]
        unknown = [name for name in shapes if name not in model_shapes]
        if missing or unknown:
            raise ConfigError(
                f"the weights do not fit the engine's model: missing {missing[:4] or 'none'} ({len(missing)}), unknown "
                f"{unknown[:4] or 'none'} ({len(unknown)}); they must be the full tensors of the same architecture"
            )
        for name, shape in shapes.items():
            if tuple(shape) != model_shapes[name]:
                expected = list(model_shapes[name])
                raise ConfigError(f"weight {name} has shape {list(shape)}; the engine's model has {expected}")

    def load(self, name: str, start: int, values: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            copy_tensor(self.rows(name, start, start + len(values) if values.ndim else 0), values)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._targets:
            self._targets = self.model.state_dict(keep_vars=True)
        target = self._targets[name].detach()
        return target if not target.ndim else target[start:stop]

    def loaded(self) -> None:
        """Nothing is derived from the weights."""

    def reread(self) -> None:
        """Copy what the given model holds into the copy. All ranks of a sharded model call this together."""
        if not self.copied:
            return
        with torch.inference_mode(False), torch.no_grad():
            parameters: dict[str, Any] = self._given.state_dict(keep_vars=True)
            # Buffers are among them, such as the routing biases of some mixtures of experts. Tied tensors come once.
            targets = {id(target): (name, target) for name, target in self.model.state_dict(keep_vars=True).items()}
            for name, target in targets.values():
                copy_tensor(target, gather_rows(parameters[name]))


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
    widen_kept_tensors(twin)
    return twin.eval().requires_grad_(False)
