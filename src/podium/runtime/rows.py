"""Row operations on everything that can be sharded: Batch, Jagged, tensor, reference, list, and dicts of them.

torch is imported only when it is already loaded: a value of another module cannot be a tensor before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from podium.errors import ConfigError, DataError

__all__ = ["concat_rows", "count_rows", "slice_rows", "take_rows", "token_lengths"]


def count_rows(value: object, where: str) -> int:
    """Number of rows of ``value``; ``where`` names the argument in the error.

    Raises:
        ConfigError: ``value`` has no rows, or a dict's entries have unequal numbers of them.
    """
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        counts = {key: count_rows(entry, f"{where}[{key!r}]") for key, entry in entries.items()}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"{where} cannot be sharded: its entries have {counts or 'no'} rows")
        return next(iter(counts.values()))
    if isinstance(value, list) or _has_rows(value):
        return len(cast(Sequence[Any], value))
    raise ConfigError(
        f"{where} cannot be sharded: it is {type(value).__name__}, and only a Batch, Jagged, tensor, list or a dict of "
        "them has rows; name the arguments to split with shard(args=(...,)), and the others are broadcast"
    )


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Rows ``start:stop``; tensors are views, and of a reference no byte is touched."""
    if isinstance(value, Mapping):
        return {key: slice_rows(entry, start, stop) for key, entry in cast(Mapping[Any, Any], value).items()}
    return value.slice(start, stop) if hasattr(value, "slice") else value[start:stop]


def take_rows(value: Any, index: Sequence[int]) -> Any:
    """Rows in the order of ``index``."""
    if isinstance(value, Mapping):
        return {key: take_rows(entry, index) for key, entry in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list):
        return [value[row] for row in index]
    if _is_table(value):
        return value.take(index)
    return value[list(index)]


def concat_rows(parts: Sequence[Any], where: str) -> Any:
    """Join ``parts`` row-wise; ``where`` names the endpoint in the error.

    Raises:
        ConfigError: parts without rows, or of different kinds.
    """
    first = parts[0]
    if all(map(_is_values, parts)):
        return _concat_with(_data().concat_values, parts, where)
    if any(type(part) is not type(first) for part in parts):
        raise ConfigError(f"{where}: ranks returned different kinds: {[type(part).__name__ for part in parts]}")
    if isinstance(first, Mapping):
        try:
            return {
                key: concat_rows([part[key] for part in parts], f"{where}[{key!r}]")
                for key in cast(Mapping[Any, Any], first)
            }
        except KeyError as error:
            raise ConfigError(f"{where}: not every rank returned the entry {error}") from None
    if isinstance(first, list):
        return [row for part in parts for row in part]
    if _is_table(first):
        return first if len(parts) == 1 else _concat_with(cast(Any, type(first)).concat, parts, where)
    raise ConfigError(f"{where} returned {type(first).__name__}, which has no rows for concat() to join; use gather()")


def token_lengths(value: Any, where: str) -> list[int]:
    """Tokens of each row: lengths of the column ``tokens``, or of the only kind of jagged rows there is.

    Raises:
        ConfigError: nothing jagged to count.
    """
    if hasattr(value, "lengths"):
        return value.lengths.tolist()
    columns = cast("Mapping[str, Any]", value if isinstance(value, Mapping) or _is_table(value) else {})
    names = [name for name in columns if hasattr(columns[name], "lengths")]
    if not names:
        raise ConfigError(f"{where}: balance='tokens' needs a jagged column to count tokens of; use balance='rows'")
    return columns["tokens" if "tokens" in names else names[0]].lengths.tolist()


def _concat_with(join: Callable[[Sequence[Any]], Any], parts: Sequence[Any], where: str) -> Any:
    try:
        return join(parts)
    except DataError as error:
        raise ConfigError(f"{where}: {error}") from error


def _is_values(value: Any) -> bool:
    """Whether it is a tensor with rows, here or elsewhere."""
    torch = sys.modules.get("torch")
    if torch is None or (not isinstance(value, torch.Tensor) and not hasattr(value, "places")):
        return False
    return isinstance(value, torch.Tensor | _data().TensorRef) and value.dim() > 0


def _is_table(value: object) -> bool:
    return "podium.data" in sys.modules and isinstance(value, _data().Batch | _data().Jagged)


def _has_rows(value: Any) -> bool:
    return _is_table(value) or _is_values(value)


def _data() -> Any:
    """The module with Batch and its kin, which loads torch."""
    import podium.data

    return podium.data
