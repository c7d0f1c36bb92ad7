"""Python processes whose imports are done: forks of a server that has imported torch, transformers and Podium once.

    test process ──request, descriptors──▶ server ──fork──▶ go-between ──fork──▶ process
                 ◀──process id────────────                  (ends at once)

A new interpreter takes three to five processor seconds to import what a training needs; a fork takes a twentieth. The
server has one thread and never computes, because a fork of a process that ran a multi-threaded operation may hang. The
test process is a subreaper until the server answers, so that the new process becomes its child when the go-between
ends. A :class:`WarmPopen` is therefore a real child process, to wait for, to signal, and to kill.

Each such process has a server of its own, forked before its script begins. The fork server of the backend ``local``,
which would import as much again, comes from that one.

A warm process differs from a new interpreter in four respects. Tests of these use ``subprocess`` and say why:

* Its imports are done: a test learns nothing about their order, their time, or what they leave out.
* The environment and ``sys.path`` did not act on these imports.
* ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are those of the server.
* Of the interpreter's options it knows ``-c``, ``-m``, and ``-W`` with the name of an action.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from inspect import signature
from pathlib import Path
from typing import Any, AnyStr, ClassVar, NamedTuple

__all__ = ["NewPopen", "WarmPopen", "run_python", "start_fork_servers_warm"]

LIMIT = 1 << 20  # bytes of a request
ENDED_S = 1.0  # a copy of the socket in a fork of the test process would hide that process's end
NewPopen = subprocess.Popen
PLAIN = NewPopen._execute_child  # type: ignore[attr-defined]  # not in the stubs: it forks and executes
FORK_SERVER = "from podium.backends.local.server import main"
MODULES = ("podium.trainer.ppo", "podium.trainer.sft", "podium.cli")  # and those of podium.trainer.PRELOAD
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37


class Request(NamedTuple):
    """What a process is to be; ``pass_fds`` are its descriptors beside the three standard ones."""

    arguments: list[str]
    env: dict[str, str]
    cwd: str
    pass_fds: list[int]
    new_session: bool


# -- in the test process ---------------------------------------------------------------------------------------------


def run_python(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end in a warm process, without input, and return its output as text.

    It has the time of the test, which ``pytest.mark.timeout`` gives, unless ``timeout`` is shorter.
    """
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, arguments)]
    with WarmPopen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class WarmPopen(subprocess.Popen[AnyStr]):
    """A :class:`subprocess.Popen` of ``[sys.executable, ...]`` whose imports are done."""

    server: ClassVar[Server | None] = None
    _close_pipe_fds: Any
    _child_created: bool

    def _execute_child(self, *words: Any) -> None:
        how = signature(PLAIN).bind(self, *words).arguments
        if WarmPopen.server is None:
            WarmPopen.server = Server.launch()
        standard = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        passed = sorted(how["pass_fds"])
        request = Request(
            [os.fspath(word) for word in how["args"][1:]],
            dict(os.environ if how["env"] is None else how["env"]),
            os.fspath(how["cwd"] or os.getcwd()),
            passed,
            how["start_new_session"],
        )
        fds = [number if fd == -1 else fd for number, fd in enumerate(standard)]
        self.pid = WarmPopen.server.start(request, [*fds, *passed])
        self._child_created = True
        pipes = [how[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*pipes)


class ForkServerPopen(WarmPopen[AnyStr]):
    """In the place of :class:`subprocess.Popen`: warm if it is the fork server of ``local``, and else a new program."""

    def _execute_child(self, *words: Any) -> None:
        warm = FORK_SERVER in str(words[0]) and (WarmPopen.server is None or WarmPopen.server.owner == os.getpid())
        (super()._execute_child if warm else partial(PLAIN, self))(*words)


def start_fork_servers_warm() -> None:
    """Have every cluster of the backend ``local`` that this process connects from now on begin with its imports done.
    A test that needs a fork server of its own imports sets ``subprocess.Popen`` to ``NewPopen``."""
    subprocess.Popen = ForkServerPopen  # type: ignore[misc]


class Server:
    """A process's end of the socket to the server of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._starting = threading.Lock()
        self.owner = os.getpid()

    @classmethod
    def launch(cls, path: str = "", *, warnings_end: bool = True) -> Server:
        """Start a server, which ends with this process.

        Args:
            path: PYTHONPATH of its imports.
            warnings_end: Whether an import that warns ends it, as it would end a process under ``-W error``.
        """
        near, far = pair()
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env |= {"PYTHONPATH": path} if path else {}
        strict = ["-W", "error"] if warnings_end else []  # imports may not warn under -W error
        command = [sys.executable, *strict, __file__, str(far.fileno())]
        with far:
            process = NewPopen(command, env={**env, **threads}, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(process.wait)
        atexit.register(near.close)  # before it waits
        return cls(near)

    def start(self, request: Request, fds: Sequence[int]) -> int:
        """Start a process with these descriptors, and return its id."""
        with self._starting, subreaper():
            socket.send_fds(self._connection, [pickle.dumps(tuple(request))], fds)
            reply = self._connection.recv(64)
        if not reply:
            raise RuntimeError("the server of warm processes has ended; the standard error of the tests says why")
        return int(reply)


def pair() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
    return near, far


@contextmanager
def subreaper() -> Iterator[None]:
    """Have orphans below this process become its children during the block."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


# -- in the server, and in its forks ---------------------------------------------------------------------------------


def main(connection: socket.socket) -> tuple[types.CodeType, dict[str, Any]]:
    """Import and serve. Returns in a fork, with the code to run there and its names."""
    atexit.register(end)  # first, so that it is called last
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the test process
    del sys.path[0]  # this file's directory
    paths = list(sys.path)
    gc.disable()
    preload = importlib.import_module("podium.trainer").PRELOAD
    for name in (*preload, *MODULES):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        request, fds = serve(connection)  # returns in a fork
        if request.new_session:
            os.setsid()
        near, far = pair()
        server = os.getpid()
        if os.fork() != 0:
            break
        connection = far  # this fork is the server of the process that its parent becomes
        near.close()
        for fd in fds:
            os.close(fd)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(0)
    far.close()
    settle(request, fds, near, paths)
    return read_program(request.arguments)


def serve(connection: socket.socket) -> tuple[Request, list[int]]:
    """Fork a child of the parent for each request. Returns what it requests and its descriptors in the child only."""
    parent, poller = os.getppid(), select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        ready = poller.poll(1000 * ENDED_S)
        if os.getppid() != parent:
            os._exit(0)
        if not ready:
            continue
        message, fds, _, _ = socket.recv_fds(connection, LIMIT, 253)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (child := os.fork()) != 0:
                os.write(write, str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for fd in (read, write, connection.detach()):
                os.close(fd)
            return Request(*pickle.loads(message)), fds
        os.waitpid(between, 0)
        connection.send(os.read(read, 64))
        for fd in (read, write, *fds):
            os.close(fd)


def settle(request: Request, fds: list[int], near: socket.socket, paths: list[str]) -> None:
    """Take over descriptors, directory, environment, and whatever else a new interpreter would have of its own."""
    targets = [0, 1, 2, *request.pass_fds]
    above = max(*targets, 63) + 1
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (near.detach(), *fds)]
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - {*kept}:
        with suppress(OSError):
            os.close(fd)
    for fd, target in zip(kept[1:], targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1))  # type: ignore[union-attr]  # files
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    torch = sys.modules["torch"]
    torch.set_num_threads(int(request.env.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.path[:] = [*filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.orig_argv = [sys.executable, *request.arguments]
    importlib.invalidate_caches()
    WarmPopen.server = Server(socket.socket(fileno=kept[0]))
    sys.modules["tests.warm_python"] = sys.modules[__name__]  # a script that imports this file gets this server
    start_fork_servers_warm()


def read_program(arguments: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Prepare to run ``python ARGUMENTS``. Returns the code and the names of the module ``__main__``."""
    actions = [action for action in os.environ.get("PYTHONWARNINGS", "").split(",") if action]
    while arguments[0] == "-W":
        actions.append(arguments[1])
        arguments = arguments[2:]
    warn(actions)
    script, *rest = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=__builtins__)
    if script == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        code = f"import runpy\nrunpy._run_module_as_main({rest[0]!r})"  # as the interpreter does
        return compile(code, __file__, "exec"), {}
    if script == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        return compile(rest[0], "<string>", "exec"), vars(main)
    if script.startswith("-"):
        raise ValueError(f"a warm process does not know the option {script}: run it by subprocess.run")
    path = os.path.abspath(script)
    sys.argv[:] = arguments
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    return compile(Path(path).read_bytes(), path, "exec"), vars(main)


status: list[BaseException] = []
"""What ended the script, if anything did."""


def end() -> None:
    """End at the end of the interpreter's exit, with its exit code, but without freeing all that was imported: that
    takes longer in a fork than a short script, because it copies the memory that it frees."""
    code = 1 if status else 0
    if status and isinstance(status[0], SystemExit):
        said = status[0].code
        code = said if isinstance(said, int) else int(said is not None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if status and isinstance(status[0], KeyboardInterrupt) and not isinstance(status[0], SystemExit):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def warn(actions: list[str]) -> None:
    """Have the actions in the place of this server's own: below the filters that the imports have added."""
    sys.warnoptions[:] = actions
    strict = ("error", None, Warning, None, 0)
    at = warnings.filters.index(strict) if strict in warnings.filters else len(warnings.filters)
    above, below = warnings.filters[:at], warnings.filters[at + 1 :]
    warnings.filters[:] = below  # type: ignore[index]  # a list, whatever the stubs say
    for action in actions:
        warnings.simplefilter(action)  # type: ignore[arg-type]
    warnings.filters[:0] = above  # type: ignore[index]


def print_without_this_file(hook: Any, kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    hook(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    try:
        exec(*main(socket.socket(fileno=int(sys.argv[1]))))  # nothing else stands on the script's stack
    except BaseException as error:
        status.append(error)
        sys.excepthook = partial(print_without_this_file, sys.excepthook)
        raise  # the interpreter prints it
