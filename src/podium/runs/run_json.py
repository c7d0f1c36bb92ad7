"""The one reader of the JSON of a run: a value of another type, or out of its range, is an error with its place.

A run may come from somebody else, and a disk or a person may have damaged it. No number is taken from a text or a truth
value, texts are UTF-8, nesting is bounded, and integers have at most 53 bits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import pydantic
from pydantic import BeforeValidator, Field, TypeAdapter

from podium.errors import DataError
from podium.telemetry.formatting import visible

T = TypeVar("T")

_MOST: Final = 1 << 53
_SHOWN: Final = 60


def _refuse_overflow(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError("expected a number below 2**53")
    return value


Count = Annotated[int, Field(ge=0, lt=_MOST)]
"""A whole number from 0 on."""
Number = Annotated[float, Field(allow_inf_nan=False)]
"""A finite number."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number from 0 on."""
Figure = Annotated[float, BeforeValidator(_refuse_overflow)]
"""A number that was computed, which may be infinite or no number."""


def read_json(kind: type[T], content: bytes, file: Path, line: int | None = None) -> T:
    """Return the value of type ``kind`` that ``content`` holds.

    Args:
        kind: A dataclass, which has all its fields and no others, a TypedDict, or another annotation that pydantic
            knows.
        content: JSON as bytes.
        file: Where it was read. The error names this file, and ``line`` if that is given.

    Raises:
        DataError: It is no such value. The message names the field.
    """
    where = f"{file}, line {line}" if line else str(file)
    try:
        value = _adapter(kind).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        raise DataError(f"{where}: {_explain(error)}; {_REMEDY}") from None
    of_classes = any(map(is_dataclass, [value, *(value.values() if isinstance(value, dict) else ())]))
    if of_classes and (fault := next(_compare_names(value, json.loads(content)), "")):
        raise DataError(f"{where}: {fault}; {_REMEDY}")
    return cast("T", value)


def read_lines(kind: type[T], lines: bytes, file: Path, first: int = 1) -> Iterator[T | DataError]:
    """Yield the value in each line, or the error of that line. ``first`` is the number of the first line."""
    for number, line in enumerate(lines.splitlines(), first):
        try:
            yield read_json(kind, line, file, number)
        except DataError as error:
            yield error


def write_json(value: Any, **options: Any) -> bytes:
    """Return JSON that :func:`read_json` reads. Half of a surrogate pair, which a tokenizer's bytes can decode to,
    becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, **options).encode("utf-8", "replace")


_REMEDY: Final = (
    "the file was damaged or changed, or another version of Podium wrote it: put the run's own file back, or use that "
    "version"
)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _compare_names(value: Any, plain: Any, path: str = "") -> Iterator[str]:
    """Yield the fields of dataclasses that are missing, which had defaults, and those that no class knows."""
    if isinstance(value, Mapping):
        entries = [(name, value[name]) for name in value]
    elif is_dataclass(value):
        names = {field.name for field in fields(value)}
        yield from (f"{path}{name} is missing" for name in sorted(names - plain.keys()))
        yield from (f"{path}{name} is no field" for name in sorted(plain.keys() - names))
        entries = [(name, getattr(value, name)) for name in names & plain.keys()]
    else:
        entries = [*enumerate(value)] if isinstance(value, list | tuple) and value and is_dataclass(value[0]) else []
    for name, entry in entries:
        yield from _compare_names(entry, plain[name], f"{path}{name}.")


def _explain(error: pydantic.ValidationError) -> str:
    """Say what is wrong with the first field that is."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(map(_shorten, _names(problem["loc"])))
    if problem["type"] == "json_invalid":
        return f"this is not JSON in UTF-8 ({problem['msg'].removeprefix('Invalid JSON: ')})"
    if problem["type"] == "missing":
        return f"{field} is missing"
    if problem["type"] == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
    else:
        text = problem["msg"].replace("Input should be", "expected").replace("valid ", "")
    return f"{field or 'the content'} = {_shorten(problem['input'])}: {text}"


def _names(location: Iterable[int | str]) -> Iterator[int | str]:
    """The names and numbers that lead to a value, without those of the alternatives that pydantic tried."""
    return (
        name for name in location if isinstance(name, int) or not name.startswith(("function-", "nullable", "list["))
    )


def _shorten(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # of integers that are too long to be written
        text = f"a {type(value).__name__}"
    return visible(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
