"""Sending on one socket without ever waiting."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from podium.backends.local.wire import MOST_FDS, send_message, split_message

__all__ = ["Outbox"]


class Outbox:
    """One socket to a host. What it does not take at once is kept in order, with descriptors of its own, until
    :meth:`flush`; ``flush_later`` is called with the socket's number when there is something to flush."""

    def __init__(self, connection: socket.socket, flush_later: Callable[[int], None]) -> None:
        self._connection = connection
        self._flush_later = flush_later
        self._late: deque[tuple[bytes, list[int]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: bytes, fds: Sequence[int]) -> None:
        """Send now if the socket takes it, else later; dropped if the other end is gone. From any thread: nothing comes
        between the parts of one message."""
        parts = [(message, fds)] if len(fds) <= MOST_FDS else split_message(message, fds)
        with self._lock:
            if self._closed:
                return
            for part, some in parts:
                if not self._late:
                    with contextlib.suppress(BlockingIOError):
                        self._send_now(part, some)
                        continue
                self._late.append((part, [os.dup(fd) for fd in some]))
            if self._late:
                self._flush_later(self._connection.fileno())

    def flush(self) -> bool:
        """Send what waits; True when nothing is left."""
        with self._lock:
            while self._late:
                message, fds = self._late[0]
                try:
                    self._send_now(message, fds)
                except BlockingIOError:
                    return False
                self._late.popleft()
                _close_all(fds)
        return True

    def close(self) -> None:
        """Close the socket and drop what waits."""
        with self._lock:
            self._closed = True
            self._connection.close()
            for _, fds in self._late:
                _close_all(fds)
            self._late.clear()

    def _send_now(self, message: bytes, fds: Sequence[int]) -> None:
        try:
            send_message(self._connection, message, fds, wait=False)
        except BlockingIOError:
            raise
        except OSError:
            pass  # it has ended; the server will say so


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
