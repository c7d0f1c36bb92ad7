"""Plain values: those of a configuration that a file of a run can hold."""

import datetime
import types
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any, Final, cast

from podium.spelling import is_text

_PLAIN = (str, int, float, types.NoneType, list, Mapping, datetime.date)
_MOST_BITS = 64
_DEEPEST, _LARGEST = 50, 100_000
TOO_MUCH: Final = f"its values are nested more than {_DEEPEST} deep, or more than {_LARGEST} on one level"


def check_plain(value: object) -> None:
    """Raise ValueError for values that no file of a run can hold, and for those that references repeat without end."""
    level = [value]
    for _ in range(_DEEPEST):
        for node in level:
            if isinstance(node, str) and ("\0" in node or not is_text(node)):
                raise ValueError(
                    f"{node[:60]!r} contains a character that is not text: NUL, or half of a surrogate pair"
                )
            if isinstance(node, int) and node.bit_length() > _MOST_BITS:
                raise ValueError(f"a whole number has {node.bit_length()} bits, and {_MOST_BITS} are the most")
            if not isinstance(node, _PLAIN):
                raise ValueError(f"a value is of type {type(node).__name__}: write it as text, in quotes, or as a list")
        items = (cast("Mapping[Any, Any]", node).items() if isinstance(node, Mapping) else () for node in level)
        lists = (cast("list[Any]", node) if isinstance(node, list) else () for node in level)
        level = list(islice(chain(chain.from_iterable(chain.from_iterable(items)), *lists), _LARGEST + 1))
        if not level:
            return
        if len(level) > _LARGEST:
            break
    raise ValueError(TOO_MUCH)
