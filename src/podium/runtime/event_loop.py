"""The event loop of a worker process, and results that are still to come."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import CoroutineType
from typing import Any, cast

from podium.exceptions import format_error, name_class
from podium.runtime.calls.call import Call

UNDONE: tuple[type[Any], ...] = (CoroutineType, asyncio.Future, Future, Call)
"""What an endpoint may return for a result that is still to come."""


async def wait_for_result(value: Any) -> Any:
    """``value`` itself, or what comes of it where it is a coroutine or a future."""
    while isinstance(value, UNDONE):
        value = await (_wait_for_future(cast("Future[Any]", value)) if isinstance(value, Future) else value)
    return value


async def _wait_for_future(future: Future[Any]) -> Any:
    """The result of ``future``. ``asyncio.wrap_future`` waits for ever where it failed with a StopIteration."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def note_end(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(note_end)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        future.cancel()
        raise
    return future.result()


def run_loop(runner: asyncio.Runner, ends: threading.Event) -> None:
    """Serve until ``ends`` is set and the loop stopped. The runner then cancels the tasks that still run, and closes
    the loop. What one of them does, such as ``loop.stop()`` or ``sys.exit()`` in a callback, does not end the others.
    """
    with runner:
        while not ends.is_set():
            try:
                runner.get_loop().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                logging.getLogger("podium").error(
                    "%s in the event loop, which goes on: %s", name_class(error), format_error(error)
                )
