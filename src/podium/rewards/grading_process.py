"""A grading process: it runs the reward on one item after another, and sends a frame of JSON for each.

The JSON is data alone, so that whoever reads it runs no code of the reward's.
"""

import faulthandler
import json
import os
import pickle
import socket
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from podium.processes import Channel, children_of, limit_memory
from podium.rewards.resolve import ItemReward

__all__ = ["REPLACE", "Result", "decode", "encode", "grade_items", "judge"]

REPLACE: Final = 75  # exit code of a process that earlier items have filled with memory or processes

_MOST_LEFT: Final = 32  # processes that a reward may leave behind in one grading process
_CHECKED_ITEMS: Final = 64  # the processes left behind are counted after this many items
_LARGEST: Final = 3.4028234663852886e38  # of float32, in which rewards train
_PROBLEM: Final = 2_000  # characters; a result stays under the dispatcher's limit
_TRACEBACK: Final = 20_000
_NO_PARTS: Final[Mapping[str, float]] = MappingProxyType({})


class Result(NamedTuple):
    """What is known of one item.

    Attributes:
        score: The reward's score; None if there is a problem.
        parts: The named parts with "score", if the reward returned a mapping.
        problem: What was wrong, as the end of a sentence that begins with "the reward".
        traceback: Where the reward raised.
        limit: The limit that the item ran over: "time", "memory" or "".
    """

    score: float | None = None
    parts: Mapping[str, float] = _NO_PARTS
    problem: str = ""
    traceback: str = ""
    limit: str = ""


def encode(result: Result) -> bytes:
    """Return a score, its parts or a problem, as JSON."""
    if result.score is None:
        text = json.dumps(result[2:])
    else:  # repr writes a finite float as JSON does, and faster
        text = json.dumps(dict(result.parts)) if result.parts else repr(result.score)
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
        case float(score) if _is_finite(score):
            return Result(score)
        case {"score": float(score), **others} as parts if all(map(_is_finite, (score, *others.values()))):
            return Result(score, parts)
        case [str(problem), str(trace), str(limit)]:
            return Result(None, _NO_PARTS, problem, trace, limit)
        case _:
            return Result(problem=f"sent {data[:60]!r}, which is not a result")


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and abs(value) <= _LARGEST


def grade_items(sock: socket.socket, reward: ItemReward, memory_bytes: int | None) -> int:
    """Answer items until ``sock`` closes. Returns the exit code of the process."""
    faulthandler.enable()
    limit_memory(memory_bytes)
    channel = Channel(sock, trusted=True)
    answered, grader = 0, os.getpid()
    while (item := channel.receive()) is not None:
        number, data = item
        result = _judge_pickled(reward, data)
        if os.getpid() != grader:  # the reward returned in a process that it forked, whose parent answers
            os._exit(0)
        full = memory_bytes is not None and result.limit == "memory"
        if not full or answered == 0:  # else earlier items may be the cause: this one has a second try elsewhere
            channel.send(number, encode(result))
            answered += 1
        if full or (answered % _CHECKED_ITEMS == 0 and len(children_of(os.getpid())) > _MOST_LEFT):
            return REPLACE
    return 0


def _judge_pickled(reward: ItemReward, data: bytes) -> Result:
    try:
        completion, row = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - a class of the controller's may be missing here, or fail in any way
        return Result(problem=f"cannot be given its row: {type(error).__name__}: {error}"[:_PROBLEM])
    return judge(reward, completion, row)


def judge(reward: ItemReward, completion: str, row: Mapping[str, Any]) -> Result:
    """Run ``reward`` once and check what it returns."""
    try:
        value = reward(completion, row)
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # frees what filled the memory
        return Result(problem="raised MemoryError", limit="memory")
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a reward that leaves is a reward that failed
        problem = f"raised {type(error).__name__}: {error}"[:_PROBLEM]
        return Result(problem=problem, traceback=_trace(error)[-_TRACEBACK:])
    if not isinstance(value, Mapping):
        number = _number(value)
        return Result(number, problem="" if number is not None else f"returned {_show(value)}")
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part)
        if number is None:
            return Result(problem=f"returned {_show(part)} as part {str(name)[:60]!r}")
        parts[str(name)] = number
    if "score" not in parts:
        names = ", ".join(map(repr, parts)) or "nothing"
        return Result(problem=f'returned a mapping without "score" (it has {names})'[:_PROBLEM])
    return Result(parts["score"], parts)


def _number(value: object) -> float | None:
    """Return a float that is finite in float32 too, or None if ``value`` is no such number."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - it has __float__
    except Exception:  # noqa: BLE001 - tensors of many elements, overflow, a user's own class: no number, whatever it says
        return None
    return number if _is_finite(number) else None


def _show(value: object) -> str:
    return f"{repr(value)[:60]} ({type(value).__name__})"


def _trace(error: BaseException) -> str:
    """Return the traceback of ``error`` without this module's own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
