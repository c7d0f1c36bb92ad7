"""Refuses the other users of this machine: a port of the loopback is open to all of them.

The token alone would do, but a token is written into environments and scripts. Linux says which user owns the other end
of a connection (/proc/net/tcp); on other systems the token alone decides.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["OwnUserProtocol", "owner_of"]

_TABLE: Final = Path("/proc/net/tcp")
_REFUSED: Final = json.dumps(
    {
        "error": {
            "message": "this service answers only the user who started it; --host 0.0.0.0 opens it to others",
            "type": "permission_error",
            "param": None,
            "code": "other_user",
        }
    }
).encode()


def owner_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the id of the user who holds the client's end of a connection on this machine; None if nobody does."""
    wanted = [_as_hex(client), _as_hex(server)]
    for line in _TABLE.read_text().splitlines()[1:]:
        row = line.split()
        if row[1:3] == wanted and row[9] != "0":  # without an inode it was closed, and belongs to nobody
            return int(row[7])
    return None


def _as_hex(address: tuple[str, int]) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


class OwnUserProtocol(H11Protocol):
    """Answers other users of this machine by 403, whatever they ask, where it listens at the loopback."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look once who has connected."""
        super().connection_made(transport)
        client, server = self.client, self.server
        if client is None or server is None or not ipaddress.ip_address(server[0]).is_loopback:
            return
        if _TABLE.exists() and owner_of(client, (server[0], server[1] or 0)) != os.geteuid():
            self.app = _refuse


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    while scope["type"] == "http" and (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSED})
