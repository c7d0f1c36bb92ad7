"""An MCP server with a few tools, for the tests. One of them ends it."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ImageContent, ResourceLink, TextResourceContents

server = MCPServer("parts")


@server.tool()
def price(name: str) -> int:
    """Look a price up."""
    return {"bolt": 3}[name]


@server.tool()
def read() -> list[EmbeddedResource | ResourceLink | ImageContent]:
    """Read a drawing."""
    return [
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///bolt.txt", text="M8 x 20")),
        ResourceLink(type="resource_link", name="nut", uri="file:///nut.txt"),
        ImageContent(type="image", data="eHg=", mime_type="image/png"),
    ]


@server.tool(structured_output=False)
def measure() -> CallToolResult:
    """Say something in the structured part alone."""
    return CallToolResult(content=[], structured_content={"thread": "M8", "length": 20})


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
