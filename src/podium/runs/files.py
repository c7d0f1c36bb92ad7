"""Names of files and directories, the lock of a directory, and writes after which a file has its old or its new
content, but no mixture."""

import errno
import fcntl
import itertools
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from podium.errors import ConfigError

__all__ = ["STATE_FILE", "free_name", "lock_directory", "remove", "step_name", "step_of", "sync_folder", "sync_tree"]
__all__ += ["LOCK", "SET", "is_locked", "write_atomically"]

STATE_FILE: Final = "trainer.json"
"""The file in a checkpoint that holds the state of the controller."""

LOCK: Final = ".lock"

SET: Final = "set="
"""What precedes the name of an evaluation set in the name of the directory of its completions."""

_ATTEMPTS: Final = 60_000  # a millisecond apart: is_locked() holds the lock for an instant
_STEP: Final = re.compile(r"step-(\d+)")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path``. A reader finds the old content or the new one, even if the power fails
    meanwhile."""
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


def free_name(path: Path, joint: str = "-") -> Path:
    """Return ``path`` if it is not taken, else the first of NAME-1.EXT, NAME-2.EXT, … that is free."""
    numbered = (path.with_name(f"{path.stem}{joint}{number}{path.suffix}") for number in itertools.count(1))
    return next(candidate for candidate in itertools.chain([path], numbered) if not os.path.exists(candidate))


def step_name(step: int) -> str:
    """Return the name under which files of ``step`` are written."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step whose ``step_name`` is ``name``; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_locked(file: IO[bytes]) -> bool:
    """Whether a process has locked the directory whose ``.lock`` is ``file``, by :func:`lock_directory`."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else the file system cannot lock
    return False


def lock_directory(path: Path) -> IO[str]:
    """Lock the directory at ``path`` for this process until the returned file is closed, or until the process ends.

    Raises:
        ConfigError: Another process holds the directory. The message names that process.
    """
    file = (path / LOCK).open("a+", encoding="utf-8")
    try:
        for _ in range(_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it however the process ends
                break
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails beside another writer, not beside is_locked()
            time.sleep(0.001)
        else:
            raise BlockingIOError
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read(32).strip() or "?"
        raise ConfigError(
            f"{path} is being written to by process {holder}: wait for it, or choose another directory"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # the file system cannot lock
            file.close()
            raise
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
