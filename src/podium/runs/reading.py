"""Opens the files of a run for reading. The directory may come from somebody else, and its files may still grow."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Final

from podium.errors import DataError

__all__ = ["GrowingFile", "RunFiles"]

_LINKS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
_READ_AT_ONCE: Final = 1 << 24
_SMALL_FILE: Final = 1 << 18  # config.yaml, places.json and summary.json have a few thousand bytes


class RunFiles:
    """Opens files below ``path`` for reading. Nothing below it leads elsewhere: links are refused, and so are pipes."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    def open(self, *parts: str) -> IO[bytes]:
        """Open the regular file at ``parts``, such as ``("completions", "step-000001.parquet")``.

        Raises:
            DataError: It is a link, is reached through a link, or is no regular file.
            FileNotFoundError: There is none.
        """
        descriptor = self._open(parts, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DataError(f"{'/'.join(parts)} is no regular file")
        return os.fdopen(descriptor, "rb")

    def read_small(self, name: str) -> bytes:
        """Read a file whole. Raises DataError as :meth:`open`, and for more than 256 KiB, and FileNotFoundError."""
        with closing(self.open(name)) as file:
            content = file.read(_SMALL_FILE + 1)
        if len(content) > _SMALL_FILE:
            raise DataError(f"{name} has more than {_SMALL_FILE:,} bytes")
        return content

    def names(self, *parts: str) -> list[str]:
        """Return the sorted names in the folder at ``parts``; none if there is no such folder. Raises DataError for a
        link."""
        try:
            descriptor = self._open(parts, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    def signature(self, *parts: str) -> tuple[int, int]:
        """Return the size in bytes and the time of the last change in ns, which show whether a file has changed. (0, 0)
        means that there is no file."""
        with suppress(OSError):
            status = os.lstat(self.path.joinpath(*parts))
            return status.st_size, status.st_mtime_ns
        return 0, 0

    def _open(self, parts: tuple[str, ...], flags: int) -> int:
        """Open one name after the other, so that no name on the way can be a link."""
        opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for depth, name in enumerate(parts, 1):
            folder = opened
            flags_here = flags if depth == len(parts) else os.O_RDONLY | os.O_DIRECTORY
            try:
                opened = os.open(name, flags_here | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno in _LINKS:
                    raise DataError(f"{'/'.join(parts[:depth])} is a link, or no folder: it is not followed") from None
                raise
            finally:
                os.close(folder)
        return opened


class GrowingFile:
    """Returns the complete lines that were added to a file since the last call."""

    def __init__(self, files: RunFiles, *parts: str) -> None:
        self._files = files
        self._parts = parts
        self._inode = -1
        self.offset = 0

    def read(self) -> tuple[bool, bytes]:
        """Return whether the file was replaced, as a resumed run does, and its next lines; b"" if there are none yet.

        A call returns about 16 MiB at most. Call it until there are no lines.
        """
        try:
            file = self._files.open(*self._parts)
        except FileNotFoundError:
            return self._again(-1), b""
        with closing(file):
            status = os.fstat(file.fileno())
            again = (
                self._again(status.st_ino) if status.st_ino != self._inode or status.st_size < self.offset else False
            )
            file.seek(self.offset)
            data = file.read(_READ_AT_ONCE)
            while data and b"\n" not in data and (more := file.read(_READ_AT_ONCE)):
                data += more
        lines = data[: data.rfind(b"\n") + 1]
        self.offset += len(lines)
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

    def _again(self, inode: int) -> bool:
        before, self._inode, self.offset = self._inode, inode, 0
        return before != -1
