"""A grading process: it scores one item after another, and sends a frame of JSON for each.

The JSON is data alone, so that whoever reads it runs no code of the reward's. Where a function is to be awaited, the
process works on many items at once.
"""

import asyncio
import faulthandler
import json
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from podium.exceptions import describe_error
from podium.processes import Channel, children_of, limit_memory
from podium.rewards.call_forms import Item
from podium.rewards.reward_functions import Clock, Result, RewardFunctions, await_rewards, call_rewards, is_finite

REPLACE: Final = 75  # exit code of a process that earlier items have filled with memory or processes
ALIVE: Final = 0  # number of a frame by which a process that awaits says that it goes on

_MOST_LEFT: Final = 32  # processes that a reward may leave behind in one grading process
_CHECKED_ITEMS: Final = 64  # the processes left behind are counted after this many items
_PROBLEM: Final = 2_000  # characters
_NO_TERMINAL: Final = (
    '; a grading process has no terminal: with --backend inline, or cluster="inline" in Python, the reward runs in the '
    "script's own process, where a debugger works"
)


def encode(result: Result) -> bytes:
    """Return a score, its parts or a problem, as JSON."""
    if result.problem:
        text = json.dumps([result.problem, result.traceback, result.limit])
    elif result.parts or result.extra or result.score is None:
        parts = {"parts": dict(result.parts), "extra": dict(result.extra), "logged": sorted(result.logged)}
        text = json.dumps({"score": result.score, **parts})
    else:
        text = repr(result.score)  # which writes a finite float as JSON does, and faster
    return text.encode()


def decode(data: bytes) -> Result:
    """Return the result in ``data``. Whatever is wrong with it becomes the result's problem.

    A reward may have written the data by itself. Each value's type is checked, and nothing else is believed.
    """
    try:
        plain = json.loads(data.decode())
    except (ValueError, RecursionError):
        plain = None
    match plain:
        case float(score) if is_finite(score):
            return Result(score)
        case {"score": float() | None as score, "parts": dict(parts), "extra": dict(extra), "logged": list(logged)} if (
            (score is None or is_finite(score))
            and all(map(is_finite, parts.values()))
            and all(isinstance(text, str) for text in extra.values())
            and all(isinstance(name, str) for name in cast("list[object]", logged))
        ):
            names = frozenset(cast("list[str]", logged))
            return Result(score, cast("Mapping[str, float]", parts), cast("Mapping[str, str]", extra), names)
        case [str(problem), str(trace), str(limit)]:
            return Result(problem=problem or "failed", traceback=trace, limit=limit)
        case _:
            return Result(problem=f"sent {data[:60]!r}, which is not a result")


def grade_items(sock: socket.socket, functions: RewardFunctions, memory_bytes: int | None) -> int:
    """Answer items one by one until ``sock`` closes. Returns the exit code of the process."""
    channel = _begin(sock, memory_bytes)
    answered, grader = 0, os.getpid()
    while (frame := channel.receive()) is not None:
        number, data = frame
        item = _read_item(data)
        result = item if isinstance(item, Result) else _explain(call_rewards(functions, item))
        if os.getpid() != grader:  # the reward returned in a process that it forked, whose parent answers
            os._exit(0)
        full = memory_bytes is not None and result.limit == "memory"
        if not full or answered == 0:  # else earlier items may be the cause: this one has a second try elsewhere
            channel.send(number, encode(result))
            answered += 1
        if full or (answered % _CHECKED_ITEMS == 0 and len(children_of(os.getpid())) > _MOST_LEFT):
            return REPLACE
    return 0


def grade_awaited(sock: socket.socket, functions: RewardFunctions, memory_bytes: int | None, limit_s: float) -> int:
    """Answer items, all that are here at once, until ``sock`` closes. Returns the exit code of the process."""
    return asyncio.run(_serve(_begin(sock, memory_bytes), functions, Clock(limit_s)))


async def _serve(channel: Channel, functions: RewardFunctions, clock: Clock) -> int:
    loop, grader = asyncio.get_running_loop(), os.getpid()
    ending: asyncio.Future[int] = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, data: bytes) -> None:
        channel.send(ALIVE)
        item = _read_item(data)
        result = item if isinstance(item, Result) else _explain(await await_rewards(functions, item, clock))
        if os.getpid() != grader:
            os._exit(0)
        channel.send(number, encode(result))

    def read() -> None:
        frames = channel.read()
        if frames is None:
            loop.remove_reader(channel)
            ending.set_result(0)
        for number, data in frames or ():
            task = loop.create_task(answer(number, data))
            tasks.add(task)
            task.add_done_callback(drop)

    def drop(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        is_full = not tasks and len(children_of(os.getpid())) > _MOST_LEFT
        if is_full and not ending.done():
            ending.set_result(REPLACE)

    loop.add_reader(channel, read)
    return await ending


def _begin(sock: socket.socket, memory_bytes: int | None) -> Channel:
    faulthandler.enable()
    limit_memory(memory_bytes)
    return Channel(sock, trusted=True)


def _read_item(data: bytes) -> Item | Result:
    try:
        completion, row, extras = cast("tuple[str, Mapping[str, Any], Mapping[str, Any]]", pickle.loads(data))
    except Exception as error:  # noqa: BLE001 - a class of the controller's may be missing here, or fail in any way
        return Result(problem=f"cannot be given its row: {describe_error(error)}"[:_PROBLEM])
    return Item(completion, row, extras)


def _explain(result: Result) -> Result:
    """Say what to do where the reward has asked a person."""
    asks = type(result.error).__name__ == "BdbQuit" or str(result.error) == "EOF when reading a line"
    return replace(result, problem=result.problem + _NO_TERMINAL) if asks else result
