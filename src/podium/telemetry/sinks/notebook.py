"""One output of a notebook's cell for all that a run prints, in place of an output for each line."""

from __future__ import annotations

import io
import threading
from collections import deque
from typing import Any, Final

from rich.console import Console, RenderableType

_WIDTH: Final = 100
_LINES: Final = 500  # each update sends the whole text to the browser


def notebook_console() -> Console | None:
    """Return a console that prints into a new output of the cell that runs; None if this is no notebook."""
    if not Console().is_jupyter:
        return None
    return Console(
        file=CellOutput(), force_terminal=False, force_jupyter=False, color_system="256", width=_WIDTH, highlight=False
    )


class CellOutput(io.StringIO):
    """A file whose last lines are one output of a cell. The output is updated whenever the file is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._written = 0
        self._rest, self._below, self._shown = "", "", ""
        self._handle: Any = None
        self._lock = threading.RLock()

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._lines.extend(lines)
            self._written += len(lines)
        return len(text)

    def flush(self) -> None:
        """Show the text in the cell."""
        with self._lock:
            self._update()

    def show_below(self, renderable: RenderableType | None, console: Console) -> None:
        """Show ``renderable``, such as a progress bar, below the text from now on; None shows nothing there."""
        with console.capture() as captured:
            if renderable is not None:
                console.print(renderable)
        with self._lock:
            self._below = captured.get()
            self._update()

    def _update(self) -> None:
        from IPython.display import display

        left_out = self._written - len(self._lines)
        first = [f"({left_out:,} earlier lines are in logs/controller.log)"] if left_out else []
        text = "\n".join([*first, *self._lines, self._rest + self._below]).rstrip("\n")
        if text == self._shown:
            return
        self._shown, data = text, {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
