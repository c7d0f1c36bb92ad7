"""The output of worker processes: their log files, the last lines of these, and printing them on the terminal."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NamedTuple

__all__ = ["Log", "LogEcho", "Logs", "last_lines"]

WORDS = 20
TAIL_BYTES = 16 << 10
POLL_S = 0.1


def last_lines(path: Path, start: int = 0) -> tuple[str, ...]:
    """The last 20 lines of ``path`` after byte ``start``; none if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-WORDS:])
    except OSError:
        return ()


class Log(NamedTuple):
    """The log file of a worker process, whose own output begins at byte ``start``."""

    path: Path
    start: int

    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the process wrote."""
        return last_lines(self.path, self.start)


class Logs:
    """The log files of a backend's worker processes, in ``directory``. With ``echo`` they are printed here too."""

    def __init__(self, directory: str | Path, *, echo: bool) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._echo = LogEcho() if echo else None

    def begin(self, label: str) -> Log:
        """The log of a process that is about to start."""
        path = self.directory / f"{label}.log"
        if self._echo is not None:
            self._echo.follow(label, path)
        return Log(path, _size(path))

    def close(self) -> None:
        """Print what has not been printed yet."""
        if self._echo is not None:
            self._echo.stop()


class LogEcho:
    """Prints what is added to log files, each line with its label, from one thread."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[str, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-echo", daemon=True)
        self._thread.start()

    def follow(self, label: str, path: Path) -> None:
        """Print what is added to ``path`` from now on."""
        self._files.setdefault(path, (label, _size(path)))

    def stop(self) -> None:
        """Print the rest and end."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        for path, (label, at) in list(self._files.items()):
            try:
                with path.open("rb") as file:
                    file.seek(at)
                    new = file.read()
            except OSError:
                continue
            whole = new if self._stop.is_set() else new[: new.rfind(b"\n") + 1]
            self._files[path] = label, at + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                sys.stdout.write(f"[{label}] {line}\n")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
