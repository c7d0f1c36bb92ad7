"""How the functions of an environment are called, which are a stranger's and may do anything."""

from __future__ import annotations

import asyncio

__all__ = ["is_cancelled"]


def is_cancelled() -> bool:
    """Whether somebody cancels the running task. A CancelledError may also be raised by what the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
