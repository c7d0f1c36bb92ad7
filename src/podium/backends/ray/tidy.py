"""Removes the directories of a script that was killed, which cannot do so itself. Ray leaves its session's directory.

    script ──the names of directories──▶ this file, which runs in a session of its own
           ──the pipe closes──▶          it removes those that are still there

This file imports nothing but the standard library, because it runs as a script and shall start fast.
"""

import contextlib
import os
import select
import shutil
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
    """Has directories removed when this script ends, however it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, directory: str | Path) -> None:
        """Have ``directory`` removed at the end."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())], stdin=subprocess.PIPE, bufsize=0,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(os.fsencode(directory) + b"\0")

    def close(self, *, remove: bool = True) -> None:
        """End the process. Directories that are still there are removed, unless ``remove`` is False."""
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
    """Wait until process ``script`` has ended or has closed the pipe, and remove the directories that it named."""
    said = b""
    while os.getppid() == script:
        if select.select([0], [], [], PARENT_CHECK_S)[0]:
            new = os.read(0, 1 << 16)
            if not new:
                break
            said += new
    directories = [Path(os.fsdecode(name)) for name in said.split(b"\0")[:-1]]
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
