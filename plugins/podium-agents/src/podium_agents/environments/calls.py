"""Call the functions of an environment. They are a user's code, and may do anything."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, cast

from podium.exceptions import describe_error

__all__ = ["contain_exits", "in_thread", "is_cancelled", "session_counts"]

P = ParamSpec("P")
T = TypeVar("T")

session_counts: Final[ContextVar[Counter[str] | None]] = ContextVar("session_counts", default=None)
"""The ``counts`` of the client whose session runs in this context; None outside of sessions."""


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function that may block in a thread of its own. The thread begins at once and does not keep a process from
    ending.

    If the caller is cancelled, the thread continues, and the function's result is lost.
    """
    run = partial(contextvars.copy_context().run, function, *arguments, **options)
    error, result = await asyncio.wrap_future(_begin(partial(_catch_timeout, run)))
    if error is not None:
        try:
            raise error
        finally:
            error = None  # or the error, its traceback and this frame would hold each other
    return cast(T, result)


def _catch_timeout(run: Callable[[], T]) -> tuple[TimeoutError | None, T | None]:
    """Return a function's TimeoutError and its result. Raised, asyncio would put a new one into the place of its own,
    which has neither the cause, the notes and the attributes of the function's nor its traceback."""
    try:
        return None, run()
    except TimeoutError as error:
        return error, None


def _begin(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own."""
    answer = Future[T]()
    answer.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result = function()
        except StopIteration as error:  # which no coroutine can raise
            answer.set_exception(RuntimeError(describe_error(error)))
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=call, name="podium-session-call", daemon=True).start()
    return answer


class _Threads(ThreadPoolExecutor):
    """Gives each call a thread as :func:`in_thread` does, where asyncio takes no other class: ``asyncio.to_thread`` and
    look-ups of addresses run there. The first sessions that hang would hold the few threads of a pool for ever, and the
    end of the process with them."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _begin(partial(fn, *args, **kwargs))


def is_cancelled() -> bool:
    """Whether somebody cancels the running task. A CancelledError may also be raised by what the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def contain_exits() -> None:
    """Let ``SystemExit`` in a task of a session be an error of that task. Asyncio would end the event loop by it, and
    all other sessions with it. And let no session wait for a thread in which another one hangs."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
        loop.set_default_executor(_Threads())


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
    if session_counts.get() is None:
        return asyncio.Task(work, loop=loop, **how)
    task = asyncio.Task(_without_exit(work), loop=loop, **how)
    task.add_done_callback(lambda _: work.close())  # which matters where it was cancelled before it began
    return task


async def _without_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(describe_error(error)) from error
