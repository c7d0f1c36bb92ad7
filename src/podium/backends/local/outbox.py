"""Sending on one socket without ever waiting."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from podium.backends.local.wire import MOST_FDS, send_message, split_message, too_many_files

__all__ = ["Outbox"]


class Outbox:
    """One socket to a worker process. What it does not take at once is kept in order, with descriptors of its own,
    until :meth:`flush`; ``flush_later`` is called with the socket's number when there is something to flush."""

    def __init__(self, connection: socket.socket, flush_later: Callable[[int], None]) -> None:
        self._connection = connection
        self._flush_later = flush_later
        self._late: deque[tuple[bytes, list[int]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, message: bytes, fds: Sequence[int]) -> None:
        """Send now if the socket takes it, else later; dropped if the other end is gone. From any thread: nothing comes
        between the parts of one message.

        Raises:
            StoreFullError: it cannot be kept for later; nothing of it was sent.
        """
        with self._lock:
            if self._closed:
                return
            if len(fds) <= MOST_FDS:
                if not self._late:
                    with contextlib.suppress(BlockingIOError):
                        self._send_now(message, fds)
                        return
                self._late.append((message, _duplicates(fds)))
            else:  # kept before the first part goes, so that the others can follow
                kept = _duplicates(fds)
                self._late.extend((part, list(some)) for part, some in split_message(message, kept))
        if not self.flush():
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


def _duplicates(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError as error:
        _close_all(copies)
        raise too_many_files("a call could not be kept until its worker takes it") from error
    return copies


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
