"""Programs that nobody trusts, in a sandbox of bubblewrap: no network, no files but Python's, and limits.

grading process ─▶ bwrap ─▶ python sandbox_program.py        a sandbox has its own process ids, so that killing bwrap
      │ watches: time, processes, memory, output              kills all that runs in it
      └ kills
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from podium.errors import ConfigError
from podium.processes import children_of, kill

__all__ = ["Limits", "Sandboxed", "check_sandbox", "run_programs"]

Kind = Literal["bwrap", "none"]

_PROGRAM: Final = Path(__file__).with_name("sandbox_program.py")
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_FILES: Final = 64 << 20  # bytes that all files of a sandbox may take, which are in memory
_LOOK_S: Final = 0.02
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What programs in a sandbox may take.

    Attributes:
        seconds: The wall-clock time of all of them together.
        memory_mib: The memory of a process, and of all processes of a sandbox together.
        processes: Processes and threads of a sandbox at the same time.
        output_mib: What a program writes: to a file, and to its output.
    """

    seconds: float
    memory_mib: int
    processes: int
    output_mib: int


@dataclass(frozen=True)
class Sandboxed:
    """What came of a program.

    Attributes:
        output: What it wrote to its output.
        status: Its exit status, which is negative for a signal.
        limit: The limit that it ran over: "time", "memory", "processes", "output" or "".
    """

    output: bytes
    status: int
    limit: str = ""


@cache
def check_sandbox(kind: Kind, option: str) -> None:
    """Check that there is a sandbox, once. ``option`` is how somebody insists on none.

    Raises:
        ConfigError: bubblewrap is not installed, or cannot work here.
    """
    if kind == "none":
        return
    if kind != "bwrap":
        raise ConfigError(f'sandbox = {kind!r}: expected "bwrap" or "none"')
    insist = f"or insist with {option}, which runs code that a model wrote as your user, with your files and network"
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "code is run in a sandbox of bubblewrap, whose command bwrap is not here: install it (apt-get install "
            f"bubblewrap), {insist}"
        )
    probe = [*_wrap((), ()), sys.executable, "-I", "-S", "-c", "import json"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"bubblewrap cannot make a sandbox here ({done.stderr.strip()[-300:] or 'no reason given'}): in a "
            f"container, allow user namespaces, {insist}"
        )


def run_programs(
    tasks: Sequence[Mapping[str, Any]],
    limits: Limits,
    kind: Kind,
    ends: Sequence[socket.socket] = (),
    paths: Sequence[str] = (),
) -> list[Sandboxed]:
    """Run the tasks of :mod:`.sandbox_program` side by side, each in a sandbox of its own. The first one that runs over
    a limit ends all; so does the end of the last one, whose output is what counts.

    Args:
        ends: A socket for each of them, if they get some. These are closed here.
        paths: Folders that the programs may read and import from.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for task, end in zip(tasks, ends or [None] * len(tasks), strict=True):
            running.append(_start(task, limits, kind, None if end is None else end.fileno(), paths))
        for end in ends:  # a program sees that the other one has ended
            end.close()
        limit, outputs = _watch(running, limits)
    finally:
        for end in ends:
            end.close()
        for process in running:
            _end(process)
    return [Sandboxed(output, process.returncode, limit) for process, output in zip(running, outputs, strict=True)]


def _start(
    task: Mapping[str, Any], limits: Limits, kind: Kind, fd: int | None, paths: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a program. In a sandbox it gets its task, which may be long, by a pipe that it reads at once."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM)]
    passed = () if fd is None else (fd,)
    process = subprocess.Popen(
        [*_wrap(paths, (str(_PROGRAM),)), *command] if kind == "bwrap" else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=passed,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        cwd=None if kind == "bwrap" else "/tmp",
        start_new_session=True,
    )
    assert process.stdin is not None
    message = {
        **task,
        "fd": fd,
        "paths": [*paths],
        "seconds": int(limits.seconds) + 1,
        "memory_bytes": limits.memory_mib << 20,
        "file_bytes": limits.output_mib << 20,
    }
    try:
        process.stdin.write(json.dumps(message).encode())
        process.stdin.close()
    except BrokenPipeError:  # it has ended, which its status says
        pass
    return process


def _wrap(paths: Sequence[str], files: Sequence[str]) -> list[str]:
    """The command of bubblewrap before that of the program."""
    prefixes = dict.fromkeys([sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent.parent)])
    readable = [*(path for path in _SYSTEM if os.path.exists(path)), *prefixes, *paths, *files]
    binds = [word for path in readable for word in ("--ro-bind", path, path)]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
        *binds,
        *("--dev", "/dev", "--remount-ro", "/dev", "--size", str(_FILES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
    ]


def _watch(running: Sequence[subprocess.Popen[bytes]], limits: Limits) -> tuple[str, list[bytes]]:
    """Read what the programs write until the last one has ended, or one runs over a limit. Returns that limit."""
    outputs = [bytearray() for _ in running]
    ends_s = time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as selector:
        for process, output in zip(running, outputs, strict=True):
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            selector.register(process.stdout, selectors.EVENT_READ, output)
        last = running[-1].stdout
        limit = ""
        while not limit and last in {key.fileobj for key in selector.get_map().values()}:
            for key, _ in selector.select(_LOOK_S):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fileobj)
            if max(map(len, outputs)) > limits.output_mib << 20:
                limit = "output"
            elif time.monotonic() > ends_s:
                limit = "time"
            else:
                limit = next(filter(None, (_is_over(process.pid, limits) for process in running)), "")
    return limit, [bytes(output) for output in outputs]


def _is_over(pid: int, limits: Limits) -> str:
    """The limit that the processes below ``pid`` run over together."""
    pids, at = [pid], 0
    while at < len(pids) and len(pids) <= limits.processes + 2:  # bwrap and its first process do not count
        pids += children_of(pids[at])
        at += 1
    threads, pages = 0, 0
    for member in pids:
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        threads, pages = threads + int(fields[17]), pages + int(fields[21])
    if len(pids) > limits.processes + 2 or threads > limits.processes + 2:
        return "processes"
    return "memory" if pages * _PAGE > (limits.memory_mib + 64) << 20 else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with all that it started: in a sandbox the kernel does that, once its first process ends."""
    for child in children_of(process.pid):
        kill(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
