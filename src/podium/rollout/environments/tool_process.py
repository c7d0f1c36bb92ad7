"""A call of a tool in a process of its own, which ends with whatever it has started.

    worker ──function, arguments──▶ guard ──fork──▶ the call ──▶ whatever it starts, in whatever session
           ◀────────────────────────── answer ───────┘

The guard runs no code of the tool. It is a subreaper, so all that the call starts stays below it. When the call has
ended, or the worker says SIGTERM, or the worker has ended, the guard kills what is below it, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import cloudpickle

from podium.processes import become_subreaper, descendants_of, describe_exit, kill

__all__ = ["FailedInProcess", "in_process", "main", "written"]

_LONGEST_LINE: Final = 1 << 26  # bytes of an answer
_LOOK_S: Final = 0.5  # between two looks at whether the worker still lives
_END_S: Final = 5.0  # that a guard has to end
_SIGNALS: Final = frozenset({signal.SIGCHLD, signal.SIGTERM})
_MAIN: Final = "from podium.rollout.environments.tool_process import main; main()"


class FailedInProcess(Exception):
    """What the model is told of a call that raised, or that ended without an answer."""


async def in_process(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function, or a coroutine function, in a process of its own. The process ends with this call, also where
    it is cancelled.

    Returns:
        A result that is a text, or the JSON of another one.

    Raises:
        FailedInProcess: The function raised, or its process ended.
    """
    data, path = _pickled(function, values), os.pathsep.join([entry for entry in sys.path if entry] or [os.curdir])
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MAIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=_LONGEST_LINE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert guard.stdin is not None and guard.stdout is not None
    try:
        with contextlib.suppress(ConnectionError):  # it ended, which its answer says
            guard.stdin.write(data)
            await guard.stdin.drain()
            guard.stdin.close()
        answer = _read(await guard.stdout.readline())
    except ValueError:
        raise FailedInProcess(f"its result is longer than {_LONGEST_LINE >> 20} MiB") from None
    finally:
        await _end(guard)
    if "result" not in answer:
        raise FailedInProcess(answer.get("error", "its process answered with something else than a result"))
    return answer["result"]


async def _end(guard: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        guard.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(guard.wait(), _END_S)
        except TimeoutError:
            os.killpg(guard.pid, signal.SIGKILL)
            await guard.wait()


def written(result: Any) -> str:
    """What a tool returned, as text: a text itself, or JSON. Dataclasses, dates and the like are written as pydantic
    reads them in arguments."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(found: Any) -> Any:
    from pydantic_core import to_jsonable_python

    try:
        return to_jsonable_python(found, fallback=str)
    except ValueError:  # bytes that are no text
        return str(found)


def _pickled(function: Callable[..., Any], values: Mapping[str, Any]) -> bytes:
    """A call, whose function is sent as code where its module is a file that was loaded by its path."""
    module = sys.modules.get(function.__module__)
    by_value = module is not None and getattr(module, "__spec__", None) is not None and "." not in function.__module__
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, dict(values)))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _read(data: bytes) -> dict[str, str]:
    """What a tool's process answered. The tool may have run code of the model there, so the answer is plain text in
    JSON: reading a pickle would run whatever that code has written."""
    if not data:
        return {"error": "its process ended"}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def main() -> None:
    """Be the guard of the call that standard input says."""
    become_subreaper()
    worker, out = os.getppid(), os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no answer
    data = sys.stdin.buffer.read()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _answer(out, _called(data))
        os._exit(0)
    status: int | None = None
    while status is None and not _is_told_to_stop() and os.getppid() == worker:
        status = _reaped(pid)
    if status is not None:
        _answer(out, {"error": f"its process ended ({describe_exit(os.waitstatus_to_exitcode(status))})"})
    _kill_all()
    os._exit(0)


def _called(data: bytes) -> dict[str, str]:
    """Call what was pickled. Returns what came of it."""
    try:
        function, values = cloudpickle.loads(data)
        found = function(**values)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return {"result": written(found)}
    except BaseException as error:  # noqa: BLE001 - the model hears of it, whatever it is
        kind = type(error).__name__
        return {"error": str(error) if kind == "ToolError" else f"{kind}: {error}"}


async def _awaited(found: Any) -> Any:
    return await found


def _answer(out: int, answer: Mapping[str, str]) -> None:
    """Write an answer. The first one counts."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(out), "w") as file:
        file.write(json.dumps(answer) + "\n")
    sys.stderr.flush()
    sys.stdout.flush()


def _is_told_to_stop() -> bool:
    """Wait until a child has ended, or for a while. Returns whether the worker has said that the call is over."""
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        return found is not None and found.si_signo == signal.SIGTERM
    time.sleep(0.02)  # as on macOS
    return signal.SIGTERM in signal.sigpending()


def _kill_all() -> None:
    """Kill what is below this process, until nothing is left."""
    until = time.monotonic() + _END_S / 2
    with contextlib.suppress(ChildProcessError):  # raised when none is left
        while time.monotonic() < until:
            for pid in descendants_of(os.getpid()):
                kill(pid)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def _reaped(wanted: int) -> int | None:
    """Reap the children that have ended. Returns the wait status of ``wanted`` if it is one of them."""
    found: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == wanted else found
    return found
