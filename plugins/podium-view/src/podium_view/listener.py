"""The listening socket of an HTTP service: who may connect, how long a client may take, and how many may connect.

    kernel ──▶ Listener.accept ──▶ Visitor ──▶ a server of HTTP, which tells the visitor the phase of its request
                 │    └─ another user of this machine, or no room: answered and closed at once
                 └────── a thread that looks every second, and closes visitors that owe bytes for too long

Servers of asyncio and of threads use it alike: a :class:`Listener` is the socket that they listen at, and a
:class:`Visitor` the socket that they read from. This module imports nothing outside of the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import logging
import resource
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final

from podium.processes import raise_descriptor_limit
from podium_view.owner import is_own

__all__ = ["IDLE_S", "LIMIT_S", "Listener", "Phase", "Visitor"]

LIMIT_S: Final = 10.0  # for the whole head of a request, and for the next bytes of its body
IDLE_S: Final = 60.0  # that a client may keep a connection between two requests, or leave an answer unread

_LOOK_S: Final = 1.0
_SHARE: Final = 3  # the part of the open files that connections may be; a load balancer opens a second one for each
_REFUSED_AT_ONCE: Final = 64  # before the server does something else
_MOST: Final = 4096

_log = logging.getLogger("podium.service")


class Phase(Enum):
    """What a connection waits for."""

    SILENT = auto()  # its first byte
    HEAD = auto()  # the rest of the head of a request
    BODY = auto()  # the next bytes of the body
    ANSWER = auto()  # the service
    REST = auto()  # the end of what the client sends although it has its answer
    IDLE = auto()  # the next request
    LEAVING = auto()  # its server, which closes it


_EVICTED: Final = (Phase.IDLE, Phase.SILENT, Phase.HEAD, Phase.REST)  # where there is no room, in this order


class Visitor(socket.socket):
    """The connection of a client.

    Attributes:
        phase: What it waits for. The server enters the phases that follow the head of a request.
        since_s: When the phase began, or its last byte came or went.
        unread: How many bytes of answers have been sent, and how many of them the client's machine has not taken yet.
    """

    listener: Listener
    phase = Phase.SILENT
    since_s = 0.0
    looks = 0  # that have found it overdue, without a byte between them
    unread = (0, 0)
    _sent = 0

    def enter(self, phase: Phase) -> None:
        """Begin another phase. A phase that goes on has the limit that it has."""
        if phase is not self.phase and self.phase is not Phase.LEAVING:
            self.phase, self.since_s = phase, self.listener.clock()

    def recv(self, *args: Any) -> bytes:
        """As of a socket."""
        data = super().recv(*args)
        self._note_bytes(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket."""
        count = super().recv_into(buffer, nbytes, flags)
        self._note_bytes(count)
        return count

    def send(self, *args: Any) -> int:
        """As of a socket."""
        count = super().send(*args)
        self._note_sent(count)
        return count

    def sendmsg(self, *args: Any) -> int:
        """As of a socket."""
        count = super().sendmsg(*args)
        self._note_sent(count)
        return count

    def close(self) -> None:
        """As of a socket."""
        with self.listener.lock:  # so that the thread that looks never shuts down the next user of the descriptor
            if self.listener.visitors.get(self.fileno()) is self:
                del self.listener.visitors[self.fileno()]
            super().close()

    def end(self, status: str = "", reason: str = "") -> None:
        """End the connection, with an answer if one is due. Its server sees the end of the client's bytes."""
        self.enter(Phase.LEAVING)
        with suppress(OSError):
            if status:
                super().send(_write_answer(status, reason), socket.MSG_DONTWAIT)
            self.shutdown(socket.SHUT_RDWR)

    def _note_bytes(self, count: int) -> None:
        if count and self.phase in (Phase.SILENT, Phase.IDLE):
            self.since_s = self.listener.clock() if self.phase is Phase.IDLE else self.since_s
            self.phase = Phase.HEAD
        elif count and self.phase is Phase.BODY:
            self.since_s = self.listener.clock()

    def note_reading(self) -> None:
        """Wait on for an answer that is not sent yet, or of which the client has read more since the last call."""
        queued = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self, termios.TIOCOUTQ, queued)
        unread = (self._sent, int.from_bytes(queued, sys.byteorder))
        if not unread[1] or unread != self.unread:
            self.unread, self.since_s = unread, self.listener.clock()

    def _note_sent(self, count: int) -> None:
        self._sent += count
        if self.phase in (Phase.IDLE, Phase.REST):  # an answer that its client reads slowly
            self.since_s = self.listener.clock()


class Listener(socket.socket):
    """The socket that a service listens at.

    On loopback it answers only this user and root: a port there is open to all users of the machine. The kernel says
    whose a connection is. At other addresses the token alone decides.

    Args:
        listening: The socket, which belongs to the listener from now on.
        most: The most connections; never more than a third of the files that this process may open.
        limit_s: The time for the head of a request, and for the next bytes of a body.
        idle_s: The time between two requests, and for the next bytes of an answer to be read.
        look_s: The time between two looks at what is overdue.
        clock: The current time, in seconds.

    Attributes:
        visitors: The open connections, by descriptor.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        most: int = _MOST,
        limit_s: float = LIMIT_S,
        idle_s: float = IDLE_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self.setblocking(False)
        # Connections inherit this. Without it the body of an answer waits 40 ms for the client to acknowledge the head;
        # asyncio sets it only where a socket was made with the number of the protocol.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raise_descriptor_limit()
        self.visitors: dict[int, Visitor] = {}
        self.lock = threading.RLock()
        self.clock = clock
        self._most, self._limit_s, self._idle_s = most, limit_s, idle_s
        self._own_only = ipaddress.ip_address(self.getsockname()[0]).is_loopback
        self._warned = False
        self._closed_now = threading.Event()
        threading.Thread(target=self._watch, args=(look_s,), name="podium-listener", daemon=True).start()

    @property
    def most(self) -> int:
        """The most connections at the same time."""
        return max(1, min(self._most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE))

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that may stay. Those that may not are answered and closed.

        Raises:
            BlockingIOError: None is here now.
        """
        for _ in range(_REFUSED_AT_ONCE):
            if self._leaving() >= _REFUSED_AT_ONCE:
                break  # the server closes those first
            try:
                plain, address = super().accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room():
                    break
                raise
            if self._own_only and not is_own(address[:2], plain.getsockname()[:2]):
                _refuse(plain, "403 Forbidden", _OTHER_USER, "other_user")
                continue
            with self.lock:
                if len(self.visitors) >= self.most and not self._make_room():
                    _refuse(plain, "503 Service Unavailable", _FULL, "overloaded")
                    continue
                visitor = Visitor(plain.family, plain.type, plain.proto, fileno=plain.detach())
                visitor.listener, visitor.since_s = self, self.clock()
                visitor.setblocking(True)
                self.visitors[visitor.fileno()] = visitor
                return visitor, address
        raise BlockingIOError(errno.EAGAIN, "no connection waits that may stay")

    def look(self) -> None:
        """Close what is overdue. A connection is closed by the second look that finds it so, because after a pause of
        the whole process bytes may be here that nobody has read.
        """
        now_s = self.clock()
        with self.lock:
            for visitor in list(self.visitors.values()):
                if visitor.phase is Phase.ANSWER:
                    visitor.note_reading()
                limit_s = self._idle_s if visitor.phase in (Phase.ANSWER, Phase.IDLE) else self._limit_s
                visitor.looks = visitor.looks + 1 if now_s - visitor.since_s > limit_s else 0
                if visitor.looks < 2:
                    continue
                if visitor.phase in (Phase.HEAD, Phase.BODY):
                    what = "the whole head" if visitor.phase is Phase.HEAD else "more of the body"
                    visitor.end("408 Request Timeout", f"{what} of the request did not come within {limit_s:g} s")
                else:
                    visitor.end()

    def close(self) -> None:
        """Listen no more. Connections stay with their server."""
        self._closed_now.set()
        super().close()

    def _watch(self, look_s: float) -> None:
        while not self._closed_now.wait(look_s):
            self.look()

    def _make_room(self) -> bool:
        """End a connection: the one that is idle for the longest time, or else one whose request has no complete head.

        Return whether there is room, or will be once the server has closed what has ended.
        """
        with self.lock:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "The service at port %d has %d connections, and its limit of %d open files (ulimit -n) allows no "
                    "more. It closes idle connections for new ones, and refuses new ones if none is idle. Raise the "
                    "limit.",
                    self.getsockname()[1], len(self.visitors), resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                )  # fmt: skip
            evictable = [visitor for visitor in self.visitors.values() if visitor.phase in _EVICTED]
            if evictable:
                min(evictable, key=lambda one: (_EVICTED.index(one.phase), one.since_s)).end()
            return bool(evictable)

    def _leaving(self) -> int:
        with self.lock:
            return sum(visitor.phase is Phase.LEAVING for visitor in self.visitors.values())


_OTHER_USER: Final = "this service answers only the user who started it; podium serve --host 0.0.0.0 opens it to others"
_FULL: Final = "the service has as many connections as it can have: try again later"


def _refuse(connection: socket.socket, status: str, reason: str, code: str) -> None:
    """Answer a connection of which nothing was read, and close it."""
    with connection, suppress(OSError):
        connection.setblocking(False)
        connection.send(_write_answer(status, reason, code))


def _write_answer(status: str, reason: str, code: str | None = None) -> bytes:
    kind = "permission_error" if status.startswith("403") else "invalid_request_error"
    error = {"message": reason, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    retry = "Retry-After: 1\r\n" if status.startswith("503") else ""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{retry}Content-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
