"""The backend under test, and checks that many tests share."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

import podium
from podium.runtime import Bound, Capabilities, Cluster

__all__ = ["LIMIT_S", "Target", "alive", "all_gone", "need", "refuses", "started", "time_limit", "wait_for"]

LIMIT_S = 60.0
"""Seconds that any machine has for what takes milliseconds on one that does nothing else."""


class Target:
    """A backend by name with the options of ``podium.connect``."""

    def __init__(self, backend: str, **options: Any) -> None:
        self.backend = backend
        self.options = options

    def __str__(self) -> str:
        return "-".join([self.backend, *(f"{name}={value}" for name, value in self.options.items())])

    def connect(self) -> Cluster:
        """Return a new cluster, which the caller closes."""
        return podium.connect(self.backend, **self.options)

    def run_script(self, directory: Path, text: str, before: str = "") -> subprocess.Popen[str]:
        """Start ``text`` as a script of a session of its own, in which ``cluster`` is a new cluster of this backend.
        The script does ``before`` before it connects. Its output and its errors are one pipe."""
        path = directory / "script.py"
        connect = f"cluster = podium.connect({self.backend!r}, **{self.options!r})"
        path.write_text(f"import podium\n{before}\n{connect}\n{text}")
        return subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def need(cluster: Cluster, *names: str) -> None:
    """Skip the test unless the backend declares all of these fields of :class:`~podium.runtime.Capabilities`."""
    can: Capabilities = cluster.capabilities
    for name in names:
        if not getattr(can, name):
            pytest.skip(f"backend {cluster.backend_name!r} declares {name}=False")


def started(bound: Bound[Any], slots: int, *, scope: Literal["class", "function"] = "class", **options: Any) -> Any:
    """Return a fixture: a group in a pool of its own. ``options`` are those of ``cluster.start``."""

    @pytest.fixture(scope=scope)
    @classmethod
    def group(cls: type[object], cluster: Cluster) -> Any:
        return cluster.start(bound, cluster.pool([slots]), **options)

    return group


def refuses(error: type[Exception], says: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Check that a call raises ``error`` with a message that matches ``says``."""
    with pytest.raises(error, match=says):
        function(*args, **kwargs)


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Fail the test if the block takes longer. A timer that runs already, as pytest-timeout's, goes on after it.

    The limit counts anew after each failure: what then waits for the same thing, such as the cancelling of a call that
    could not be sent, fails as well.
    """

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test took longer than {seconds:g} s")

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, late)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - time.monotonic() + began), interval)


def alive(pid: int) -> bool:
    """Return whether a process of this machine runs. One that ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``condition`` came true within ``seconds``."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def all_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Return the processes of ``pids`` that still run after ``seconds``; none as soon as there are none."""
    wanted = list(pids)
    wait_for(lambda: not any(alive(pid) for pid in wanted), seconds)
    return [pid for pid in wanted if alive(pid)]
