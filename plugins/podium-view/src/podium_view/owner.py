"""The user who owns a connection on this machine: a port of the loopback is open to all users of the machine.

The token alone would do, but a token is written into environments and scripts. Linux says which user owns the other end
of a connection; on other systems the token alone decides.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["is_own", "owner_of"]

_TABLES: Final = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_HEAD: Final = struct.Struct("=IHHII")  # of a netlink message: length, kind, flags, number, sender
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR, _ANY = 4, 20, 1, 2, 0xFFFFFFFF
_USER_AT: Final = 64  # bytes into struct inet_diag_msg


def is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Whether the client's end of a connection on this machine belongs to this user, or to root, who may do anything.

    True on systems that do not say.
    """
    if not _TABLES[_family(client)].exists():
        return True
    return owner_of(client, server) in (os.geteuid(), 0)


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
