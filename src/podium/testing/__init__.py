"""The public contract suite: a backend's author imports it and names the backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.testing.contract import BackendContract
    from podium.testing.target import Target, need

__all__ = ["BackendContract", "Target", "need"]

_HOME_OF = {"BackendContract": "contract", "Target": "target", "need": "target"}


def __getattr__(name: str) -> Any:
    """Imported on first use: the processes of the suite's workers need neither the tests nor what these import."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
