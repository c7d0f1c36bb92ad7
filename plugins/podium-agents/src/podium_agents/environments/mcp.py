"""Tools of MCP servers (Model Context Protocol), by the package ``mcp`` of the extra ``mcp``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.extras import install_command
from podium_agents.environments.contract import SessionError
from podium_agents.environments.tools import Tool, ToolError
from podium_agents.proxies import spare_proxy

__all__ = ["mcp_tools"]

_HTTP_ERROR: Final = "Server returned an error response"
"""What mcp says for a status of HTTP alone, such as 502, with the code of an error within the server."""


@asynccontextmanager
async def mcp_tools(
    server: str, *arguments: str, env: Mapping[str, str] | None = None, time_limit_s: float | None = 30.0
) -> AsyncGenerator[list[Tool]]:
    """Connect to an MCP server for the block, and yield its tools. The model reads the errors that the server answers
    with. If the connection is lost, the call raises :class:`SessionError`, which fails the session.

    >>> async def play(task, client):                                    # doctest: +SKIP
    ...     async with mcp_tools("python", "server.py") as tools:
    ...         reply = await converse(client, [{"role": "user", "content": task["prompt"]}], tools)
    ...     return float(task["answer"] in reply.text)

    Args:
        server: The address of a running server (``http://…`` or ``https://…``), or a command that starts a server,
            which ends with the block.
        arguments: The command's arguments.
        env: Environment variables of the command, in addition to a few usual ones.
        time_limit_s: Limit of a tool call, in seconds. None for none but the session's.

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


def _tool(client: Any, described: Any, label: str, time_limit_s: float | None) -> Tool:
    async def run(arguments: Mapping[str, Any]) -> str:
        try:
            result = await client.call_tool(described.name, dict(arguments))
        except Exception as error:
            if _is_answer(error):
                raise ToolError(f"the MCP server {label!r}: {_reason(error)}") from error
            raise SessionError(
                f"the MCP server {label!r} gave no answer to a call of {described.name}: {_reason(error)}; look at "
                "what the server wrote"
            ) from error
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:  # a server should say the same in text, and may not
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text

    return Tool(described.name, described.description or "", described.input_schema, run, time_limit_s)


def _is_answer(error: Exception) -> bool:
    """Whether an error of a call is what the server answered, or a fault of its answer, and not of the connection."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR

    if isinstance(error, MCPError):
        is_lost = error.code in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR) or error.message == _HTTP_ERROR
        return not is_lost
    return isinstance(error, RuntimeError)  # a result that does not fit the tool's own schema


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
