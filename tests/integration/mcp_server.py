"""An MCP server with three tools, for the tests. One of them ends it."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("parts")


@server.tool()
def price(name: str) -> int:
    """Look a price up."""
    return {"bolt": 3}[name]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
