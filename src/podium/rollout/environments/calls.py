"""How the functions of an environment are called, which are a stranger's and may do anything."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Final, ParamSpec, TypeVar

__all__ = ["in_thread", "is_cancelled", "session_counts"]

P = ParamSpec("P")
T = TypeVar("T")

session_counts: Final[ContextVar[Counter[str] | None]] = ContextVar("session_counts", default=None)
"""The ``counts`` of the client whose session runs in this context; None outside of sessions."""


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that may block in a thread of its own, which begins at once and hinders no process from ending.

    Where the caller is cancelled, the thread goes on, and what the function returns is lost.
    """
    answer, context = Future[T](), contextvars.copy_context()
    answer.set_running_or_notify_cancel()

    def call() -> None:
        try:
            found = context.run(function, *arguments, **options)
        except StopIteration as error:  # which no coroutine can raise
            answer.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=call, name="podium-session-call", daemon=True).start()
    return await asyncio.wrap_future(answer)


def is_cancelled() -> bool:
    """Whether somebody cancels the running task. A CancelledError may also be raised by what the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
