"""How a process gets the secrets of its starter without showing them: /proc/PID/environ is what a process was started
with, and all processes of the same user may read it. A pipe brings them instead.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from podium.secrecy import find_secrets

TAKE: Final = "from podium.processes.secret_handover import take_secrets; take_secrets(); "
"""The code that a process begins with whose environment :func:`hide_secrets` has made."""

_PIPE: Final = "PODIUM_SECRETS_FROM"
_OPEN: Final = "PODIUM_DUMPABLE"
_PR_SET_DUMPABLE: Final = 4
_MOST_BYTES: Final = 1 << 15  # which a pipe holds before somebody reads it


def hide_secrets(env: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """Return ``env`` without its secrets, and the descriptor that a process with this environment must inherit; None
    where there is no secret, or more than a pipe holds.
    """
    hidden = {name: env[name] for name in find_secrets(env=env)}
    body = json.dumps(hidden).encode()
    if not hidden or len(body) > _MOST_BYTES:
        return dict(env), None
    reading, writing = os.pipe()
    os.write(writing, body)
    os.close(writing)
    return {**{name: value for name, value in env.items() if name not in hidden}, _PIPE: str(reading)}, reading


def take_secrets() -> None:
    """Put the secrets of the starter into the environment, and close the pipe."""
    number = os.environ.pop(_PIPE, None)
    if number is not None:
        with os.fdopen(int(number), "rb") as pipe:
            os.environ.update(json.loads(pipe.read()))


def close_memory() -> None:
    """Close /proc/PID/environ and /proc/PID/mem of this process to other processes of the same user; root reads them.
    Only Linux can. A process that it forks is closed, too; one that it starts is not.

    Debuggers and profilers that attach to the process then need root, unless the variable PODIUM_DUMPABLE is set.
    """
    if not os.environ.get(_OPEN):
        _set_dumpable(False)


def open_own(path: str, flags: int) -> int:
    """Open a file below /proc/self, also where :func:`close_memory` has given these files to root."""
    try:
        return os.open(path, flags)
    except PermissionError:
        _set_dumpable(True)
        try:
            return os.open(path, flags)
        finally:
            _set_dumpable(False)


def _set_dumpable(is_open: bool) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(is_open), 0, 0, 0)
