"""The environment of the runs of sessions that are disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from podium_agents import Client

__all__ = ["copied"]

PAUSE_S = 0.1  # the world's own time between two turns, so that faults also strike there


async def copied(task: Mapping[str, Any], client: Client) -> float:
    """Ask for the digits twice. The reward is the share of them that both answers have."""
    said: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    texts = list[str]()
    for _ in range(2):
        reply = await client.chat(said)
        texts.append(reply.text)
        said += [reply.message, {"role": "user", "content": task["prompt"]}]
        await asyncio.sleep(PAUSE_S)
    pairs = [pair for text in texts for pair in zip(text, task["answer"], strict=False)]
    return sum(one == other for one, other in pairs) / (2 * len(task["answer"]))
