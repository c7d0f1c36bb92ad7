"""The part of an engine's contract that is about new weights, with a gate between forward passes and their changes.

    decode loop    | pass | pass |   waits              | pass |   ...     holds the gate for one forward pass
    new weights              close ... copy ... open(version)              holds it from the first bucket to the last
                             ^ waits for the pass that runs

Weights are written in place while no token is drawn. A second copy of the model beside the old weights would take
memory from the engine's cache.

New weights come all at once, by ``refresh``; or a part at a time: check_weights, gate.close, load ..., load_adapters,
loaded, gate.open.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

from torch import Tensor

from podium.data.adapters import Adapter, merge_adapters
from podium.devices import round_by_name
from podium.errors import GenerationError
from podium.exceptions import read_text


class WeightGate:
    """``with gate:`` around a forward pass; ``close`` and then ``open`` or ``refuse`` around a change of weights.

    Attributes:
        version: Version of the weights that passes use now.
        changes: Number of changes of the weights. Inside the gate it tells whether a cache is of these weights.
    """

    def __init__(self, refusal: str = "") -> None:
        self.version = 0
        self.changes = 0
        self._closed = False
        self._refusal = refusal
        self._passes = 0
        self._moved = threading.Condition(threading.Lock())

    def __enter__(self) -> None:
        """Wait until no weights are coming in. Raises GenerationError if there are none to draw from."""
        with self._moved:
            while self._closed:
                self._moved.wait()
            if self._refusal:
                raise GenerationError(self._refusal)
            self._passes += 1

    def __exit__(self, *_: object) -> None:
        with self._moved:
            self._passes -= 1
            if self._closed:
                self._moved.notify_all()

    @property
    def closed(self) -> bool:
        """Whether weights are coming in."""
        return self._closed

    def close(self) -> None:
        """Let no pass begin, and wait for those that run."""
        with self._moved:
            self._closed = True
            while self._passes:
                self._moved.wait()

    def open(self, version: int) -> None:
        """Let passes go on with the weights of ``version``."""
        self._end(version, "")

    def refuse(self, reason: str) -> None:
        """Let passes raise ``reason``, because the weights are neither the old ones nor the new."""
        self._end(self.version, reason)

    def _end(self, version: int, refusal: str) -> None:
        with self._moved:
            self.version, self._refusal, self._closed = version, refusal, False
            self.changes += 1
            self._moved.notify_all()

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Close the gate for the block, and open it with ``version``, or refuse passes after an error."""
        self.close()
        try:
            yield
        except BaseException as error:
            self.refuse(f"the weights of version {version} arrived only in part ({read_text(error)}); sync again")
            raise
        self.open(version)


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

        The base class merges each weight in float32, rounds it by :func:`.round_by_name` to the data type in which the
        engine holds it, and loads it. An engine that computes with adapters apart has its own.

        Args:
            adapters: All adapters; weights without one keep what was loaded.
            tensors: The matrices of the adapters, and the weights that they change as they are without adapters.
        """
        for name, of_weight in groupby(adapters, attrgetter("weight")):
            mine, rows = [*of_weight], self.rows(name, 0, 1)
            dtype = tensors[name].dtype if rows is None else rows.dtype
            parts = {matrix: tensors[matrix] for adapter in mine for matrix in (adapter.down, adapter.up)}
            base = tensors[name].to(parts[mine[0].down].device).to(dtype).float()
            ((_, values),) = merge_adapters(mine, {name: base, **parts})
            self.load(name, 0, round_by_name(values, name, dtype))

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
