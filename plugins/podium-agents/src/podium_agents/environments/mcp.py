"""Tools of MCP servers (Model Context Protocol), by the package ``mcp`` of the extra ``mcp``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from podium.errors import ConfigError
from podium.extras import install_command
from podium_agents.environments.tools import Tool, ToolError
from podium_agents.proxies import spare_proxy

__all__ = ["mcp_tools"]


@asynccontextmanager
async def mcp_tools(
    server: str, *arguments: str, env: Mapping[str, str] | None = None, time_limit_s: float = 30.0
) -> AsyncGenerator[list[Tool]]:
    """Connect to an MCP server for the block, and yield its tools.

    >>> async def play(task, client):                                    # doctest: +SKIP
    ...     async with mcp_tools("python", "server.py") as tools:
    ...         reply = await converse(client, [{"role": "user", "content": task["prompt"]}], tools)
    ...     return float(task["answer"] in reply.text)

    Args:
        server: The address of a running server (``http://…`` or ``https://…``), or a command that starts a server,
            which ends with the block.
        arguments: The command's arguments.
        env: Environment variables of the command, in addition to a few usual ones.
        time_limit_s: Limit of a tool call, in seconds.

    Raises:
        ConfigError: The package is not installed, or the server does not answer.
    """
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        command = install_command("mcp", package="podium-agents")
        raise ConfigError(f"MCP tools need {error.name}, which is not installed: {command}") from None
    is_address = server.startswith(("http://", "https://"))
    if is_address:
        spare_proxy(server, only_here=True)
    where = server if is_address else StdioServerParameters(command=server, args=[*arguments], env=dict(env or {}))
    label = " ".join([server, *arguments])
    entered = False
    try:
        async with Client(where) as client:
            listed_tools: list[Any] = []
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                listed_tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            entered = True
            yield [_tool(client, listed_tool, label, time_limit_s) for listed_tool in listed_tools]
    except Exception as error:
        if entered:
            raise _first(error) from None  # what the block raised, and not the group that the client makes of it
        raise ConfigError(f"the MCP server {label!r} does not answer: {_reason(error)}") from error


def _tool(client: Any, described: Any, label: str, time_limit_s: float) -> Tool:
    async def run(arguments: Mapping[str, Any]) -> str:
        try:
            result = await client.call_tool(described.name, dict(arguments))
        except Exception as error:
            raise ToolError(f"the MCP server {label!r}: {_reason(error)}") from error
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:  # a server should say the same in text, and may not
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text

    return Tool(described.name, described.description or "", described.input_schema, run, time_limit_s)


def _text(block: Any) -> str:
    """What the model reads of a piece of a result. A file has its text in its resource, and a link its address."""
    if block.type == "resource_link":
        return str(block.uri)
    return str(getattr(getattr(block, "resource", block), "text", f"[{block.type}]"))


def _reason(error: BaseException) -> str:
    """The first line of an error, or of the first in a group of errors."""
    first = _first(error)
    return (str(first).partition("\n")[0] or type(first).__name__)[:300]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseException", error.exceptions[0])  # pyright: ignore[reportUnknownMemberType]
    return error
