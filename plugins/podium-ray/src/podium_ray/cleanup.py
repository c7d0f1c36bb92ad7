"""Removes what is left of a script that was killed, which cannot do so itself.

    script ──names of directories, process ids──▶ this file, which runs in a session of its own
           ──the pipe closes──▶                   it kills these processes, and removes the directories

Ray leaves the directory of an embedded cluster. Its agents try for a minute to tell that cluster of its end.

This file imports nothing but the standard library, because it runs as a script and shall start fast.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["Tidier"]

PARENT_CHECK_S = 0.5  # a copy of the pipe in a fork of the script would hide the script's end
GONE_S = 2.0  # directories count as removed when they have been away for so long, as Ray's processes end one by one
LOOK_S = 0.1
LIMIT_S = 60.0
END_S = 5.0


class Tidier:
    """Has directories removed, and processes killed, when this script ends, however it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def remove(self, directory: str | Path) -> None:
        """Have ``directory`` removed at the end."""
        self._say(b"D" + os.fsencode(directory))

    def kill(self, pid: int) -> None:
        """Have a process killed at the end, if it still runs then."""
        self._say(b"P%d" % pid)

    def _say(self, what: bytes) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())], stdin=subprocess.PIPE, bufsize=0,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(what + b"\0")

    def close(self, *, remove: bool = True) -> None:
        """Do now what was to be done at the end, or nothing if ``remove`` is False."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            if not remove:
                process.kill()
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(script: int) -> None:
    """Wait until process ``script`` has ended or has closed the pipe. Then do what it has said."""
    unread = b""
    processes: list[int] = []  # descriptors, as another process may get the number of one that has ended
    directories: list[Path] = []
    while os.getppid() == script:
        if select.select([0], [], [], PARENT_CHECK_S)[0]:
            new = os.read(0, 1 << 16)
            if not new:
                break
            *messages, unread = (unread + new).split(b"\0")
            directories += [Path(os.fsdecode(message[1:])) for message in messages if message[:1] == b"D"]
            for pid in [int(message[1:]) for message in messages if message[:1] == b"P"]:
                with contextlib.suppress(OSError, AttributeError):  # it has ended, or this system has no descriptors
                    processes.append(os.pidfd_open(pid))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    until, seen = time.monotonic() + LIMIT_S, 0.0
    while time.monotonic() < until:
        for directory in filter(Path.exists, directories):
            seen = time.monotonic()
            shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() - seen > GONE_S:
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
