"""Imports that a run needs later, made in a thread while the controller waits for its workers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["LATER", "importing"]

LATER: Final = ("pyarrow.parquet", "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg", "plotext")
"""What completions are written with (pyarrow imports pandas with its first array), and what curves are drawn with."""


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Import ``modules`` in a thread of its own, one after another. The end of the block waits for the one at work, and
    leaves out the rest. A module that cannot be imported is left to whoever needs it."""
    ended = threading.Event()

    def run() -> None:
        for name in modules:
            if ended.is_set():
                return
            with suppress(Exception):
                importlib.import_module(name)

    thread = threading.Thread(target=run, name="podium-imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
