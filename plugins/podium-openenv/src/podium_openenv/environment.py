"""Environments behind a server of OpenEnv 0.10, by its messages over a WebSocket. Each session has a connection.

podium train grpo --environment.name openenv --environment.options '{url: "http://127.0.0.1:8000"}' ...
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError, PodiumError
from podium.extras import install_command
from podium.rollout.environments import Outcome

if TYPE_CHECKING:
    from podium.rollout.environments import Client, Task

__all__ = ["OpenEnv"]

_LONGEST: Final = 100 << 20  # bytes of a message, OpenEnv's own limit


class OpenEnv:
    """An environment whose actions have a field for what the model says.

    Args:
        url: The server's address, ``http://…`` or ``ws://…``.
        action: The field of an action that gets the model's answer.
        observation: The field of an observation that the model reads; by default all of it, as JSON.
        turns: The most answers of the model.
        reset: Further arguments of reset. The task's ``seed``, where it has one, is among them in any case.

    Raises:
        ConfigError: The package websockets is not installed.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "",
        turns: int = 20,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import websockets.asyncio.client  # pyright: ignore[reportMissingImports]  # noqa: F401 - it is only tried
        except ImportError:
            raise ConfigError(
                "environment.name = 'openenv' needs websockets, which is not installed: "
                f"{install_command('openenv', package='podium-openenv')}"
            ) from None
        base = url.rstrip("/").replace("http://", "ws://", 1).replace("https://", "wss://", 1)
        self._url = base if base.endswith("/ws") else f"{base}/ws"
        self._action, self._observation, self._turns, self._reset = action, observation, turns, dict(reset or {})

    async def play(self, task: Task, client: Client) -> Outcome:
        """Reset the environment, and let the model act until it is done. Each step's reward is that of its turn."""
        messages: list[dict[str, Any]] = []
        seed = {"seed": task["seed"]} if "seed" in task else {}
        async with self._connected() as socket:
            step = await self._ask(socket, {"type": "reset", "data": {**self._reset, **seed}})
            for _ in range(self._turns):
                if step.get("done"):
                    break
                first = str(task.get("prompt") or "") if not messages else ""
                messages.append({"role": "user", "content": "\n\n".join(filter(None, [first, self._text(step)]))})
                reply = await client.chat(messages)
                messages.append(reply.message)
                step = await self._ask(socket, {"type": "step", "data": {self._action: reply.text}})
                if step.get("reward"):
                    client.reward(float(step["reward"]))
            await socket.send(json.dumps({"type": "close"}))
        return Outcome(score=0.0, parts={"done": float(bool(step.get("done")))})

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        from websockets.asyncio.client import connect  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        opening: Any = connect(self._url, max_size=_LONGEST, proxy=None)
        try:
            socket = await opening
        except OSError as error:
            raise PodiumError(f"environment.options.url: nobody answers at {self._url}: {error}") from None
        try:
            yield socket
        finally:
            await socket.close()

    async def _ask(self, socket: Any, message: Mapping[str, Any]) -> Mapping[str, Any]:
        await socket.send(json.dumps(message))
        answer = json.loads(await socket.recv())
        if answer.get("type") == "error":
            data = answer.get("data", {})
            what = f"OpenEnv at {self._url}: {data.get('message')} ({data.get('code')})"
            if message["type"] == "step" and data.get("code") == "VALIDATION_ERROR":
                what += f"; environment.options.action = {self._action!r} names the field that gets the answer"
            raise PodiumError(what)
        return answer.get("data", {})

    def _text(self, step: Mapping[str, Any]) -> str:
        observation = step.get("observation") or {}
        if self._observation:
            if self._observation not in observation:
                fields = ", ".join(observation)
                raise PodiumError(
                    f"environment.options.observation = {self._observation!r}: the observation has {fields}"
                )
            return str(observation[self._observation])
        return json.dumps(
            {name: value for name, value in observation.items() if name != "metadata"}, ensure_ascii=False
        )
