"""A gate between forward passes and changes of the weights.

    decode loop    | pass | pass |   waits              | pass |   ...     holds the gate for one forward pass
    new weights              close ... copy ... open(version)              holds it from the first bucket to the last
                             ^ waits for the pass that runs

Weights are written in place while no token is drawn. A second copy of the model beside the old weights would take
memory from the engine's cache.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from podium.errors import GenerationError
from podium.exceptions import read_text

__all__ = ["WeightGate"]


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
