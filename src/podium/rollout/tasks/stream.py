"""The order in which a run takes its examples, and the place that the run has reached."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from podium.errors import CheckpointError, ConfigError

__all__ = ["PromptStream"]

T = TypeVar("T")


class PromptStream(Generic[T]):
    """Endless epochs over ``examples``. Each epoch is shuffled anew, and ``seed`` determines all of them.

    Every example comes once an epoch. The examples of one :meth:`take` may belong to two epochs.

    Args:
        examples: The examples.
        seed: Determines the order.
        digest: A short text that other examples do not have. With "", only their number is compared.

    >>> stream = PromptStream("abc", seed=0)
    >>> sorted(stream.take(3)), len(stream.take(7))
    (['a', 'b', 'c'], 7)
    """

    def __init__(self, examples: Sequence[T], seed: int, digest: str = "") -> None:
        if not len(examples):
            raise ConfigError("a stream needs at least one example")
        self._examples = examples
        self._seed = seed
        self._digest = digest
        self._go_to(0, 0)

    def __len__(self) -> int:
        """Number of examples in an epoch."""
        return len(self._examples)

    @property
    def examples(self) -> Sequence[T]:
        """All examples, in their own order."""
        return self._examples

    @property
    def epoch(self) -> int:
        """The epoch of the next example, from 0."""
        return self._epoch + (self._position == len(self._order))

    @property
    def number(self) -> int:
        """The number of the next example, counted from 0 through all epochs."""
        return self._epoch * len(self) + self._position

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` examples."""
        taken: list[T] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._go_to(self._epoch + 1, 0)
            stop = min(len(self._order), self._position + count - len(taken))
            taken += [self._examples[index] for index in self._order[self._position : stop]]
            self._position = stop
        return taken

    def state(self) -> dict[str, Any]:
        """Return the stream's place as values that JSON can hold."""
        state = {"epoch": self._epoch, "position": self._position}
        return {"seed": self._seed, "items": len(self), "digest": self._digest, **state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the place where :meth:`state` was taken, in that stream's order.

        Raises:
            CheckpointError: The stream of the state had other examples.
        """
        values: list[Any] = [state.get(name) for name in ("seed", "epoch", "position", "items")]
        seed, epoch, position, items = values
        if not all(isinstance(value, int) for value in values) or epoch < 0 or not 0 <= position <= items:
            raise CheckpointError(
                f"the checkpoint's place in the data is none: {dict(state)!r:.200}; resume from another checkpoint"
            )
        if items != len(self):
            raise CheckpointError(
                f"the checkpoint was at example {position} of {items}, and the data have {len(self)} now; go on with "
                "the data (and data.* settings) that the run began with"
            )
        if self._digest and state.get("digest", self._digest) not in ("", self._digest):
            raise CheckpointError(
                f"the checkpoint was at example {position} of other data, whose prompts have other tokens: go on "
                "with the data, the tokenizer and the data.* settings that the run began with"
            )
        self._seed = seed
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
