"""What the fault tests need to know of the process table, read from /proc; and scripts run as a user runs them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from podium.processes import children_of
from podium_testing.target import alive, all_gone, wait_for
from tests.warm_python import NewPopen, WarmPopen

__all__ = ["alive", "all_gone", "descriptors", "listeners_of", "opened_by_others", "parent_of", "run_script"]
__all__ += ["start_script", "wait_for"]


def parent_of(pid: int) -> int:
    """The parent of a running process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def listeners_of(pid: int) -> list[str]:
    """The IPv4 addresses on which a process and its descendants listen."""
    inodes: set[str] = set()
    for one in [pid, *_descendants(pid)]:
        for entry in Path(f"/proc/{one}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    found = [row[1].partition(":")[0][-8:] for row in rows if row[3] == "0A" and row[9] in inodes]
    return [socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found]


def _descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [further for child in children for further in _descendants(child)]


def opened_by_others(*paths: Path) -> list[str]:
    """Those of ``paths`` that another user of this machine can read or write. Only root can ask."""
    script = 'for path in "$@"; do if test -r "$path" -o -w "$path"; then echo "$path"; fi; done'
    command = ["/bin/sh", "-c", script, "sh", *map(str, paths)]
    asked = subprocess.run(
        command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=True
    )
    return asked.stdout.splitlines()


def start_script(directory: Path, text: str, *, warm: bool = True, **env: str) -> subprocess.Popen[str]:
    """Start ``text`` as a script in a session of its own; its temporary files go to ``directory/tmp``.

    Its standard output is a pipe; its standard error goes to ``directory/stderr``. Its imports are done if
    it is ``warm``.
    """
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    path = directory / "script.py"
    path.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with (directory / "stderr").open("w") as errors:
        return (WarmPopen if warm else NewPopen)(
            [sys.executable, str(path)],
            env={**environment, "TMPDIR": str(temporary), **env},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


def run_script(directory: Path, text: str, *, timeout_s: float = 60.0, warm: bool = True, **env: str) -> str:
    """Run ``text`` to its end and return what it printed; its standard error is in the assertion if it fails."""
    script = start_script(directory, text, warm=warm, **env)
    try:
        out, _ = script.communicate(timeout=timeout_s)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 0, f"exit {script.returncode}: {(directory / 'stderr').read_text()}"
    return out
