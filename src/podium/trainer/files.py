"""Files that stay whole: a reader finds the old content or the new, at whatever moment the writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Final

from podium.errors import ConfigError

__all__ = [
    "DirectoryLock",
    "free_name",
    "remove",
    "step_name",
    "step_of",
    "sync_folder",
    "sync_tree",
    "write_atomically",
]

_STEP: Final = re.compile(r"step-(\d+)")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path``: a reader finds the old content or the new, also after a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Return once every file and folder below ``folder`` is on the disk."""
    for below, _, files in os.walk(folder):
        for name in files:
            with (Path(below) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(below))


def sync_folder(path: Path) -> None:
    """Return once the entries of the folder at ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def free_name(folder: Path, stem: str, joint: str, suffix: str, first: int = 0) -> Path:
    """Return the first of stem.suffix, stem-1.suffix, stem-2.suffix, … that is not taken."""
    number = first
    while (path := folder / (f"{stem}{joint}{number}{suffix}" if number else f"{stem}{suffix}")).exists():
        number += 1
    return path


def step_name(step: int) -> str:
    """Return the name under which files of ``step`` are written."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step whose ``step_name`` is ``name``; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class DirectoryLock:
    """Holds the directory at ``path`` for this process until ``release()``, or until the process ends.

    Raises:
        ConfigError: Another process holds it. The message names that process.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # The kernel releases the lock when the process ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{path} is being written to by process {holder or '?'}: wait for it, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # the file system cannot lock
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let another process hold the directory. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
