"""How the ranks' results become one: small objects; a user's own is a subclass of :class:`Collect`.

The factories are the classes themselves, so that a type checker knows what each one returns.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, cast

from podium.errors import ConfigError
from podium.runtime.dispatch import RowPlan, Split
from podium.runtime.rows import concat_rows, count_rows, slice_rows, take_rows

__all__ = ["Collect", "Concat", "First", "Gather", "Nothing", "Reduce"]
__all__ += ["concat", "first", "gather", "nothing", "reduce"]

Ret = TypeVar("Ret")
Out = TypeVar("Out")


class Collect(ABC, Generic[Ret, Out]):
    """Joins results. ``Ret`` is what one rank returns, ``Out`` what the caller receives."""

    def ranks(self, split: Split) -> Sequence[int]:
        """The ranks whose results travel to the controller; the others only say that they are done."""
        return split.collectors

    @abstractmethod
    def collect(self, method: str, results: Sequence[Ret], split: Split) -> Out:
        """Join ``results``, which are in the order of :meth:`ranks`; ``method`` serves the errors."""


class Gather(Collect[Any, list[Any]]):
    """A list with every rank's result, in rank order (after ``shard``: one for each part)."""

    def collect(self, method: str, results: Sequence[Any], split: Split) -> list[Any]:
        return list(results)


class First(Collect[Any, Any]):
    """The result of the first rank that collects."""

    def ranks(self, split: Split) -> Sequence[int]:
        return split.collectors[:1]

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        return results[0]


class Nothing(Collect[Any, None]):
    """None; the call still waits for every rank."""

    def ranks(self, split: Split) -> Sequence[int]:
        return ()

    def collect(self, method: str, results: Sequence[Any], split: Split) -> None:
        return None


class Concat(Collect[Any, Any]):
    """Results joined row-wise, in the caller's row order; padding rows taken off."""

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        plan = split.plan
        if plan is None:
            return concat_rows(results, method)
        if any(plan.padding):
            results = [self._unpadded(method, part, plan, at) for at, part in enumerate(results)]
        joined = concat_rows(results, method)
        if plan.contiguous:
            return joined
        order = [row for rows, short in zip(plan.rows, plan.padding, strict=True) for row in rows[: len(rows) - short]]
        if count_rows(joined, method) != len(order):
            raise ConfigError(
                f"{method} got {len(order)} rows and returned {count_rows(joined, method)}: with balance='tokens' an "
                "endpoint returns as many rows as it got; use balance='rows' or gather()"
            )
        back = [0] * len(order)
        for place, row in enumerate(order):
            back[row] = place
        return take_rows(joined, back)

    def _unpadded(self, method: str, part: Any, plan: RowPlan, at: int) -> Any:
        sent, got = len(plan.rows[at]), count_rows(part, method)
        if got != sent:
            raise ConfigError(f"{method} got {sent} rows and returned {got}: pad=True needs as many rows back as sent")
        return slice_rows(part, 0, sent - plan.padding[at])


class Reduce(Collect[Any, Any]):
    """Numbers, tensors, or dicts of them, reduced over the ranks.

    Args:
        how: "sum", "mean", "min" or "max".
        weight: for "mean" after ``shard``: weigh each part by its "rows" or "tokens" (tokens need
            ``balance="tokens"``). None: every part counts the same. A part of weight 0 is left out.
    """

    def __init__(
        self, how: Literal["sum", "mean", "min", "max"], *, weight: Literal["rows", "tokens"] | None = None
    ) -> None:
        if how not in ("sum", "mean", "min", "max"):
            raise ConfigError(f"reduce({how!r}): expected 'sum', 'mean', 'min' or 'max'")
        if weight not in (None, "rows", "tokens") or (weight and how != "mean"):
            raise ConfigError(
                f"reduce({how!r}, weight={weight!r}): a weight is 'rows' or 'tokens' and goes with 'mean'"
            )
        self.how, self.weight = how, weight

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        weights = self._weights(method, results, split)
        if len({isinstance(result, Mapping) for result in results}) > 1:
            raise ConfigError(f"{method}: ranks returned different kinds: {[type(r).__name__ for r in results]}")
        if not isinstance(results[0], Mapping):
            return self._reduce(method, results, weights)
        keys = cast(Mapping[Any, Any], results[0]).keys()
        if any(result.keys() != keys for result in results):
            raise ConfigError(f"{method}: ranks returned different keys: {[sorted(result) for result in results]}")
        return {key: self._reduce(f"{method}[{key!r}]", [result[key] for result in results], weights) for key in keys}

    def _weights(self, method: str, results: Sequence[Any], split: Split) -> list[float]:
        if self.weight is None:
            return [1.0] * len(results)
        if split.plan is None:
            raise ConfigError(f"{method}: reduce(weight={self.weight!r}) needs an endpoint that shards")
        if self.weight == "tokens":
            if not split.plan.tokens:
                raise ConfigError(f"{method}: reduce(weight='tokens') needs shard(balance='tokens')")
            return [float(count) for count in split.plan.tokens]
        plan = split.plan
        return [float(len(rows) - short) for rows, short in zip(plan.rows, plan.padding, strict=True)]

    def _reduce(self, method: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
        values = [_fetched(value) for value in values]
        try:
            if self.how == "mean":
                pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
                total = sum(weight for _, weight in pairs)
                return sum(value * weight for value, weight in pairs) / total if total else float("nan")
            if self.how == "sum":
                return sum(values[1:], start=values[0])
            result = values[0]
            for value in values[1:]:
                result = _extreme(result, value, largest=self.how == "max")
            return result
        except TypeError as error:
            raise ConfigError(
                f"{method}: reduce({self.how!r}) cannot reduce {type(values[0]).__name__}: {error}"
            ) from None


def _fetched(value: Any) -> Any:
    """The tensor itself: a sum needs its bytes, also in a group that returns references."""
    data = sys.modules.get("podium.data")
    return value.get() if data is not None and isinstance(value, data.TensorRef) else value


def _extreme(a: Any, b: Any, *, largest: bool) -> Any:
    if hasattr(a, "maximum"):
        return a.maximum(b) if largest else a.minimum(b)
    return max(a, b) if largest else min(a, b)


gather = Gather
concat = Concat
first = First
reduce = Reduce
nothing = Nothing
