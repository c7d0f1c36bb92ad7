"""Between whoever draws tokens and whoever changes the weights.

    decode loop    | pass | pass |   waits              | pass |   ...     holds the gate for one forward pass
    new weights              close ... copy ... open(version)              holds it from the first bucket to the last
                             ^ waits for the pass that runs

Weights are written in place while nobody draws, rather than beside the old ones and swapped: a second copy of a model
is the memory that a generator would rather give to its cache, and what waits is only the tokens of that moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from podium.errors import GenerationError

__all__ = ["WeightGate"]


class WeightGate:
    """``with gate:`` around a forward pass; ``close`` and then ``open`` or ``refuse`` around a change of weights.

    Attributes:
        version: of the weights that passes use now.
        changes: how often weights have changed; inside the gate it says whether a cache is still of these weights.
    """

    def __init__(self, refusal: str = "") -> None:
        self.version = 0
        self.changes = 0
        self._closed = False
        self._refusal = refusal
        self._passes = 0
        self._moved = threading.Condition(threading.Lock())

    def __enter__(self) -> None:
        """Wait until no weights are coming in.

        Raises:
            GenerationError: there are none to draw from; says why.
        """
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
        """Let no pass begin, and wait for those that run; nothing where it is closed already."""
        with self._moved:
            self._closed = True
            while self._passes:
                self._moved.wait()

    def open(self, version: int) -> None:
        """Let passes go on with the weights of ``version``."""
        self._end(version, "")

    def refuse(self, reason: str) -> None:
        """Passes raise ``reason`` from now on: the weights are neither the old ones nor the new."""
        self._end(self.version, reason)

    def _end(self, version: int, refusal: str) -> None:
        with self._moved:
            self.version, self._refusal, self._closed = version, refusal, False
            self.changes += 1
            self._moved.notify_all()

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Closed for the block, then open with ``version``; after an error in the block passes are refused."""
        self.close()
        try:
            yield
        except BaseException as error:
            self.refuse(f"the weights of version {version} came only in part ({error}); sync again")
            raise
        self.open(version)
