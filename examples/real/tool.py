"""A session with a tool: the model is asked for a product, and the right product earns 1.

SmolLM2 cannot multiply, and its own chat template writes no tools: tools.jinja does. The conversation begins with a
call of the tool, because a model of this size does not find the form of a call by itself. After that it calls tools
that do not exist, or writes a product of its own, which is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from podium_agents import Client, converse


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


CALL = {"name": "multiply", "arguments": json.dumps({"a": 12, "b": 15})}
SHOWN = [
    {"role": "user", "content": "What is 12 * 15?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "shown", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "shown", "content": "180"},
    {"role": "assistant", "content": "180"},
]


async def play(task: Mapping[str, Any], client: Client) -> float:
    """The model may call the tool once before it answers."""
    reply = await converse(client, [*SHOWN, *task["prompt"]], tools=[multiply], max_turns=2)
    return float(reply.text.strip() == task["answer"])
