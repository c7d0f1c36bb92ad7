"""Messages between two processes of this machine. Every message is a frame:

    number (8 bytes) · length of the body (8 bytes) · body

The number says what the message is about: an item, a session, a request. A frame without a body takes back what was
sent under its number: whoever works on it may stop.

Bodies on their way to a child process may be pickles. Bodies that come from a user's code are JSON or shorter texts,
because reading a pickle would run whatever that code has written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from podium.processes.limits import LONGEST_BODY

if TYPE_CHECKING:
    import asyncio

Frame = tuple[int, bytes]
"""The number and the body of a message."""
HEADER: Final = struct.Struct("<QQ")

_READ_BYTES: Final = 1 << 18
_DESCRIPTOR_SPACE: Final = socket.CMSG_SPACE(16 * array("i").itemsize)  # for those that come with one frame
_CLOSED_BY_EXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # which macOS lacks


class FrameError(ValueError):
    """What came through a channel is no frame of acceptable length."""


def make_frame(number: int, body: bytes = b"") -> bytes:
    """Return a frame as it travels."""
    return HEADER.pack(number, len(body)) + body


class Channel:
    """One end of a connection between two processes.

    Args:
        connection: A stream socket.
        trusted: The other end runs no user's code. Its frames may have any length and bring file descriptors, with
            which a user's code could fill the memory and the table of open files of this process.
        longest: The most bytes of the body of a frame from an end that is not trusted.

    Attributes:
        data: What has come of a frame that is not here as a whole.
        descriptors: The descriptors that have come, a list for each frame that brought some.
    """

    def __init__(self, connection: socket.socket, *, trusted: bool = False, longest: int = LONGEST_BODY) -> None:
        self.connection = connection
        self.data = bytearray()
        self.descriptors: deque[list[int]] = deque()
        self._trusted = trusted
        self._longest = sys.maxsize if trusted else longest
        self._frames: deque[Frame] = deque()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor of the connection, as select needs it; -1 when it is closed."""
        return self.connection.fileno()

    def send(self, number: int, body: bytes = b"", *descriptors: int) -> None:
        """Send a frame. Any thread may call this. Raises OSError if the other end is gone."""
        self.write(make_frame(number, body), *descriptors)

    def write(self, frames: bytes, *descriptors: int) -> None:
        """Send what :func:`make_frame` has made, and ``descriptors`` with the first of them."""
        with self._sending:
            if descriptors:
                frames = frames[socket.send_fds(self.connection, [frames], descriptors) :]
            self.connection.sendall(frames)

    def receive(self) -> Frame | None:
        """Wait for the next frame. Returns None when the other end is closed.

        Raises:
            FrameError: The frame is too long.
            TimeoutError: The connection has a time limit, which has passed.
        """
        while not self._frames:
            frames = self.read()
            if frames is None:
                return None
            self._frames.extend(frames)
        return self._frames.popleft()

    def read(self, *, wait: bool = True) -> list[Frame] | None:
        """Read once, and return the frames that are here as a whole, up to one that is too long. Returns None when the
        other end is closed.

        Raises:
            FrameError: The first frame is too long.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            space = _DESCRIPTOR_SPACE if self._trusted else 0
            data, ancillary, *_ = self.connection.recvmsg(_READ_BYTES, space, flags | _CLOSED_BY_EXEC)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        if not data:
            return None
        self.descriptors.extend([*array("i", descriptors)] for *_, descriptors in ancillary)
        self.data += data
        return self._take()

    def head(self) -> tuple[int, int] | None:
        """Return the number and the length of the body of a frame that has begun to arrive."""
        return HEADER.unpack_from(self.data) if len(self.data) >= HEADER.size else None

    def _take(self) -> list[Frame]:
        head, frames = self.head(), list[Frame]()
        if head is None:
            return frames
        if head[1] > self._longest:
            raise FrameError(f"a frame of {head[1]:,} bytes is longer than {self._longest:,}")
        if HEADER.size + head[1] > len(self.data):  # a long frame, of which each read brings a part
            return frames
        data, start = bytes(self.data), 0
        while len(data) - start >= HEADER.size:
            number, length = HEADER.unpack_from(data, start)
            begin = start + HEADER.size
            stop = begin + length
            if length > self._longest or stop > len(data):
                break
            frames.append((number, data[begin:stop]))
            start = stop
        del self.data[:start]
        return frames

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


class Requests:
    """Requests over a channel, and their answers, each under the number of its request. Any thread may ask.

    Args:
        channel: Where requests go, and answers come from.
        settle: Sets the result of a request from the body of its answer, or the exception.
    """

    def __init__(self, channel: Channel, settle: Callable[[Future[Any], bytes], None]) -> None:
        self._channel, self._settle = channel, settle
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}

    def send(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request as JSON. The answer is the future's result. Raises OSError if the other end is gone."""
        number = next(self._numbers)
        answer = self.expect(number)
        self._channel.send(number, json.dumps(request).encode())
        return answer

    def expect(self, number: int) -> Future[Any]:
        """Return the future of what the other end may say under a number. Requests count from 1."""
        answer = self._pending[number] = Future[Any]()
        return answer

    def cancel(self, answer: Future[Any]) -> None:
        """Tell the other end that nobody waits for an answer any more."""
        for number in [number for number, future in self._pending.copy().items() if future is answer]:
            with contextlib.suppress(OSError):
                self._channel.send(number)

    def settle_until_end(self) -> None:
        """Take in answers until the other end is closed."""
        while (frame := self._channel.receive()) is not None:
            number, body = frame
            answer = self._pending.pop(number, None)
            if answer is not None and answer.set_running_or_notify_cancel():
                self._settle(answer, body)

    def fail(self, error: Exception) -> None:
        """Have every request without an answer raise ``error``."""
        with contextlib.suppress(KeyError):
            while True:
                answer = self._pending.popitem()[1]
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)


async def read_frame(reader: asyncio.StreamReader, longest: int = LONGEST_BODY) -> Frame | None:
    """Wait for the next frame of a stream. Returns None when the other end is closed, within a frame too.

    Raises:
        FrameError: The frame is too long.
    """
    try:
        number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        if length > longest:
            raise FrameError(f"a frame of {length:,} bytes is longer than {longest:,}")
        return number, await reader.readexactly(length)
    except (EOFError, ConnectionResetError):
        return None
