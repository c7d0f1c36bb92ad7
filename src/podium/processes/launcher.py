"""Start a process in an interpreter of its own, talk to it through a channel, and end it with all that it started."""

import errno
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from weakref import WeakSet

from podium.errors import ConfigError, DataError
from podium.processes.channel import Channel
from podium.processes.secret_handover import TAKE, hide_secrets
from podium.processes.table import kill_marked
from podium.spelling import is_text

_MARK: Final = "PODIUM_LAUNCHED"
_STREAMS: Final = ("stdin", "stdout", "stderr")  # in the order of their descriptors
_LAST_END_S: Final = 0.5  # for processes to end by themselves when this one cannot wait


def open_log(path: str | Path, mode: int = 0o666) -> int:
    """Open the log of a process for writing at its end. The directory may come from somebody else.

    Raises:
        DataError: A link or another name leads there, so that another file would grow; or it is no regular file.
        OSError: The system refuses.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, mode)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise
    raise DataError(f"{path} is a link, or no regular file with one name: remove it, so that the log is a new file")


def open_standard_streams() -> None:
    """Open the null device in the place of each standard stream that is closed, as in a script that was started with
    ``>&-``. Without it, the next socket would get the stream's descriptor, and the processes below no stream."""
    for number in range(len(_STREAMS)):
        try:
            os.fstat(number)
        except OSError:  # nobody has opened another file in its place
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    for name in _STREAMS:
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end


def _inherited(number: int) -> int | None:
    """What a process below gets as this stream, for :class:`subprocess.Popen`: the stream itself, or the null device
    where the descriptor is that of another file, which was opened after the stream had been closed."""
    if os.get_inheritable(number):
        return None
    try:
        return number if getattr(sys, _STREAMS[number]).fileno() == number else subprocess.DEVNULL
    except (AttributeError, OSError, ValueError):  # no file
        return subprocess.DEVNULL


class Launched:
    """A process whose standard input is a channel. It ends when the channel is closed, and so when this process ends.

    The process is in a session of its own, where the terminal's Ctrl-C does not reach it.

    Args:
        line: The command.
        env: Its environment; by default that of this process.
        log_path: The file to which its output is appended. By default it goes where this process's goes.

    Attributes:
        channel: This end of the channel. Whoever reads from it closes it.
        process: The process.
    """

    def __init__(
        self, line: Sequence[str], *, env: Mapping[str, str] | None = None, log_path: Path | None = None
    ) -> None:
        open_standard_streams()
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
        mark = secrets.token_hex(8)
        self._mark = f"{_MARK}={mark}"
        near, far = socket.socketpair()
        self.channel = Channel(near)
        try:
            variables, pipe = {**(os.environ if env is None else env), _MARK: mark}, None
            if any(TAKE in word for word in line):
                variables, pipe = hide_secrets(variables)
            with (
                far,
                os.fdopen(open_log(log_path), "ab") if log_path else nullcontext() as log,
                os.fdopen(pipe) if pipe else nullcontext(),
            ):
                self.process = subprocess.Popen(
                    line,
                    stdin=far.fileno(),
                    stdout=log or _inherited(1),
                    stderr=log or _inherited(2),
                    env=variables,
                    start_new_session=True,
                    pass_fds=() if pipe is None else (pipe,),
                )
        except BaseException:
            near.close()
            raise
        _LAUNCHED.add(self)

    def alive(self) -> bool:
        """Return whether the process runs, as far as its channel and the kernel tell."""
        return self.channel.fileno() >= 0 and self.process.poll() is None

    def resume(self) -> None:
        """Let the process go on if a signal has stopped it. A user's code may stop it, which runs as the same user."""
        self.process.send_signal(signal.SIGCONT)

    def end(self, limit_s: float = 5.0) -> None:
        """End the process, and wait for that. After ``limit_s`` it is killed."""
        with suppress(OSError):
            self.channel.connection.shutdown(socket.SHUT_RDWR)  # which the process takes as its end
        self.reap(limit_s)

    def reap(self, limit_s: float = 5.0) -> None:
        """Wait for the end of a process whose channel has closed, and kill what it could not end itself."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.returncode != 0:  # it did not get to end what is below it
            self.kill_descendants()

    def kill_descendants(self) -> None:
        """Kill the processes that the process has started, in any session, and has not ended itself. On Linux only."""
        kill_marked(self._mark)


_LAUNCHED: Final = WeakSet[Launched]()
_DIRECTORIES: Final = WeakSet[tempfile.TemporaryDirectory[str]]()


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory that is removed when it is collected, at the end of this process, or by :func:`end_launched`."""
    directory = tempfile.TemporaryDirectory(prefix="podium-", dir=_temporary_root())
    _DIRECTORIES.add(directory)
    return directory


def make_private_directory() -> Path:
    """Make a directory of mode 0700 that nobody removes, for what worker processes meet at. Raises ConfigError if there
    is no place for it."""
    return Path(tempfile.mkdtemp(prefix="podium-", dir=_temporary_root()))


def _temporary_root() -> str:
    """The directory for temporary files, whose name a URL can hold as it is: torch.distributed reads the rest of
    ``file:///tmp/a#1/podium-x`` as no part of the path, so that two runs would meet at one file."""
    try:
        root = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}: set TMPDIR to a directory that this user may write to") from None
    if not is_text(root) or urlsplit(f"file://{root}").path != root:
        raise ConfigError(
            f"the directory for temporary files is {root!r}, and torch.distributed cannot read its name in an address: "
            "set TMPDIR to one without '#', '?', tabs, line breaks and bytes that are not UTF-8"
        )
    return root


def end_launched() -> None:
    """End all that this process has launched and remove its temporary directories. Any thread may call this when the
    process is about to end without unwinding its stack."""
    running = [launched for launched in _LAUNCHED if launched.process.returncode is None]
    for launched in running:
        with suppress(OSError):
            launched.channel.connection.shutdown(socket.SHUT_RDWR)
    for launched in running:
        launched.reap(_LAST_END_S)
    for directory in list(_DIRECTORIES):
        directory.cleanup()


def command(module: str, *args: Any) -> list[str]:
    """The command of a fresh interpreter that calls ``main(*args)`` of ``module``, with this process's ``sys.path``.
    ``args`` must have a ``repr`` that Python reads."""
    code = f"import sys; sys.path[:] = {import_path()!r}; {TAKE}from {module} import main; main(*{args!r})"
    return [sys.executable, "-c", code]


def import_path() -> list[str]:
    """``sys.path`` without what is no text, where Python does not look either."""
    texts = [path for path in sys.path if isinstance(path, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    return [path or working_directory() for path in texts]


def working_directory() -> str:
    """The working directory. Raises ConfigError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory of this process was removed: go to another one (os.chdir)") from None
