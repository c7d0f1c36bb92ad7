"""Annotations may name what is not defined: they are read and not evaluated."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from podium.annotations import list_annotated_names, signature_of

SOURCE = """
class Base:
    first: int

class Derived(Base):
    second: Later[int]
    third: "Text"

def function(one: Later, two: int = 2) -> Never: ...
"""


def defined() -> dict[str, Any]:
    """The names of SOURCE, whose annotations Python evaluates at once before 3.14 unless they are texts."""
    names: dict[str, Any] = {}
    exec(SOURCE if sys.version_info >= (3, 14) else f"from __future__ import annotations\n{SOURCE}", names)
    return names


def test_names_and_signatures_are_read_although_an_annotation_is_not_defined() -> None:
    names = defined()
    assert list(list_annotated_names(names["Derived"])) == ["second", "third"]
    assert list(list_annotated_names(names["Base"])) == ["first"]
    assert list(list_annotated_names(dict)) == []
    signature = signature_of(names["function"])
    assert list(signature.parameters) == ["one", "two"]
    signature.bind(1)
    with pytest.raises(TypeError):
        signature.bind()
