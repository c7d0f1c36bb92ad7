"""Messages between the controller and its worker processes, over Unix sockets that keep their bounds (SOCK_SEQPACKET).

A message is the pickle of a tuple:

    to a worker process  ("call", number, target, method, wants result, shared, own)
    to the controller    ("answer", number, status, started, ended, result)
    either way           ("release", numbers of segments that the sender has read)

``shared``, ``own`` and the result are parcels. A *parcel* is (pickle, buffers, segment, blocks): the pickle of a value,
its out-of-band buffers, and the segments of the blocks that it refers to. A small value is in the message. A large one
lies in a segment: the pickle of (pickle, sizes of the buffers), whose size is the parcel's second entry, and then the
buffers. A parcel is None where there are no arguments, or where the result is None.

A segment is sent as its number, its size, and its descriptor. Descriptors that do not fit into one message go before
it, in messages of one byte.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import resource
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from podium.backends.local.shared_memory import INLINE_LIMIT, Lease, SegmentPool
from podium.backends.local.views import map_segment
from podium.errors import SerializationError, StoreFullError
from podium.runtime.codec import Opener, decode, encode

if TYPE_CHECKING:
    from podium.backends.local.store import LocalBlock

__all__ = ["MOST_FDS", "NOTHING", "Inbound", "Message", "Parcel", "Receiver", "Releases"]
__all__ += ["pack", "receive_parcel", "send_message", "split_message", "too_many_files"]

RECEIVE_LIMIT = 6 * INLINE_LIMIT
MOST_FDS = 200  # in one message; the kernel takes 253
ALIGN = 64

# flags as plain integers: combining the enum's members takes longer than the system call saves
_SEND = int(socket.MSG_NOSIGNAL)
_SEND_NOW = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_CTRUNC)
_RECEIVE_NOW = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)

Message = tuple[Any, ...]


class Parcel:
    """A value that can be sent any number of times.

    A large value is copied into its segment when it is first sent, so that the first of several workers is at work
    while the next one's part is copied.

    Attributes:
        leases: The segments that go with the message, in the order of the parcel.
    """

    __slots__ = ("_parts", "_segments", "_where", "_wire", "leases")

    def __init__(
        self, parts: Sequence[bytes | memoryview], segments: SegmentPool, where: str, blocks: Sequence[LocalBlock]
    ) -> None:
        self._parts, self._segments, self._where = parts, segments, where
        self._wire: Message | None = None
        self.leases: list[Lease] = [block.lease for block in blocks]

    @property
    def wire(self) -> Message | None:
        """The parcel as it stands in a message. Raises SerializationError if there is no memory for its segment."""
        if self._parts:
            blocks = [_named(lease) for lease in self.leases]
            data, *buffers = self._parts
            if len(data) + sum(len(buffer) + ALIGN for buffer in buffers) <= INLINE_LIMIT:
                self._wire = (data, [bytearray(buffer) for buffer in buffers], None, blocks)
            else:
                head = pickle.dumps((data, list(map(len, buffers))), 5)
                self._wire = (None, len(head), _named(self._store([head, *buffers])), blocks)
            self._parts = ()
        return self._wire

    def _store(self, parts: Sequence[bytes | memoryview]) -> Lease:
        total = sum(_aligned(len(part)) for part in parts)
        try:
            lease = self._segments.take(total)
            memory = lease.segment.memory
        except OSError as error:
            raise SerializationError(f"no shared memory for {self._where} of {total} bytes: {error}") from error
        at = 0
        for part in parts:
            np.copyto(memory[at : at + len(part)], np.frombuffer(part, dtype=np.uint8))
            at += _aligned(len(part))
        self.leases = [lease, *self.leases]
        return lease


NOTHING = Parcel((), SegmentPool(), "nothing", ())
"""The parcel of a call without arguments, and of the result None."""


def pack(value: Any, segments: SegmentPool, where: str = "a value") -> Parcel:
    """Pickle ``value``, its buffers aside.

    Raises:
        SerializationError: The value does not pickle.
        RefLostError: The value refers to tensors of another cluster which are gone.
    """
    blocks: list[Any] = []
    data, buffers = encode(value, where, blocks)
    if blocks:
        from podium.backends.local.store import brought

        blocks = [brought(block, segments) for block in blocks]
    return Parcel([data, *[buffer.raw() for buffer in buffers]], segments, where, blocks)


class Inbound:
    """A parcel that was received. Read it once, or drop it: either way its segments are released."""

    __slots__ = ("_blocks", "_buffers", "_data", "_lease")

    def __init__(self, data: bytes | None, buffers: Any, lease: Lease | None, blocks: Sequence[Lease]) -> None:
        self._data, self._buffers, self._lease, self._blocks = data, buffers, lease, blocks

    def read(self, where: str = "a value") -> Any:
        """The value. Its tensors may be written without harm to anyone."""
        openers: Sequence[Opener] = ()
        if self._blocks:
            from podium.backends.local.store import LocalBlock

            openers = [partial(LocalBlock, lease) for lease in self._blocks]
            self._blocks = ()
        if self._lease is None:
            if self._data is None:
                raise too_many_files(f"{where} came without its shared memory")
            return decode(self._data, self._buffers, where, openers)
        memory: Any = map_segment(self._lease, self._lease.segment.nbytes)
        self._lease, view = None, memoryview(memory)
        data, sizes = pickle.loads(view[: self._buffers])
        buffers: list[memoryview] = []
        at = _aligned(self._buffers)
        for size in sizes:
            buffers.append(view[at : at + size])
            at += _aligned(size)
        return decode(data, buffers, where, openers)


def receive_parcel(wire: Message, fds: list[int], releases: Releases, segments: SegmentPool) -> Inbound:
    """The parcel that came as ``wire``; takes its descriptors from ``fds``."""
    data, buffers, stored, blocks = wire
    named = [stored, *blocks] if stored else blocks
    if len(fds) < len(named):  # this process could not take them
        for number, _ in named:
            releases.add(number)
        return Inbound(None, (), None, ())
    leases = [segments.adopt(fds.pop(0), nbytes, partial(releases.add, number)) for number, nbytes in named]
    return Inbound(data, buffers, leases.pop(0) if stored else None, leases)


class Releases:
    """Tells the other end which of its segments have been read.

    It never waits, and may be called from within any thread's garbage collection. What the socket does not take at once
    goes with the next message, of any kind and in either direction.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._late: deque[int] = deque()

    def add(self, number: int) -> None:
        self._late.append(number)
        self.flush()

    def flush(self) -> None:
        """Send what the socket has not taken yet, as far as it takes it now."""
        while self._late:
            numbers: list[int] = []
            with contextlib.suppress(IndexError):
                while len(numbers) < 1000:
                    numbers.append(self._late.popleft())
            if not numbers:
                return
            try:
                self._connection.send(pickle.dumps(("release", numbers), 5), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._late.extendleft(reversed(numbers))
                return
            except OSError:
                return  # the other end is gone, and its segments with it


def send_message(connection: socket.socket, message: bytes, fds: Sequence[int], *, wait: bool) -> None:
    """Send one message with at most MOST_FDS descriptors. Raises BlockingIOError if it would wait, unless ``wait``."""
    flags = _SEND if wait else _SEND_NOW
    if not fds:
        connection.send(message, flags)
        return
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    while True:
        try:
            connection.sendmsg([message], ancillary, flags)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # as many descriptors are on their way as this user may have open
                raise
            if not wait:
                raise BlockingIOError(error.errno, error.strerror) from None
        time.sleep(0.001)


def split_message(message: bytes, fds: Sequence[int]) -> list[tuple[bytes, Sequence[int]]]:
    """The messages to send for one that may have too many descriptors, in order."""
    if len(fds) <= MOST_FDS:
        return [(message, fds)]
    late = len(fds) % MOST_FDS or MOST_FDS
    before = [(b"+", fds[at : at + MOST_FDS]) for at in range(0, len(fds) - late, MOST_FDS)]
    return [*before, (message, fds[len(fds) - late :])]


class Receiver:
    """Receives messages."""

    _ANCILLARY = socket.CMSG_SPACE(MOST_FDS * 4)
    _NO_FDS: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(RECEIVE_LIMIT))
        self._into = [self._buffer]
        self._early: list[int] = []  # descriptors of a message that has not come yet
        self._cut = False  # some of them were lost

    def receive(self, connection: socket.socket, *, wait: bool) -> tuple[Message, list[int]]:
        """One message and all its descriptors; no descriptors if this process may not open so many; () at the end.
        Raises BlockingIOError unless ``wait``."""
        count, ancillary, flags, _ = connection.recvmsg_into(
            self._into, self._ANCILLARY, _RECEIVE if wait else _RECEIVE_NOW
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._early = [*self._early, *array.array("i", data[: len(data) - len(data) % 4])]
        self._cut = self._cut or bool(flags & _CUT)
        if count == 1:
            return self.receive(connection, wait=wait)
        message: Message = pickle.loads(self._buffer[:count]) if count else ()
        complete = not self._early and not self._cut
        if complete or not message or message[0] == "release":  # a release may come between two parts
            return message, self._NO_FDS
        if self._cut:
            self._cut = False
            self.close()
        fds, self._early = self._early, []
        return message, fds

    def close(self) -> None:
        """Close descriptors whose message does not come."""
        early, self._early = self._early, []
        for fd in early:
            os.close(fd)


def too_many_files(what: str) -> StoreFullError:
    """``what`` could not be done because this process may not open another file."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return StoreFullError(
        f"{what}: this process has all the {limit} files open that it may, and a reference takes one, and its tensor "
        "another; raise the limit (ulimit -n) or hold fewer at a time"
    )


def _named(lease: Lease) -> tuple[int, int]:
    return lease.segment.number, lease.segment.nbytes


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
