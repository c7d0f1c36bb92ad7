"""The fork server: a supervisor that imports once and never computes, whose children are the worker processes.

It imports the modules to preload with one thread and runs nothing of them. When it ends, it removes the private
directory. It sits in a session of its own, where a terminal's SIGINT does not reach.
"""

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from podium.backends.local import child
from podium.backends.process import keep_freed_memory
from podium.exceptions import describe_error
from podium.lazy import without_collector
from podium.processes import Channel, Supervisor, command, hide_secrets, open_log, serve_forks, supervise


def main(preload: list[str], private: str) -> None:
    """Serve until the controller is gone."""
    supervise(partial(_serve, preload), partial(shutil.rmtree, private, ignore_errors=True))


def _serve(preload: list[str], supervisor: Supervisor, channel: Channel) -> None:
    keep_freed_memory()
    with without_collector():
        for name in preload:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - an import may raise anything; the worker that needs it says so
                sys.stderr.write(f"preload of {name} failed: {describe_error(error)}\n")
    supervisor.settle()
    serve_forks(supervisor, channel, _become_worker_process)


def _become_worker_process(
    fds: list[int], env: dict[str, str], prefix: Sequence[str] | None, log_path: str, *settings: Any
) -> NoReturn:
    """Run a worker process in this fork, or in a new interpreter, whose command begins with ``prefix``, unless this is
    None. ``settings`` are for :mod:`child`."""
    log = open_log(log_path, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (0, 1, 2, *fds):
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.update(env)
    if prefix is not None:
        for fd in fds:
            os.set_inheritable(fd, True)
        line = [*prefix, *command("podium.backends.local.child", fds, *settings)]
        variables, pipe = hide_secrets(os.environ)
        if pipe is not None:
            os.set_inheritable(pipe, True)
        os.execvpe(line[0], line, variables)
    child.main(fds, *settings)
