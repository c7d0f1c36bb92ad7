"""An environment that needs a key, and says whether it has the right one."""

from __future__ import annotations

from typing import Any

KEY = "correct-horse-battery-7"


async def judged(task: Any, client: Any, *, api_key: str, judge: dict[str, Any] | None = None) -> float:
    """Ask once. Raises RuntimeError for another key."""
    if api_key != KEY:
        raise RuntimeError("the judge refused the key")
    await client.chat([{"role": "user", "content": task["prompt"]}])
    return 1.0
