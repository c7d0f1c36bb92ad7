"""The order in which a run takes its examples, and the place that the run has reached."""

import random
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final, Generic, Self, TypeVar

from podium.errors import CheckpointError, ConfigError
from podium.rollout.tasks.config import DataConfig

T = TypeVar("T")
_TAKEN: Final = "taken_"  # and the number of the source
_SINCE: Final = "since_"  # likewise


class PromptStream(Generic[T]):
    """Endless epochs over ``examples``. Each epoch is shuffled anew, and ``seed`` determines all of them. Without
    ``shuffle`` all have the order of the examples.

    Every example comes once an epoch. The examples of one :meth:`take` may belong to two epochs.

    Of weighted sources, each has epochs of its own. The next example is of the source that is furthest behind its
    share, so that after any number of examples a source has its share of them, to within a few examples. After
    :meth:`restore` with other weights this holds of the examples from there on.

    Args:
        examples: The examples.
        seed: Determines the order.
        digest: A short text that other examples do not have. With "", only their number is compared.
        sources: The source of each example, where sources have weights.
        weights: The weight of each source. A source without examples raises ConfigError.

    >>> stream = PromptStream("abc", seed=0)
    >>> sorted(stream.take(3)), len(stream.take(7))
    (['a', 'b', 'c'], 7)
    >>> mixture = PromptStream("aaab", seed=0, sources="mmmn", weights={"m": 1, "n": 1})
    >>> "".join(mixture.take(8))
    'abababab'
    """

    def __init__(
        self,
        examples: Sequence[T],
        seed: int,
        digest: str = "",
        sources: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        *,
        shuffle: bool = True,
    ) -> None:
        self._shuffles = shuffle
        if not len(examples):
            raise ConfigError("a stream needs at least one example")
        self._examples = examples
        self._digest = digest
        self._weights = [*weights.values()] if weights else [1.0]
        names = [*weights] if weights else [""]
        indices = {name: [index for index, source in enumerate(sources) if source == name] for name in names}
        self._indices = [*indices.values()] if weights else [list(range(len(examples)))]
        if empty := [name for name, rows in zip(names, self._indices, strict=True) if not rows]:
            raise ConfigError(
                f"{empty[0]} has a weight in data.train, and no example of it is left to train on: leave it out, or "
                "lower data.holdout"
            )
        self._go_to(seed, [0] * len(names))

    @classmethod
    def of(cls, rows: Any, config: DataConfig, seed: int) -> Self:
        """Return the stream of encoded rows or tasks, whose examples name the sources that have weights."""
        sources = [example.source for example in rows.examples] if config.weights else ()
        return cls(rows, seed, rows.digest, sources, config.weights)

    def __len__(self) -> int:
        """Number of examples in an epoch."""
        return len(self._examples)

    @property
    def examples(self) -> Sequence[T]:
        """All examples, in their own order."""
        return self._examples

    @property
    def number(self) -> int:
        """The number of the next example, counted from 0 through all epochs."""
        return sum(self._taken)

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` examples."""
        return [self._examples[index] for index in self.take_indices(count)]

    def take_indices(self, count: int) -> list[int]:
        """Return the places of the next ``count`` examples among all examples."""
        return [self._take_one() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Return the stream's place as values that JSON can hold."""
        taken = [*self._taken]  # another thread may take meanwhile
        number, size = sum(taken), len(self)
        epoch, position = (number // size, number % size)
        if number and not position:
            epoch, position = epoch - 1, size
        state: dict[str, Any] = {"epoch": epoch, "position": position}
        if len(taken) > 1:
            state |= {f"{_TAKEN}{source}": count for source, count in enumerate(taken)}
            state |= {f"{_SINCE}{source}": count for source, count in enumerate(self._since) if count}
            state["shares"] = self._written_shares
        return {"seed": self._seed, "items": size, "digest": self._digest, **state}

    def advance(self, state: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Return the place at example ``number``, from an earlier place of this stream."""
        ahead = copy(self)
        ahead.restore(state)
        missing = number - ahead.number
        ahead.take(missing)
        return ahead.state() if missing > 0 else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the place where :meth:`state` was taken, in that stream's order.

        Raises:
            CheckpointError: The stream of the state had other examples.
        """
        values: list[Any] = [state.get(name) for name in ("seed", "epoch", "position", "items")]
        seed, epoch, position, items = values
        if not all(isinstance(value, int) for value in values) or epoch < 0 or not 0 <= position <= items:
            raise CheckpointError(
                f"the checkpoint has no valid position in the data, {dict(state)!r:.200}; resume from another one"
            )
        appended = not self._shuffles and items <= len(self)  # what comes later has no effect on the place
        if items != len(self) and not appended:
            raise CheckpointError(
                f"the checkpoint was at example {position} of {items}, and the data have {len(self)} now; go on with "
                "the data, the data.* settings and the release of Podium that the run began with"
            )
        if self._digest and not appended and state.get("digest", self._digest) not in ("", self._digest):
            raise CheckpointError(
                f"the checkpoint was at example {position} of other data, whose prompts have other tokens: go on "
                "with the data, the tokenizer, the data.* settings and the release of Podium that the run began with"
            )
        number = epoch * items + position
        counts = [count for name, count in state.items() if name.startswith(_TAKEN)]
        if len(counts) != len(self._taken) * (len(self._taken) > 1) or sum(counts) != number * bool(counts):
            raise CheckpointError(
                f"the checkpoint was at example {position} of other sources: go on with the data.train that the run "
                "began with"
            )
        taken = [state[f"{_TAKEN}{source}"] for source in range(len(counts))]
        is_reweighted = state.get("shares", self._written_shares) != self._written_shares
        since = taken if is_reweighted else [state.get(f"{_SINCE}{source}", 0) for source in range(len(counts))]
        if not all(isinstance(before, int) and 0 <= before <= most for before, most in zip(since, taken, strict=True)):
            raise CheckpointError(f"the checkpoint has no valid shares of sources, {dict(state)!r:.200}")
        self._go_to(seed, taken or [number], since)

    @property
    def _written_shares(self) -> str:
        """The shares of the sources, as a text by which other weights are known in a checkpoint."""
        return " ".join(repr(weight / sum(self._weights)) for weight in self._weights)

    def _go_to(self, seed: int, taken: Sequence[int], since: Sequence[int] = ()) -> None:
        self._seed, self._taken = seed, [*taken]
        self._since = [*since] or [0] * len(self._taken)  # by source, what was taken before it had its weight
        self._orders: list[list[int]] = [[] for _ in taken]
        self._epochs = [-1] * len(self._taken)

    def _take_one(self) -> int:
        """Return the index of the next example."""
        source = self._choose_source()
        indices, count = self._indices[source], self._taken[source]
        epoch, position = divmod(count, len(indices))
        if epoch != self._epochs[source]:
            self._orders[source], self._epochs[source] = [*indices], epoch
            name = f"{self._seed}/{epoch}" + (f"/{source}" if source else "")
            if self._shuffles:
                random.Random(name).shuffle(self._orders[source])
        self._taken[source] = count + 1
        return self._orders[source][position]

    def _choose_source(self) -> int:
        """Return the number of the source that is furthest behind its share of the examples."""
        if len(self._taken) == 1:
            return 0
        counts = [taken - before for taken, before in zip(self._taken, self._since, strict=True)]
        share = (sum(counts) + 1) / sum(self._weights)
        behind = [share * weight - count for weight, count in zip(self._weights, counts, strict=True)]
        return max(range(len(behind)), key=behind.__getitem__)
