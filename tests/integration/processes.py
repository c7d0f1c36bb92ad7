"""What the fault tests need to know of the process table, read from /proc; and scripts run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from podium.testing.target import alive, all_gone, wait_for

__all__ = ["alive", "all_gone", "descriptors", "parent_of", "run_script", "start_script", "wait_for"]


def parent_of(pid: int) -> int:
    """The parent of a running process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def start_script(directory: Path, text: str, **env: str) -> subprocess.Popen[str]:
    """Start ``text`` as a script in a session of its own; its temporary files go to ``directory/tmp``.

    Its standard output is a pipe; its standard error goes to ``directory/stderr``.
    """
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    path = directory / "script.py"
    path.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with (directory / "stderr").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, str(path)],
            env={**environment, "TMPDIR": str(temporary), **env},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


def run_script(directory: Path, text: str, *, timeout_s: float = 60.0, **env: str) -> str:
    """Run ``text`` to its end and return what it printed; its standard error is in the assertion if it fails."""
    script = start_script(directory, text, **env)
    try:
        out, _ = script.communicate(timeout=timeout_s)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 0, f"exit {script.returncode}: {(directory / 'stderr').read_text()}"
    return out
