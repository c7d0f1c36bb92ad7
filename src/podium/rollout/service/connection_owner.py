"""Refuses the other users of this machine: a port of the loopback is open to all of them.

The token alone would do, but a token is written into environments and scripts. Linux says which user owns the other end
of a connection; on other systems the token alone decides. So it does where a service listens at an address that other
machines reach: a user of this machine could come by that address as well.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["OwnUserProtocol", "owner_of", "protocol_at"]

_TABLES: Final = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_HEAD: Final = struct.Struct("=IHHII")  # of a netlink message: length, kind, flags, number, sender
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR, _ANY = 4, 20, 1, 2, 0xFFFFFFFF
_USER_AT: Final = 64  # bytes into struct inet_diag_msg
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
    try:
        return _ask_kernel(client, server)
    except OSError:  # a sandbox without this kind of socket
        return _look_up_owner(client, server)


def _ask_kernel(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Ask the kernel for one connection (sock_diag(7)), which takes microseconds however many there are."""
    ends = struct.pack("!HH", client[1], server[1]) + _pack(client).ljust(16, b"\0") + _pack(server).ljust(16, b"\0")
    about = (
        struct.pack("=BBBBI", _family(client), socket.IPPROTO_TCP, 0, 0, _ANY)
        + ends
        + struct.pack("=III", 0, _ANY, _ANY)
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEAD.pack(_HEAD.size + len(about), _BY_FAMILY, _REQUEST, 1, 0) + about)
        answer = kernel.recv(1 << 13)
    _, kind, *_ = _HEAD.unpack_from(answer)
    if kind == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEAD.size)
        if -code == errno.ENOENT:
            return None
        raise OSError(-code, os.strerror(-code))
    user, inode = struct.unpack_from("=II", answer, _HEAD.size + _USER_AT)
    return user if inode else None  # without an inode it was closed, and belongs to nobody


def _family(end: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in end[0] else socket.AF_INET


def _pack(end: tuple[str, int]) -> bytes:
    return socket.inet_pton(_family(end), end[0])


def _look_up_owner(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Look the connection up in the table of all, which takes milliseconds where there are hundreds."""
    wanted = [_as_hex(client), _as_hex(server)]
    for line in _TABLES[_family(client)].read_text().splitlines()[1:]:
        row = line.split()
        if row[1:3] == wanted and row[9] != "0":
            return int(row[7])
    return None


def _as_hex(address: tuple[str, int]) -> str:
    packed = _pack(address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


class OwnUserProtocol(H11Protocol):
    """Answers every request of other users of this machine by 403. Servers on loopback use it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find out once which user has connected."""
        super().connection_made(transport)
        client, server = self.client, self.server
        if client is None or server is None:
            return
        if _TABLES[_family(client)].exists() and owner_of(client, (server[0], server[1] or 0)) != os.geteuid():
            self.app = _refuse


def protocol_at(listening: socket.socket) -> type[H11Protocol]:
    """Return what answers at a socket: it refuses other users where only this machine reaches the address."""
    return OwnUserProtocol if ipaddress.ip_address(listening.getsockname()[0]).is_loopback else H11Protocol


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    while scope["type"] == "http" and (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSED})
