"""Which generator draws which prompts next.

    add ──▶ waiting, the earliest step first ──next──▶ the generator with the fewest in flight ──finished──▶
                       ▲                                        │
                       └───────────────── lost ◀────────────────┘

A part, which consists of one or a few prompts, is given to a generator as late as possible: a generator has
``capacity`` parts at most. So a generator with long completions does not delay parts that another generator could
sample.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class RolloutQueue(Generic[P]):
    """Parts that wait for a generator, and how many parts each generator draws. It uses no clock and no processes.

    Args:
        capacity: The most parts that one generator samples at the same time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._waiting: list[tuple[int, int, P]] = []  # a heap of step, number of the part, part
        self._added = 0
        self._loads: dict[int, int] = {}  # by number of an open generator, its parts
        self._order: list[tuple[int, int]] = []  # a heap of load and generator; entries with another load are over

    def __len__(self) -> int:
        """Number of the parts that wait."""
        return len(self._waiting)

    @property
    def open(self) -> set[int]:
        """The generators that get parts."""
        return {*self._loads}

    def admit(self, generator: int) -> None:
        """Give parts to ``generator`` from now on. It begins without parts."""
        self._set(generator, 0)

    def dismiss(self, generator: int) -> None:
        """Give no more parts to ``generator``. The caller adds its parts to the queue again."""
        self._loads.pop(generator, None)

    def add(self, step: int, part: P, *, first: bool = False) -> None:
        """Add ``part`` of ``step`` to the queue, behind the others of its step or, with ``first``, before them."""
        self._added += 1
        heapq.heappush(self._waiting, (step, -self._added if first else self._added, part))

    def next(self) -> tuple[int, P] | None:
        """Take the next part and the generator that samples it. None means that no part waits, or that all generators
        are busy."""
        while self._order and self._loads.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        if not self._waiting or not self._order or self._order[0][0] >= self.capacity:
            return None
        load, generator = self._order[0]
        self._set(generator, load + 1)
        return generator, heapq.heappop(self._waiting)[2]

    def finished(self, generator: int) -> None:
        """Record that ``generator`` has finished a part, unless it was dismissed."""
        if generator in self._loads:
            self._set(generator, self._loads[generator] - 1)

    def clear(self) -> None:
        """Remove all waiting parts."""
        self._waiting.clear()

    def _set(self, generator: int, load: int) -> None:
        self._loads[generator] = load
        heapq.heappush(self._order, (load, generator))
