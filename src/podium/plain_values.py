"""Plain values: those of a configuration that a file of a run can hold, and why a JSON text holds none."""

import contextlib
import datetime
import json
import sys
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


class _LongNumber(str):
    """The digits of a whole number that Python does not read."""


def explain_json(error: ValueError | RecursionError, text: str | bytes) -> str:
    """Return why ``json.loads`` could not read ``text``; of a number with too many digits, the field that holds it.

    >>> explain_json(RecursionError(), "[[[")
    'it is nested too deeply'
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if type(error) is not ValueError or not (most := sys.get_int_max_str_digits()):
        return str(error)
    fields = list[tuple[str, str]]()

    def note_fields(pairs: list[tuple[str, object]]) -> None:
        fields.extend((name, digits) for name, value in pairs for digits in _list_long_numbers(value))

    def read_digits(digits: str) -> object:
        return _LongNumber(digits) if len(digits.lstrip("-")) > most else 0

    with contextlib.suppress(ValueError, RecursionError):  # of another fault behind the number
        document = json.loads(text, parse_int=read_digits, object_pairs_hook=note_fields)
        fields += [("", digits) for digits in _list_long_numbers(document)]
    if not fields:
        return str(error)
    name, digits = fields[0]
    return (
        f"{repr(name) if name else 'it'} holds a whole number of {len(digits.lstrip('-')):,} digits, and at most "
        f"{most:,} can be read: write it as a text, in quotes, or shorten it"
    )


def _list_long_numbers(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    nested = [digits for item in items if isinstance(item, list) for digits in _list_long_numbers(item)]
    return [item for item in items if isinstance(item, _LongNumber)] + nested
