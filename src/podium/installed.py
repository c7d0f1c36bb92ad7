"""Which libraries are installed, and what packages register under a name: their entry points, read once."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any


def has_library(name: str) -> bool:
    """Return whether a library can be imported.

    A folder without ``__init__.py`` does not count, such as the one that wandb writes into the working directory or a
    clone of a library: Python would import it as an empty package.
    """
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def list_entry_points(group: str, **wanted: str) -> EntryPoints:
    """Return the entry points of a group, of those of ``wanted`` (such as ``name="gsm8k"``) where it is given.

    A run looks them up a dozen times, and each time the metadata of all packages would be read, which takes 10 ms in an
    environment of 200 packages. They are read again when the path on which Python looks has changed or a package was
    installed or removed since.
    """
    entries: Any = _select_group(tuple((path, _changed_at(path)) for path in sys.path), group)
    return entries.select(**wanted)


@lru_cache(maxsize=64)
def _select_group(places: tuple[tuple[str, int | None], ...], group: str) -> EntryPoints:
    """Return the entry points of one group: a selection compares each entry of all packages, half a millisecond."""
    return _read_entry_points(places).select(group=group)


@lru_cache(maxsize=8)
def _read_entry_points(places: tuple[tuple[str, int | None], ...]) -> Any:
    """Read all entry points; ``places`` are the folders of ``sys.path`` and when each last changed.

    Until Python 3.12 what is returned is no ``EntryPoints`` but selects as one does.
    """
    return entry_points()


def _changed_at(path: str) -> int | None:
    """When something was last added to a folder or removed, in nanoseconds; None where there is none."""
    try:
        return os.stat(path or os.curdir).st_mtime_ns
    except OSError:
        return None
