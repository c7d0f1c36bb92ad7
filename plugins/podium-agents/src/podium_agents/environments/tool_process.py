"""A call of a tool in a process of its own, which ends with whatever it has started.

    worker ──function, arguments──▶ guard ──fork──▶ the call ──▶ whatever it starts, in whatever session
           ◀────────────────────────── answer ───────┘

The guard is a supervisor that runs no code of the tool. When the call has ended, or the worker closes the channel or
ends, the guard kills what is below it, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import cloudpickle

from podium.exceptions import describe_error, read_text
from podium.processes import (
    LONGEST_BODY,
    Channel,
    Launched,
    Supervisor,
    command,
    describe_exit,
    supervise,
)
from podium.secrecy import find_secrets
from podium_agents.environments.calls import in_thread
from podium_agents.environments.contract import SessionError

__all__ = ["FailedInProcess", "in_process", "main", "write_value"]

_CALL: Final = 0  # the number of the frames


class FailedInProcess(Exception):
    """What the model is told of a call that raised, or that ended without an answer."""


async def in_process(function: Callable[..., Any], values: Mapping[str, Any], env: Collection[str] = ()) -> Any:
    """Call a function, or a coroutine function, in a process of its own. The process ends with this call, also where
    it is cancelled. Of the variables that look like secrets, it has only those that ``env`` names.

    Returns:
        A result that is a text, or the JSON of another one.

    Raises:
        FailedInProcess: The function raised, or its process ended.
        SessionError: The function raised it.
    """
    call = _pickle(function, values)
    withheld = find_secrets(env)
    variables = {name: value for name, value in os.environ.items() if name not in withheld}
    launched = Launched(command("podium_agents.environments.tool_process"), env=variables)
    try:
        answer = await in_thread(_ask, launched.channel, call)
    finally:
        await in_thread(launched.end)
        launched.channel.close()
    if "failure" in answer:
        raise SessionError(answer["failure"])
    if "result" not in answer:
        error = answer.get("error", "its process sent something other than a result")
        missing = [
            f". {name} does not reach the tool unless tool(env=...) names it" for name in withheld if name in error
        ]
        raise FailedInProcess(error + "".join(missing))
    return answer["result"]


def _ask(channel: Channel, call: bytes) -> dict[str, str]:
    """Send a call, and return the first answer. The tool may have run code of the model in its process, so the answer
    is plain text in JSON: reading a pickle would run whatever that code has written."""
    with contextlib.suppress(OSError):  # it ended, which its answer says
        channel.send(_CALL, call)
    try:
        frame = channel.receive()
        if frame is None:
            return {} if channel.data else {"error": "its process ended"}
        answer: Any = json.loads(frame[1]) if frame[0] == _CALL else None
    except (ValueError, RecursionError):  # a FrameError too
        answer = None
    return {str(name): str(value) for name, value in answer.items()} if isinstance(answer, dict) else {}


def write_value(result: Any) -> str:
    """What a tool returned, as text: a text itself, or JSON. Dataclasses, dates and the like are written as
    pydantic reads them in arguments."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_convert_to_json)


def _convert_to_json(found: Any) -> Any:
    from pydantic_core import to_jsonable_python

    try:
        return to_jsonable_python(found, fallback=str)
    except ValueError:  # bytes that are no text
        return str(found)


def _pickle(function: Callable[..., Any], values: Mapping[str, Any]) -> bytes:
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


def main() -> None:
    """Be the guard of the call that comes through the channel."""
    supervise(_guard)


def _guard(supervisor: Supervisor, channel: Channel) -> None:
    os.dup2(2, 1)  # whatever is printed is no answer
    first = channel.receive()
    if first is None:
        return
    with channel.connection.dup() as connection:
        supervisor.fork(lambda: _answer(Channel(connection), _call(first[1])))
    while (ready := supervisor.wait()) is not None:
        for _, status in supervisor.reap():
            end = describe_exit(os.waitstatus_to_exitcode(status))
            _answer(channel, {"error": f"its process ended ({end})"})
            return
        if channel.fileno() in ready:
            return


def _call(data: bytes) -> dict[str, str]:
    """Call what was pickled. Returns what came of it."""
    try:
        function, values = cloudpickle.loads(data)
        result = function(**values)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        return {"result": write_value(result)}
    except SessionError as error:
        return {"failure": read_text(error)}
    except BaseException as error:  # noqa: BLE001 - the model hears of it, whatever it is
        return {"error": read_text(error) if type(error).__name__ == "ToolError" else describe_error(error)}


async def _await(result: Any) -> Any:
    return await result


def _answer(channel: Channel, answer: Mapping[str, str]) -> int:
    """Send an answer. The first one counts."""
    body = json.dumps(answer).encode()
    if len(body) > LONGEST_BODY:
        body = json.dumps({"error": f"its result is longer than {LONGEST_BODY >> 20} MiB"}).encode()
    with contextlib.suppress(ConnectionError):
        channel.send(_CALL, body)
    return 0
