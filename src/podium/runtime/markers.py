"""Arguments that stand for other values: one value a rank, or the result of another call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from podium.runtime.calls import Call

__all__ = ["CallArgument", "PerRank", "per_rank"]

T = TypeVar("T")


class PerRank:
    """An explicit value for each rank, in rank order."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)

    def __reduce__(self) -> NoReturn:
        raise TypeError("per_rank([...]) is an argument itself, not a part of one")


class CallArgument:
    """The result of a call that may not be done yet."""

    __slots__ = ("call",)

    def __init__(self, call: Call[Any]) -> None:
        self.call = call

    def __reduce__(self) -> NoReturn:
        raise TypeError("call.arg() is an argument itself, not a part of one: pass it on its own, or call.result()")


def per_rank(values: Sequence[T]) -> T:
    """One value for each rank, for an endpoint with ``dispatch=scatter()``. Typed as the value that a rank receives."""
    return cast(T, PerRank(values))
