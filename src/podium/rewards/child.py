"""A grading process: it runs the reward on chunks of items, and sends a line for each."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from podium.rewards.resolve import RewardFn
from podium.rewards.results import Result, encode
from podium.supervisor import children_of

__all__ = ["CHUNK", "ITEM", "REPLACE", "grade_items", "judge"]

ITEM: Final = struct.Struct("<QQ")  # an item's number, and the length of the pickle that follows
CHUNK: Final = struct.Struct("<Q")  # how many items follow
REPLACE: Final = 75  # exit code of a process that earlier items have filled with memory or processes

_MOST_LEFT: Final = 32  # processes that a reward may leave behind in one grading process
_PROBLEM: Final = 2_000  # characters; the line of a result stays under the dispatcher's limit
_TRACEBACK: Final = 20_000


def grade_items(sock: socket.socket, reward: RewardFn, memory_bytes: int | None) -> int:
    """Answer chunks until ``sock`` closes. Returns the exit code of the process."""
    faulthandler.enable()
    _limit_memory(memory_bytes)
    stream = sock.makefile("rb")
    answered = unchecked = 0
    while header := stream.read(CHUNK.size):
        items: list[tuple[int, bytes]] = []
        for _ in range(*CHUNK.unpack(header)):
            number, length = ITEM.unpack(stream.read(ITEM.size))
            items.append((number, stream.read(length)))
        for number, data in items:
            result = _judge_pickled(reward, data)
            full = memory_bytes is not None and result.limit == "memory"
            if not full or answered == 0:  # else earlier items may be the cause: this one has a second try elsewhere
                sock.sendall(encode(number, result))
                answered += 1
            if full:
                return REPLACE
        unchecked += len(items)
        if unchecked >= 2 * _MOST_LEFT:
            unchecked = 0
            if len(children_of(os.getpid())) > _MOST_LEFT:
                return REPLACE
    return 0


def _limit_memory(limit_bytes: int | None) -> None:
    """Allow this process ``limit_bytes`` above what it has; on Linux only."""
    if limit_bytes is None:
        return
    import resource

    with suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = pages * os.sysconf("SC_PAGE_SIZE") + limit_bytes
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _judge_pickled(reward: RewardFn, data: bytes) -> Result:
    try:
        completion, row = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - a class of the controller's may be missing here, or fail in any way
        return Result(problem=f"cannot be given its row: {type(error).__name__}: {error}"[:_PROBLEM])
    return judge(reward, completion, row)


def judge(reward: RewardFn, completion: str, row: Mapping[str, Any]) -> Result:
    """Run ``reward`` once and check what it returns."""
    try:
        value = reward(completion, row)
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # frees what filled the memory
        return Result(problem="raised MemoryError", limit="memory")
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a reward that leaves is a reward that failed
        return Result(None, {}, f"raised {type(error).__name__}: {error}"[:_PROBLEM], _trace()[-_TRACEBACK:])
    if not isinstance(value, Mapping):
        number = _number(value)
        return Result(number, problem="" if number is not None else f"returned {_shown(value)}")
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part)
        if number is None:
            return Result(problem=f"returned {_shown(part)} as part {str(name)[:60]!r}")
        parts[str(name)] = number
    if "score" not in parts:
        names = ", ".join(map(repr, parts)) or "nothing"
        return Result(problem=f'returned a mapping without "score" (it has {names})'[:_PROBLEM])
    return Result(parts["score"], parts)


def _number(value: object) -> float | None:
    """Return a finite float, or None if ``value`` is not a finite number."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - it has __float__
    except Exception:  # noqa: BLE001 - tensors of many elements, overflow, a user's own class: no number, whatever it says
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})"


def _trace() -> str:
    """Return the traceback of the exception in flight, without this module's own frames."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace))
