"""Environments behind a server of OpenEnv 0.10, by its messages over a WebSocket. Each session has a connection.

podium train grpo --environment.name openenv --environment.options '{url: "http://127.0.0.1:8000"}' ...

acts: text      an answer is the text of one field of an action
acts: fields    a call of the tool ``act`` is an action; the server's schema says which fields it has
acts: tools     the tools of an MCP-style server are the model's
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError, PodiumError
from podium.exceptions import describe_error
from podium.extras import install_command
from podium_agents import Outcome, SessionError, Tool, Toolbox, ToolError
from podium_agents.proxies import spare_proxy

if TYPE_CHECKING:
    from podium_agents import Client, Task

__all__ = ["OpenEnv"]

_LONGEST: Final = 100 << 20  # bytes of a message, OpenEnv's own limit
_ACTS: Final = ("text", "fields", "tools")
_ACT: Final = "act"  # the tool whose arguments are an action
_LOST: Final = "transport_error"  # OpenEnv's name for a tool that could not be reached
_SCHEMA_LIMIT_S: Final = 30.0


class OpenEnv:
    """An environment in which the model acts by what it says, or by calls of tools.

    Args:
        url: The server's address, ``http://…`` or ``ws://…``.
        acts: How the model acts: by the ``text`` of its answers, by calls of the tool ``act``, which has the ``fields``
            of an action as its parameters, or by calls of the server's MCP ``tools``.
        action: The field of an action that gets the model's answer, where it acts by text.
        observation: The field of an observation that the model reads; by default all of it, as JSON.
        turns: The most answers of the model. An answer without a call ends an episode with tools.
        reset: Further arguments of reset. The task's ``seed``, where it has one, is among them in any case.

    Raises:
        ConfigError: The package websockets is not installed, or ``acts`` is none of the three.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "",
        turns: int = 20,
        reset: Mapping[str, Any] | None = None,
        acts: str = "text",
    ) -> None:
        if acts not in _ACTS:
            raise ConfigError(f"environment.options.acts = {acts!r}: expected {', '.join(_ACTS)}")
        self._check_installed()
        spare_proxy(url, only_here=True)
        base = url.rstrip("/").replace("http://", "ws://", 1).replace("https://", "wss://", 1)
        self._url = base if base.endswith("/ws") else f"{base}/ws"
        self._action, self._observation, self._turns, self._reset = action, observation, turns, dict(reset or {})
        self._acts, self._schema = acts, None

    def _check_installed(self) -> None:
        try:
            import websockets.asyncio.client  # pyright: ignore[reportMissingImports]  # noqa: F401 - it is only tried
        except ImportError:
            raise ConfigError(
                "environment.name = 'openenv' needs websockets, which is not installed: "
                f"{install_command('openenv', package='podium-openenv')}"
            ) from None

    async def play(self, task: Task, client: Client) -> Outcome:
        """Reset the environment, and let the model act until it is done. Each step's reward is that of its turn."""
        seed = {"seed": task["seed"]} if "seed" in task else {}
        async with self._connected() as socket:
            line = _Line(socket, self._url)
            episode = _Episode(await self._ask(line, {"type": "reset", "data": {**self._reset, **seed}}))
            first = "\n\n".join(filter(None, [str(task.get("prompt") or ""), self._text(episode.step)]))
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": first}]
            act = partial(self._act, line, client, episode)
            box = None if self._acts == "text" else Toolbox(await self._tools(line, act))
            for _ in range(self._turns):
                if episode.is_done:
                    break
                reply = await client.chat(messages, tools=box.schemas if box else ())
                if box is None:
                    await act({self._action: reply.text})
                    messages = [*reply.messages, {"role": "user", "content": self._text(episode.step)}]
                elif reply.tool_calls:
                    messages = [*reply.messages, *await box.answer(reply.tool_calls)]
                else:
                    break
            await socket.send(json.dumps({"type": "close"}))
        return Outcome(score=0.0, parts={"done": float(episode.is_done)})

    async def _act(
        self, line: _Line, client: Client, episode: _Episode, action: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Take a step. Its reward is that of the model's latest answer."""
        if episode.is_done:
            raise ToolError("the episode is over")
        episode.step = await self._ask(line, {"type": "step", "data": dict(action)})
        if episode.step.get("reward"):
            client.reward(float(episode.step["reward"]))
        return episode.step

    async def _tools(self, line: _Line, act: Any) -> list[Tool]:
        """The tools by which the model acts."""
        if self._acts == "fields":
            schema = await self._read_schema()
            return [_make_tool(_ACT, "Act in the environment.", schema, partial(self._call_act, act))]
        step = await self._ask(line, {"type": "step", "data": {"type": "list_tools"}})
        described = (step.get("observation") or {}).get("tools")
        if not described:
            raise PodiumError(
                f"OpenEnv at {self._url} has no MCP tools: set environment.options.acts to fields or text"
            )
        return [
            _make_tool(
                str(entry["name"]), str(entry.get("description") or ""), entry.get("input_schema") or {},
                partial(self._call_tool, act, str(entry["name"])),
            )
            for entry in described
        ]  # fmt: skip

    async def _call_act(self, act: Any, arguments: Mapping[str, Any]) -> str:
        return self._text(await self._step(act, arguments))

    async def _call_tool(self, act: Any, name: str, arguments: Mapping[str, Any]) -> str:
        step = await self._step(act, {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        observation = step.get("observation") or {}
        if error := observation.get("error"):
            what = str(error.get("message") if isinstance(error, Mapping) else error)
            if isinstance(error, Mapping) and error.get("error_type") == _LOST:
                raise SessionError(f"OpenEnv at {self._url} did not reach the tool {name}: {what}")
            raise ToolError(what)
        return _show_result(observation.get("result")) if "result" in observation else self._text(step)

    async def _step(self, act: Any, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take a step for a call of a tool. What the server refuses is the model's to hear."""
        try:
            return await act(action)
        except _RefusedAction as error:
            raise ToolError(str(error)) from None

    async def _read_schema(self) -> Mapping[str, Any]:
        """The JSON schema of an action, which the server says once, without what says nothing to the model."""
        if self._schema is None:
            url = (
                self._url.removesuffix("/ws").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
                + "/schema"
            )
            try:
                described = await asyncio.to_thread(_fetch, url)
                schema = dict(described["action"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise PodiumError(f"OpenEnv at {url} does not say what its actions are: {error}") from None
            fields = {name: entry for name, entry in schema.get("properties", {}).items() if name != "metadata"}
            self._schema = {**schema, "type": "object", "properties": fields}
        return self._schema

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

    async def _ask(self, line: _Line, message: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await line.ask(message)
        if answer.get("type") == "error":
            data = answer.get("data", {})
            what = f"OpenEnv at {self._url}: {data.get('message')} ({data.get('code')})"
            if message["type"] == "step" and data.get("code") == "VALIDATION_ERROR":
                if self._acts != "text":
                    raise _RefusedAction(str(data.get("message")))
                what += (
                    f"; environment.options.action = {self._action!r} names the field that gets the answer; with "
                    "environment.options.acts = fields, the model fills all fields of an action"
                )
            raise SessionError(what)
        return answer.get("data", {})

    def _text(self, step: Mapping[str, Any]) -> str:
        observation = step.get("observation") or {}
        if self._observation:
            if self._observation not in observation:
                fields = ", ".join(observation)
                raise SessionError(
                    f"environment.options.observation = {self._observation!r}: the observation has {fields}"
                )
            return str(observation[self._observation])
        return json.dumps(
            {name: value for name, value in observation.items() if name != "metadata"}, ensure_ascii=False
        )


class _Line:
    """A connection. Its answers name no request: each is the answer to the earliest request that has none."""

    def __init__(self, socket: Any, url: str) -> None:
        self._socket, self._url = socket, url
        self._is_waiting = False

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request, and return the answer to it.

        Raises:
            SessionError: No answer came; or an earlier request has none, because its caller was cancelled or failed.
        """
        if self._is_waiting:
            raise SessionError(
                f"OpenEnv at {self._url}: an earlier request on this connection has had no answer, and its late answer "
                "would be taken for the next one's: raise environment.options.time_limit_s if steps take so long"
            )
        text = json.dumps(message)
        self._is_waiting = True
        try:
            await self._socket.send(text)
            answer = json.loads(await self._socket.recv())
            if not isinstance(answer, dict):
                raise TypeError(f"expected a JSON object, received {type(answer).__name__}")
        except Exception as error:
            raise SessionError(
                f"OpenEnv at {self._url} gave no answer to {message['type']}: {describe_error(error)}; look at what "
                "the server wrote"
            ) from error
        self._is_waiting = False
        return answer


class _Episode:
    """The latest step of an episode."""

    def __init__(self, step: Mapping[str, Any]) -> None:
        self.step = step

    @property
    def is_done(self) -> bool:
        return bool(self.step.get("done"))


class _RefusedAction(PodiumError):
    """An action that does not have the form of the server's actions."""


def _make_tool(
    name: str, description: str, parameters: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Awaitable[str]]
) -> Tool:
    """A tool whose calls are steps. It has no limit of its own: a step that the model no longer waits for is taken all
    the same. The model hears what it did wrong; any other error fails the session, as where the model acts by text."""

    async def run_step(arguments: Mapping[str, Any]) -> str:
        try:
            return await run(arguments)
        except (ToolError, SessionError):
            raise
        except Exception as error:
            raise SessionError(describe_error(error)) from error

    return Tool(name, description, parameters, run_step, None)


def _fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_SCHEMA_LIMIT_S) as answer:
        return json.load(answer)


def _show_result(result: Any) -> str:
    """What the model reads of the result of an MCP tool: its data, or else its texts."""
    if isinstance(result, Mapping):
        if result.get("data") is not None:
            result = result["data"]
        elif isinstance(result.get("content"), list):
            texts = [entry.get("text") for entry in result["content"] if isinstance(entry, Mapping)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
