"""Libraries that few tests need: a process that collects the tests does not import them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["LazyModule", "import_when_used"]


class LazyModule:
    """Stands for the module ``name``, which is imported when an attribute of it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def import_when_used(name: str) -> Any:
    """Return the module ``name``; skip all tests of the file that calls this where it is not installed.

    ``pytest.importorskip`` imports it in each process of the tests: the clients of two APIs take two seconds.
    """
    if find_spec(name) is None:
        pytest.skip(f"could not import {name!r}: no such module", allow_module_level=True)
    return LazyModule(name)
