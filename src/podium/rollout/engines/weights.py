"""The part of an engine's contract that is about new weights.

All at once, by ``refresh``; or a part at a time: check_weights, gate.close, load ..., load_adapters, loaded, gate.open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from podium.data.adapters import Adapter, merge_adapters
from podium.rollout.engines.gate import WeightGate

__all__ = ["WeightHolder"]


class WeightHolder(ABC):
    """What takes new weights in place. ``gate`` is closed while they arrive."""

    gate: WeightGate

    def refresh(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take the weights of ``version``, in place.

        Args:
            version: Number of the new weights.
            weights: Full tensors by parameter name. Without them the engine reads the model that it was made with,
                which has changed in place. Where that model is sharded, every rank of its mesh must call.

        Raises:
            ConfigError: Names or shapes do not fit the model. The weights are then as they were.
        """
        if weights is not None:
            self.check_weights({name: tuple(tensor.shape) for name, tensor in weights.items()})
        with self.gate.changing(version):
            if weights is None:
                self.reread()
            else:
                for name, tensor in weights.items():
                    self.load(name, 0, tensor)
            self.loaded()

    @abstractmethod
    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ConfigError unless tensors of these names and shapes are all that the model needs, and no more."""

    @abstractmethod
    def load(self, name: str, start: int, values: Tensor) -> None:
        """Copy ``values`` over the rows of the weight ``name`` from ``start`` on; the gate is closed."""

    def load_adapters(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        """Take the base of adapters with ``adapters`` merged, in place of earlier ones; the gate is closed.

        The base class merges each weight and loads it. An engine that computes with adapters apart has its own.

        Args:
            adapters: All adapters; weights without one keep what was loaded.
            tensors: The matrices of the adapters, and the weights that they change as they are without adapters.
        """
        for name, values in merge_adapters(adapters, tensors):
            self.load(name, 0, values)

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows of a weight as this engine holds them; None where it keeps them in a form of its own."""

    @abstractmethod
    def loaded(self) -> None:
        """Drop everything derived from the old weights: all new weights have arrived. The gate is closed."""

    @abstractmethod
    def reread(self) -> None:
        """Copy the current weights of the model with which the engine was made. The gate is closed."""

    def release(self) -> None:  # noqa: B027 - an engine that keeps no buffers between calls has nothing to do
        """Free the buffers kept between calls. The next request allocates them again."""
