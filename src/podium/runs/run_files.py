"""All access to the files of a run goes through this module. The directory may come from somebody else, and its files
may still grow.

Where the run's directory is, its owner chooses: links on the way to it are followed. Below it nothing is trusted. Each
name is opened in the folder before it, without following links, so that nothing leads elsewhere; a file is a regular
one, so that nobody waits for a pipe; and a file that is written in place has one name, so that no other file changes
with it. Files that are replaced are written aside and renamed, so that they stay whole when the run is killed.

Workers and libraries that open paths themselves (checkpoints, logs, profiles, trackers) get a path from
:meth:`RunFiles.make_folder`, :meth:`RunFiles.renew_folder` or :meth:`RunFiles.check`, which have looked at it just
before. Somebody who may write to the run's directory at that very moment can still replace a folder by a link.
"""

import copy
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Final

from podium.errors import ConfigError, DataError
from podium.runs.files import LOCK

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE: Final = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.ENXIO, errno.EISDIR)
_SMALL_FILE: Final = 1 << 18  # config.yaml, places.json and summary.json have a few thousand bytes
_LARGE_FILE: Final = 1 << 30
_MOST_HOLLOW: Final = 16  # times as many bytes as are on the disk
_ATTEMPTS: Final = 60_000  # a millisecond apart: is_locked() holds the lock for an instant


class RunFiles:
    """Opens, lists, replaces and deletes what is below the run's directory ``run``, in its ``folder`` if that is given.

    Names are those of files and folders below that one, such as ``"completions", "step-000001.parquet"``, or the same
    joined by slashes. Where a method names no other errors, it raises:

        DataError: The file is a link, is reached through a link, or is no regular file; or it is to be written in place
            and has a second name.
        OSError: The system refuses, such as FileNotFoundError.
    """

    def __init__(self, run: str | Path, *folder: str) -> None:
        self._given = Path(run)
        self.run = self._given.resolve()
        self._folder = folder

    @property
    def path(self) -> Path:
        """The path of the folder for messages, as the run's directory was given."""
        return self._given.joinpath(*self._folder)

    @property
    def absolute(self) -> Path:
        """The absolute path of the folder, for code that opens paths itself in what :meth:`check` has looked at."""
        return self.run.joinpath(*self._folder)

    def folder(self, *names: str) -> "RunFiles":
        """Return the files in a folder of this one, in the same directory, although a link to it or the working
        directory may have changed since."""
        folder = copy.copy(self)
        folder._folder = (*self._folder, *names)
        return folder

    # Reading

    def open(self, *names: str) -> IO[bytes]:
        """Open a file for reading."""
        return os.fdopen(self._open(names, os.O_RDONLY), "rb")

    def read(self, *names: str) -> bytes:
        """Return the content of a file."""
        with self.open(*names) as file:
            return file.read()

    def read_small(self, *names: str) -> bytes:
        """Return the content of a file. Raises DataError also for more than 256 KiB."""
        with self.open(*names) as file:
            content = file.read(_SMALL_FILE + 1)
        if len(content) > _SMALL_FILE:
            raise DataError(
                f"{self._name(names)} has more than {_SMALL_FILE:,} bytes, too many for this file of a run: remove it"
            )
        return content

    def names(self, *names: str) -> list[str]:
        """Return the sorted names in a folder; none if there is no such folder."""
        try:
            with self._parent((*names, ".")) as (folder, _):
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def kind(self, *names: str) -> int:
        """Return the kind of an entry, as stat.S_IFMT has it, of a link itself; 0 where there is none, or a link
        leads to it."""
        with suppress(OSError, DataError), self._parent(names) as (folder, name):
            return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        return 0

    def is_file(self, *names: str) -> bool:
        """Whether there is a regular file, which no link leads to."""
        return stat.S_ISREG(self.kind(*names))

    def is_folder(self, *names: str) -> bool:
        """Whether there is a folder, which no link leads to."""
        return stat.S_ISDIR(self.kind(*names))

    def walk(self, *names: str) -> Iterator[str]:
        """Yield the files below a folder, each with the names of its folders from there on. Raises DataError for any
        entry that is neither a regular file nor a folder."""
        for name in self.names(*names):
            kind = self.kind(*names, name)
            if stat.S_ISDIR(kind):
                yield from (f"{name}/{below}" for below in self.walk(*names, name))
            elif stat.S_ISREG(kind):
                yield name
            elif kind:
                raise _refuse(self._name((*names, name)))

    def check(self, *names: str, is_written: bool = False) -> Path:
        """Return the path of a folder for code that opens paths itself, and may write to its files if ``is_written``.
        Raises DataError if something in it is neither a folder nor a regular file that :meth:`open` opens, or has a
        second name although it may be written to."""
        for name in self.walk(*names):
            with suppress(FileNotFoundError), self._parent((*names, name)) as (folder, last):
                status = os.stat(last, dir_fd=folder, follow_symlinks=False)
                if is_written and status.st_nlink > 1:
                    raise _refuse(self._name((*names, name)), "has another name (hard link)")
                if _is_hollow(status):
                    self.open(*names, name).close()
        return self.absolute.joinpath(*names)

    def signature(self, *names: str) -> tuple[int, int]:
        """Return the size in bytes and the time of the last change in ns, which show whether a file has changed. (0, 0)
        means that there is no file."""
        with suppress(OSError, DataError), self._parent(names) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            return status.st_size, status.st_mtime_ns
        return 0, 0

    def read_link(self, *names: str) -> str | None:
        """Return the text of a link, which is never followed; None where there is no link."""
        with suppress(OSError), self._parent(names) as (folder, name):
            return os.readlink(name, dir_fd=folder)
        return None

    # Writing

    def append(self, *names: str) -> IO[bytes]:
        """Open a file for reading and for writing at its end, and make it if it is missing."""
        return os.fdopen(self._open(names, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+")

    def create(self, *names: str) -> IO[bytes]:
        """Open a file for writing that is not there yet. Raises FileExistsError if it is."""
        return os.fdopen(self._open(names, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    @contextmanager
    def replace(self, *names: str) -> Iterator[IO[bytes]]:
        """Yield a file that takes the place of the one of this name after the block. A reader finds the old content or
        the new one, even if the power fails meanwhile."""
        *folders, name = self._split(names)
        aside = RunFiles(self.run, *folders)
        aside.remove(temporary := f".{name}.tmp")
        try:
            with aside.create(temporary) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.rename(temporary, name)
        finally:
            with suppress(OSError):  # the error of the block counts
                aside.remove(temporary)
        aside.sync()

    def write(self, content: str | bytes, *names: str) -> None:
        """Replace a file as :meth:`replace` does."""
        try:
            with self.replace(*names) as file:
                file.write(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            error.filename = str(self.run.joinpath(*names))  # which a write does not know
            raise

    def make_folder(self, *names: str) -> Path:
        """Make a folder, and those before it, if it is missing. Returns its path."""
        self.run.mkdir(parents=True, exist_ok=True)
        with self._parent((*names, "."), make=True):
            return self.absolute.joinpath(*names)

    def renew_folder(self, *names: str) -> Path:
        """Make an empty folder in the place of what was there. Returns its path."""
        self.remove(*names)
        with self._parent(names) as (folder, name):
            os.mkdir(name, dir_fd=folder)
        return self.absolute.joinpath(*names)

    def remove(self, *names: str) -> None:
        """Remove a file, a link itself, or a folder with what is in it, if it is there."""
        is_folder = self.is_folder(*names)
        with suppress(FileNotFoundError), self._parent(names) as (folder, name):
            if is_folder:
                shutil.rmtree(name, dir_fd=folder)  # which follows no link
            else:
                os.unlink(name, dir_fd=folder)

    def remove_run(self) -> None:
        """Remove the run's directory, or the link to it if a link was given."""
        if self._given.is_symlink():
            self._given.unlink()
        else:
            shutil.rmtree(self.run)

    def rename(self, name: str, to: str) -> None:
        """Rename an entry to ``to``, which is replaced."""
        with self._parent((name,)) as (folder, last), self._parent((to,)) as (other, new):
            os.replace(last, new, src_dir_fd=folder, dst_dir_fd=other)

    def link(self, target: str, name: str) -> None:
        """Replace ``name`` by a link to ``target``, an entry beside it."""
        with self._parent((name,)) as (folder, last):
            self.remove(aside := f".{last}.tmp")
            os.symlink(target, aside, dir_fd=folder)
            os.replace(aside, last, src_dir_fd=folder, dst_dir_fd=folder)

    def sync(self, *names: str) -> None:
        """Return once the entries of a folder are on the disk."""
        with self._parent((*names, ".")) as (folder, _):
            os.fsync(folder)

    def sync_all(self, *names: str) -> None:
        """Return once every file and folder below a folder, and the folder itself, are on the disk."""
        folders = {""}
        for file in self.walk(*names):
            folders.update(str(parent) for parent in PurePosixPath(file).parents)
            with self.open(*names, file) as opened:
                os.fsync(opened.fileno())
        for folder in folders:
            self.sync(*names, folder)

    # The lock

    def lock(self) -> IO[bytes]:
        """Lock the directory for this process until the returned file is closed, or until the process ends.

        Raises:
            ConfigError: Another process holds the directory. The message names that process.
        """
        file = self.append(LOCK)
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
                holder = file.read(32).decode("ascii", "replace").strip() or "?"
            raise ConfigError(
                f"{self.path} is being written to by process {holder}: wait for it, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # the file system cannot lock
                file.close()
                raise
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        return file

    def is_locked(self) -> bool:
        """Whether a process has locked the directory by :meth:`lock`."""
        with suppress(OSError, DataError), self.open(LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return isinstance(error, BlockingIOError)  # else the file system cannot lock
        return False

    # The way to a file

    def _split(self, names: tuple[str, ...]) -> tuple[str, ...]:
        parts = (*self._folder, *(part for name in names for part in name.split("/") if part))
        if ".." in parts or any("\0" in part for part in parts):
            raise DataError(f"{'/'.join(names)} is no name of a file of a run")
        return parts

    @contextmanager
    def _parent(self, names: tuple[str, ...], *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder in which the last name is, and this name."""
        *folders, last = self._split(names)
        opened = os.open(self.run, _FOLDER)
        try:
            for depth, name in enumerate(folders, 1):
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=opened)
                try:
                    inner = os.open(name, _FOLDER, dir_fd=opened)
                except OSError as error:
                    error.filename = str(self.run.joinpath(*folders[:depth]))
                    if error.errno in _NO_FILE:
                        raise _refuse(error.filename, "no folder") from None
                    raise
                os.close(opened)
                opened = inner
            yield opened, last
        finally:
            os.close(opened)

    def _open(self, names: tuple[str, ...], flags: int) -> int:
        with self._parent(names) as (folder, name):
            try:
                descriptor = os.open(name, flags | _FILE, 0o666, dir_fd=folder)
            except OSError as error:
                error.filename = self._name(names)
                if error.errno in _NO_FILE:
                    raise _refuse(error.filename) from None
                raise
        status = os.fstat(descriptor)
        is_file, is_written = stat.S_ISREG(status.st_mode), flags & os.O_ACCMODE != os.O_RDONLY
        what = ""
        if not is_file or (is_written and status.st_nlink > 1):
            what = "has another name (hard link)" if is_file else "no regular file"
        elif _is_hollow(status) and _has_hole(descriptor):
            what = f"has {status.st_size:,} bytes, of which nearly all are holes"
        if what:
            os.close(descriptor)
            raise _refuse(self._name(names), what)
        return descriptor

    def _name(self, names: tuple[str, ...]) -> str:
        return str(self.path.joinpath(*names))


def _is_hollow(status: os.stat_result) -> bool:
    """Whether a file is large and has hardly a block on the disk, as one of holes, which fits into a small archive."""
    return status.st_size > max(_LARGE_FILE, status.st_blocks * 512 * _MOST_HOLLOW)


def _has_hole(descriptor: int) -> bool:
    """Whether a file has a hole. A file system that compresses files, or does not count their blocks, has others."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    is_hollow = os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    os.lseek(descriptor, 0, os.SEEK_SET)
    return is_hollow


def _refuse(path: str, what: str = "no regular file") -> DataError:
    return DataError(
        f"{path} is a link, or {what}: in a run's directory Podium follows no links and reads no pipes; put the file "
        "or folder itself there, or remove it"
    )


def count_configs(files: RunFiles) -> int:
    """Return how many configurations the run in ``files`` had before its present one: config.1.yaml is the first."""
    return sum(re.fullmatch(r"config\.\d+\.yaml", name) is not None for name in files.names())
