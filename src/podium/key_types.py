"""The types of keys: what a key takes, in words, and the sections among types."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic.fields import FieldInfo

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null", Any: "a value"}


def describe_expected(field: FieldInfo) -> str:
    """The values that a field takes, in words."""
    return " or ".join(_arm_expected(arm, _bounds(field.metadata)) for arm in arms_of(field.annotation))


def _arm_expected(arm: Any, bounds: str) -> str:
    origin, arguments = typing.get_origin(arm) or arm, typing.get_args(arm)
    if origin is typing.Annotated:  # a number with limits beside other values: Annotated[float, Field(gt=1)] | None
        limits = [limit for field in arguments[1:] for limit in field.metadata]
        return _arm_expected(arguments[0], _bounds(limits))
    if inner := section_of(arm):
        return f"a section with the keys {', '.join(fields_of(inner))}"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        count = "" if Ellipsis in arguments else f" of {len(arguments)}"
        return f"a list{count}{bounds}; each item is {describe_expected(FieldInfo.from_annotation(arguments[0]))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of names, each to {_arm_expected(entry, '')}" if (entry := entry_of(arm)) else "a mapping"
    return _WORDS.get(arm, str(arm)) + (bounds if arm in (int, float, str) else "")


def _bounds(limits: Sequence[Any]) -> str:
    """The limits of a number or of a text's length, in words."""
    words = {"gt": " above", "ge": " of at least", "lt": " below", "le": " of at most"}
    limits_by_name = {name: getattr(limit, name) for limit in limits for name in words if hasattr(limit, name)}
    limits_by_name = {
        name: f"{value:g}".replace("e+0", "e").replace("e+", "e") for name, value in limits_by_name.items()
    }
    if limits_by_name.keys() == {"ge", "le"}:
        return f" from {limits_by_name['ge']} to {limits_by_name['le']}"
    if any(hasattr(limit, "min_length") or hasattr(limit, "pattern") for limit in limits):
        return " that is not empty"
    return " and".join(f"{words[name]} {value}" for name, value in limits_by_name.items()).replace("and of", "and")


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """The fields of a section by the names of its keys."""
    return cast(Any, cls).__pydantic_fields__


def locate_key(cls: type, loc: Sequence[str | int]) -> tuple[list[str], FieldInfo]:
    """The names of the keys that lead to ``loc``, and the field of the last; indices in a value are left out."""
    names: list[str] = []
    field = FieldInfo.from_annotation(cls)
    for part in loc:
        inner, entry = section_of(field.annotation), entry_of(field.annotation)
        if entry is None and (inner is None or part not in fields_of(inner)):
            break
        names.append(str(part))
        field = fields_of(inner)[str(part)] if entry is None else FieldInfo.from_annotation(entry)
    return names, field


def arms_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def section_of(kind: Any) -> Any:
    """The section that ``kind`` is, or is besides None."""
    return next((arm for arm in arms_of(kind) if hasattr(arm, "__pydantic_fields__")), None)


def entry_of(kind: Any) -> Any:
    """The section that each entry of a mapping is, where ``kind`` is a mapping of sections."""
    arguments = typing.get_args(kind)
    is_mapping = typing.get_origin(kind) is Mapping
    return section_of(arguments[1]) if is_mapping and len(arguments) == 2 else None
