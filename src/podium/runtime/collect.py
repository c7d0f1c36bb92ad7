"""How the ranks' results become one. A user's own way is a subclass of :class:`Collect`."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from numbers import Number
from typing import Any, Generic, Literal, TypeVar, cast

from podium.data import Rows
from podium.errors import ConfigError, DataError
from podium.runtime.dispatch import RowPlan, Split
from podium.runtime.rows import concat_rows, count_rows, is_scalar, kind_of, open_rows, slice_rows, take_rows
from podium.spelling import write_count

Ret = TypeVar("Ret")
Out = TypeVar("Out")


class Collect(ABC, Generic[Ret, Out]):
    """Joins results. ``Ret`` is what one rank returns, ``Out`` what the caller receives."""

    def ranks(self, split: Split) -> Sequence[int]:
        """The ranks whose results are sent to the controller. Other ranks only report that they are done."""
        return split.collectors

    @abstractmethod
    def collect(self, method: str, results: Sequence[Ret], split: Split) -> Out:
        """Join ``results``, which are in the order of :meth:`ranks`. Errors begin with ``method``."""


class gather(Collect[Any, list[Any]]):
    """A list with every rank's result, in rank order (after ``shard``: one for each part)."""

    def collect(self, method: str, results: Sequence[Any], split: Split) -> list[Any]:
        return list(results)


class first(Collect[Any, Any]):
    """The result of the first rank that collects."""

    def ranks(self, split: Split) -> Sequence[int]:
        return split.collectors[:1]

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        return results[0]


class nothing(Collect[Any, None]):
    """None. The call still waits for every rank."""

    def ranks(self, split: Split) -> Sequence[int]:
        return ()

    def collect(self, method: str, results: Sequence[Any], split: Split) -> None:
        return None


class concat(Collect[Any, Any]):
    """Results joined row-wise, in the caller's row order, without padding rows.

    After ``shard`` an endpoint returns a row for every row that it got. With ``balance="rows"`` and without padding it
    may return several for each, such as the completions of a prompt, if all ranks return as many.

    Args:
        scalars: How single values in a dict with rows are joined into one, such as ``reduce("mean")`` or ``gather()``.
            By default all ranks must return the same.
        any_rows: Whether ranks may return any number of rows, which then come in the order of the ranks. Such rows do
            not correspond to the caller's rows, so neither their order nor their padding is known.
    """

    def __init__(self, *, scalars: Collect[Any, Any] | None = None, any_rows: bool = False) -> None:
        self.scalars, self.any_rows = scalars, any_rows

    def collect(self, method: str, results: Sequence[Any], split: Split) -> Any:
        names = [f"the result of rank {rank}" for rank in self.ranks(split)]
        try:
            plan = None if self.any_rows else split.plan
            if plan is not None and (any(plan.padding) or not plan.contiguous):
                results = [
                    self._remove_padding(*part, plan, at) for at, part in enumerate(zip(names, results, strict=True))
                ]
            joined = concat_rows(results, names, partial(self._join_scalars, method, split))
            if plan is not None and plan.contiguous:
                _check_counts(names, results, plan)
        except DataError as error:
            raise ConfigError(f"{method}: {error}; gather() returns a list with the result of every rank") from error
        return joined if plan is None or plan.contiguous else take_rows(joined, plan.back())

    def _join_scalars(self, method: str, split: Split, values: Sequence[Any], names: Sequence[str]) -> Any:
        if self.scalars is not None:
            return self.scalars.collect(method, values, split)
        values = [value.fetch() if isinstance(value, Rows) else value for value in values]
        for value, name in zip(values, names, strict=True):
            if value != values[0] and not (value != value and values[0] != values[0]):  # NaN is not equal to itself
                raise DataError(
                    f"{names[0]} is {values[0]!r} and {name} is {value!r}; a single value must be the same on all "
                    "ranks, or concat(scalars=reduce('mean')) says how the values become one"
                )
        return values[0]

    def _remove_padding(self, name: str, result: Any, plan: RowPlan, at: int) -> Any:
        part = open_rows(result, name)
        sent, got = len(plan.rows[at]), count_rows(part)
        if got != sent:
            raise DataError(
                f"{name} has {write_count(got, 'row')} for the {write_count(sent, 'row')} that it got; with pad=True "
                "and with balance='tokens' an endpoint returns a row for every row"
            )
        return slice_rows(part, 0, plan.sizes[at]) if plan.padding[at] else part


def check_ranks(label: str, collect: Collect[Any, Any], split: Split) -> None:
    """Raise a ConfigError where a user's own collect names other ranks than are called: whoever hears the replies would
    fail on it, and the caller would wait."""
    if type(collect).__module__ == __name__:
        return
    ranks, called = cast(Any, collect.ranks(split)), {*split.ranks}
    if not isinstance(ranks, Sequence) or not called.issuperset(cast("Sequence[Any]", ranks)):
        what = f"{type(collect).__name__}.ranks() returned {ranks!r}; expected a list of some of {sorted(called)}"
        raise ConfigError(f"{label}: {what}, the ranks that are called")


def _check_counts(names: Sequence[str], results: Sequence[Any], plan: RowPlan) -> None:
    """Raises a DataError unless each part has come back with the same whole number of rows for every row."""
    if kind_of(results[0].__class__) == "dict":
        if is_scalar(results[0]):
            return
        results = [open_rows(result, name) for name, result in zip(names, results, strict=True)]
    counts, sizes = [count_rows(result) for result in results], plan.sizes
    if counts == sizes:
        return
    parts = [*zip(names, counts, sizes, strict=True)]
    other, first_got, first_sent = next((part for part in parts if part[2]), parts[0])
    rows_per_result = max(1, first_got // max(1, first_sent))
    for name, got, sent in parts:
        if got != rows_per_result * sent:
            beside = f", and {other} has {first_got} for its {first_sent}" if name != other else ""
            raise DataError(
                f"{name} has {write_count(got, 'row')} for the {write_count(sent, 'row')} that it got{beside}; an "
                "endpoint returns a row for every row, or the same number of rows for every row on all ranks"
            )


class reduce(Collect[Any, Any]):
    """Numbers, tensors, or dicts of them, reduced over the ranks.

    Args:
        how: "sum", "mean", "min" or "max".
        weight: For "mean" after ``shard``, weigh each part by its "rows" or "tokens" (tokens need
            ``balance="tokens"``). None gives every part the same weight. A part of weight 0 is left out.
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
        if all(kind_of(result.__class__) != "dict" for result in results):
            return self._reduce(method, results, weights)
        keys = [sorted(r, key=str) if kind_of(r.__class__) == "dict" else type(r).__name__ for r in results]
        if any(other != keys[0] for other in keys):
            raise ConfigError(f"{method}: ranks returned different entries: {keys}")
        return {
            key: self._reduce(f"{method}[{key!r}]", [result[key] for result in results], weights) for key in results[0]
        }

    def _weights(self, method: str, results: Sequence[Any], split: Split) -> list[float]:
        if self.weight is None:
            return [1.0] * len(results)
        if split.plan is None:
            raise ConfigError(f"{method}: reduce(weight={self.weight!r}) needs an endpoint that shards")
        if self.weight == "tokens" and not split.plan.tokens:
            raise ConfigError(f"{method}: reduce(weight='tokens') needs shard(balance='tokens')")
        return [float(size) for size in (split.plan.tokens if self.weight == "tokens" else split.plan.sizes)]

    def _reduce(self, method: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
        fetched = [value.fetch() if isinstance(value, Rows) else value for value in values]  # a sum needs the bytes
        pairs = [(value, weight) for value, weight in zip(fetched, weights, strict=True) if weight]
        if not pairs:
            return float("nan")
        values = [value for value, _ in pairs]
        _check_values(f"{method}: reduce({self.how!r})", values)
        try:
            if self.how == "mean":
                scaled = [_widen(value) * weight for value, weight in pairs]
                return _narrow(sum(scaled) / sum(weight for _, weight in pairs), values)
            if self.how == "sum":
                wide = [*map(_widen, values)]
                return _narrow(sum(wide[1:], start=wide[0]), values)
            return functools.reduce(partial(_extreme, largest=self.how == "max"), values)
        except TypeError as error:
            raise ConfigError(
                f"{method}: reduce({self.how!r}) cannot reduce {type(values[0]).__name__}: {error}"
            ) from None


def _check_values(what: str, values: Sequence[Any]) -> None:
    """Raise a ConfigError, which begins with ``what``, for values that Python would join, compare or broadcast."""
    for value in values:
        letters = getattr(getattr(value, "dtype", None), "kind", "")
        if isinstance(value, list | tuple | str | bytes) or letters in ("U", "S"):
            kind = f"{type(cast(Any, value)).__name__}{' of texts' if letters else ''}"
            raise ConfigError(f"{what} cannot reduce {kind}: return a number, a tensor, an array or a dict of them")
    shapes = [tuple(getattr(value, "shape", ())) for value in values]
    if len({*shapes}) > 1:
        raise ConfigError(
            f"{what}: the ranks returned values of different shapes, in the order of ranks {shapes}; gather() returns "
            "them as a list"
        )


_HALVES = ("float16", "bfloat16")


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def _widen(value: Any) -> Any:
    """``value`` in a type in which a sum does not overflow or round: int64 for whole numbers of fewer bits, as
    torch.sum takes it, and float32 for half floats."""
    name = _dtype_name(value)
    is_small = name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
    return _convert(value, "int64" if is_small else "float32") if is_small or name in _HALVES else value


def _narrow(total: Any, values: Sequence[Any]) -> Any:
    """A sum or mean of ``values`` in their own type, if they have one and it is of half floats."""
    names = {_dtype_name(value) for value in values}
    return _convert(total, names.pop()) if len(names) == 1 and names <= {*_HALVES} else total


def _convert(value: Any, dtype: str) -> Any:
    if kind_of(value.__class__) != "tensor":
        return value.astype(dtype)
    import torch

    return value.to(getattr(torch, dtype))


def _is_nan(value: Any) -> bool:
    return isinstance(value, Number) and value != value  # NaN is not equal to itself


def _extreme(a: Any, b: Any, *, largest: bool) -> Any:
    """The larger or smaller of two values; of tensors and arrays, in each element. NaN is the result wherever it is."""
    kind = kind_of(a.__class__)
    if kind == "tensor":
        return a.maximum(b) if largest else a.minimum(b)
    if kind == "array":
        import numpy as np

        return np.maximum(a, b) if largest else np.minimum(a, b)
    if _is_nan(a) or _is_nan(b):
        return a if _is_nan(a) else b
    return max(a, b) if largest else min(a, b)
