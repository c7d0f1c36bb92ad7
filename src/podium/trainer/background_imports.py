"""Imports what a run needs later in a thread, while the controller waits for its workers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

LATER: Final = ("pyarrow.parquet", "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg", "plotext")
"""Modules that write completions (pyarrow imports pandas with its first array) and draw curves."""


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Import ``modules`` one after another in a thread. The end of the block waits for the current import and skips the
    rest. A module that cannot be imported is skipped too; the code that needs it raises the error."""
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
