"""How a worker finds another one in its processes: by what it can do, whatever its name and its class are."""

from typing import Any

from podium.errors import ConfigError
from podium.runtime import WorkerContext


def find_sibling(context: WorkerContext, method: str) -> Any | None:
    """Return the colocated worker that has ``method``; None if no worker has it.

    Raises:
        ConfigError: Several workers have the method.
    """
    able = {name: worker for name, worker in context.colocated.items() if hasattr(type(worker), method)}
    if len(able) > 1:
        raise ConfigError(
            f"{context.role} works with the one worker in its processes that has {method!r}, and {' and '.join(able)} "
            "have it: put one of them into other processes"
        )
    return next(iter(able.values()), None)
