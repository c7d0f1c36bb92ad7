"""A file of a run that may still be written."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from podium.runs.run_files import RunFiles

__all__ = ["GrowingFile"]

_READ_AT_ONCE: Final = 1 << 24


class GrowingFile:
    """Returns the complete lines that were added to a file since the last call."""

    def __init__(self, files: RunFiles, *parts: str) -> None:
        self._files = files
        self._parts = parts
        self._inode = -1
        self.offset = 0
        self.has_rest = False  # whether there is a line that is not complete yet

    def read(self) -> tuple[bool, bytes]:
        """Return whether the file was replaced, as a resumed run does, and its next lines; b"" if there are none yet.

        A call returns about 16 MiB at most. Call it until there are no lines.
        """
        try:
            file = self._files.open(*self._parts)
        except FileNotFoundError:
            return self._start_over(-1), b""
        with closing(file):
            status = os.fstat(file.fileno())
            again = (
                self._start_over(status.st_ino)
                if status.st_ino != self._inode or status.st_size < self.offset
                else False
            )
            file.seek(self.offset)
            data = file.read(_READ_AT_ONCE)
            while data and b"\n" not in data and (more := file.read(_READ_AT_ONCE)):
                data += more
        lines = data[: data.rfind(b"\n") + 1]
        self.offset += len(lines)
        self.has_rest = len(lines) < len(data)
        return again, lines

    def chunks(self, forget: Callable[[], None]) -> Iterator[bytes]:
        """Yield the next lines until there are none yet. ``forget`` is called if the file was replaced."""
        while True:
            again, lines = self.read()
            if again:
                forget()
            if not lines:
                return
            yield lines

    def _start_over(self, inode: int) -> bool:
        before, self._inode, self.offset, self.has_rest = self._inode, inode, 0, False
        return before != -1
