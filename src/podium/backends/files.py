"""The files of a backend: its private directory, and the logs of its worker processes."""

import contextlib
import itertools
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from podium.processes import make_private_directory

LAST_LINES = 20
CRASH, LINES_BEFORE_CRASH = "Fatal Python error", 5
TAIL_BYTES = 16 << 10
POLL_S = 0.1


class Log(NamedTuple):
    """The log file of a worker process, whose own output begins at byte ``start``."""

    path: Path
    start: int = 0

    def last_lines(self) -> tuple[str, ...]:
        """Return the last 20 lines that the process wrote; none if this machine has no such file.

        Where the interpreter crashed, these are the lines around its message, which precedes a stack of any length with
        the innermost frame first.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(self.start, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ()
        crashes = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
        begin = max(0, len(lines) - LAST_LINES)
        if crashes:
            begin = min(begin, max(0, crashes[-1] - LINES_BEFORE_CRASH))
        return tuple(lines[begin : begin + LAST_LINES])


class Files:
    """A private directory (mode 0700), and a log file for each worker process.

    Args:
        log_dir: Directory of the logs. Default: one in the private directory.
        echo: Whether a thread also prints new lines of the logs, each with its label. Default: True unless ``log_dir``
            is given.
        private: The private directory, if it exists already.
    """

    def __init__(
        self, log_dir: str | Path | None = None, echo: bool | None = None, private: Path | None = None
    ) -> None:
        self.private = private or make_private_directory()
        self.log_dir = Path(log_dir or self.private / "logs").absolute()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._rendezvous = itertools.count(1)
        self._printed: dict[Path, tuple[str, int]] = {}  # label, and the bytes that were printed or are older
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-echo", daemon=True)
        if echo or (echo is None and log_dir is None):
            self._thread.start()

    def begin_log(self, label: str) -> Log:
        """The log of a process that is about to start."""
        path = self.log_dir / f"{label}.log"
        log = Log(path, path.stat().st_size if path.exists() else 0)
        self._printed.setdefault(path, (label, log.start))
        return log

    def rendezvous(self) -> str:
        """A new ``init_method`` for processes of torch.distributed on this machine."""
        return f"file://{self.private}/rendezvous-{next(self._rendezvous)}"

    def close(self) -> None:
        """Print what has not been printed yet, and remove the private directory."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        shutil.rmtree(self.private, ignore_errors=True)

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        for path, (label, at) in list(self._printed.items()):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(at)
                new = file.read()
                complete = new if self._closing.is_set() else new[: new.rfind(b"\n") + 1]
                self._printed[path] = label, at + len(complete)
                _print_lines(f"[{label}] {line}\n" for line in complete.decode(errors="replace").splitlines())


def _print_lines(lines: Iterable[str]) -> None:
    """Write to stdout now: a script that is killed says what its workers had said. Characters that stdout does not have
    are escaped, as in ``\\xe9``, and a stream that the script has closed is let be."""
    stdout = sys.stdout  # which another thread may replace, and which is None where the script began without one
    if stdout is None:
        return
    encoding = getattr(stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(ValueError):
        for line in lines:
            stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))
        stdout.flush()
