"""Messages between the controller and its hosts, over Unix sockets that keep message boundaries (SOCK_SEQPACKET).

A value travels as a *parcel*: its pickle, and its out-of-band buffers laid end to end. A small parcel is part of the
message; a large one lies in a segment, and the message carries the segment's descriptor. So it does for the blocks that
the value refers to, which are segments too. Descriptors that one message cannot carry go before it.

    message  to a host:         C call header-length header parcel(shared) [parcel(own)]     R number …   (released
             to the controller: A call status started ended parcel                          R number …    segments)
             either way:        F                      (more descriptors of the next message)

The header is the pickle of (target, method, wants the result, has own); a host meets few of them, and keeps them read.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import resource
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from podium.backends.local.segments import Lease, SegmentPool
from podium.backends.local.views import map_segment
from podium.errors import SerializationError, StoreFullError
from podium.runtime.codec import Opener, decode, encode

if TYPE_CHECKING:
    from podium.backends.local.store import LocalBlock

__all__ = [
    "ANSWER",
    "CALL",
    "EMPTY",
    "INLINE_LIMIT",
    "MOST_FDS",
    "RELEASE",
    "STATUSES",
    "Inbound",
    "Parcel",
    "Receiver",
    "Releases",
]
__all__ += ["pack", "read_answer", "read_parcel", "released", "send_message", "split_message", "too_many_files"]

INLINE_LIMIT = 32 << 10  # bytes of a parcel that still go in the message; below it, descriptors cost more than copies
RECEIVE_LIMIT = 6 * INLINE_LIMIT
MOST_FDS = 200  # in one message; the kernel takes 253
ALIGN = 64
PLAIN = (int, float, str, bool, bytes, type(None))

# flags as plain integers: combining the enum's members takes longer than the system call saves
_SEND = int(socket.MSG_NOSIGNAL)
_SEND_NOW = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_CTRUNC)
_RECEIVE_NOW = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)

CALL = struct.Struct("<cQH")  # "C", call, bytes of header
ANSWER = struct.Struct("<cQBQQ")  # "A", call, status, started, ended
RELEASE = ord("R")
MORE = ord("F")
STATUSES = ("ok", "error", "cancelled")

_PARCEL = struct.Struct("<IIQQI")  # buffers, bytes of pickle, bytes of the whole, segment (0: in the message), blocks
_BLOCK = struct.Struct("<QQ")  # segment, bytes


_CONSTANTS: dict[bytes, Any] = {pickle.dumps(value, 5): value for value in (None, True, False)}


_NO_ARGUMENTS = pickle.dumps({}, 5)
EMPTY = (
    _PARCEL.pack(0, len(_NO_ARGUMENTS), len(_NO_ARGUMENTS), 0, 0) + _NO_ARGUMENTS
)  # the parcel of a call without any


class Parcel:
    """A value ready to be sent any number of times.

    A small one is its bytes. A large one is copied into its segment when it is first sent, so that the first of several
    hosts is at work while the next one's part is copied.
    """

    __slots__ = ("_blocks", "_data", "_raws", "_segments", "_total", "_wire", "leases", "where")

    def __init__(
        self,
        data: bytes,
        raws: Sequence[memoryview],
        segments: SegmentPool,
        where: str = "a value",
        blocks: Sequence[LocalBlock] = (),
    ) -> None:
        self._data, self._raws, self._segments, self.where = data, raws, segments, where
        self._blocks = blocks
        self._total = _aligned(8 * len(raws) + len(data)) + sum(_aligned(raw.nbytes) for raw in raws)
        self._wire = b""
        self.leases: list[Lease] = [block.lease for block in blocks]

    @property
    def wire(self) -> bytes:
        """What goes into the message; ``leases`` are the segments that go with it.

        Raises:
            SerializationError: there is no memory left for its segment.
        """
        if not self._wire:
            self._wire = self._in_message() if self._total <= INLINE_LIMIT else self._in_segment()
            self._data, self._raws, self._blocks = b"", (), ()
        return self._wire

    def store(self) -> None:
        """Copy a large value into its segment now. Raises SerializationError, as ``wire`` does."""
        _ = self.wire

    def _head(self) -> bytes:
        head = struct.pack(f"<{len(self._raws)}Q", *[raw.nbytes for raw in self._raws]) + self._data
        return head.ljust(_aligned(len(head)), b"\0") if self._raws else head

    def _in_message(self) -> bytes:
        padded = (bytes(raw).ljust(_aligned(raw.nbytes), b"\0") for raw in self._raws)
        body = b"".join([self._head(), *padded])
        return self._prefix(len(body), 0) + body

    def _prefix(self, total: int, segment: int) -> bytes:
        head = _PARCEL.pack(len(self._raws), len(self._data), total, segment, len(self._blocks))
        return head + b"".join(_BLOCK.pack(b.lease.segment.number, b.lease.segment.nbytes) for b in self._blocks)

    def _in_segment(self) -> bytes:
        try:
            lease = self._segments.take(self._total)
            memory = lease.segment.memory
        except OSError as error:
            raise SerializationError(f"no shared memory for {self.where} of {self._total} bytes: {error}") from error
        self.leases = [lease, *self.leases]
        head = self._head()
        memory[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        at = _aligned(len(head))
        for raw in self._raws:
            np.copyto(memory[at : at + raw.nbytes], np.frombuffer(raw, dtype=np.uint8))
            at += _aligned(raw.nbytes)
        return self._prefix(at, lease.segment.number)


def pack(value: Any, segments: SegmentPool, where: str = "a value") -> Parcel:
    """Pickle ``value``, its buffers aside.

    Raises:
        SerializationError: it does not pickle.
        RefLostError: it refers to what another cluster kept, and that is gone.
    """
    if type(value) in PLAIN and (not isinstance(value, str | bytes) or len(value) < INLINE_LIMIT):
        return Parcel(pickle.dumps(value, 5), (), segments, where)
    blocks: list[Any] = []
    data, buffers = encode(value, where, blocks)
    if blocks:
        from podium.backends.local.store import brought

        blocks = [brought(block, segments) for block in blocks]
    return Parcel(data, [buffer.raw() for buffer in buffers], segments, where, blocks)


class Inbound:
    """A parcel received. :meth:`read` it once, or drop it: either way its segments are released in the end."""

    __slots__ = ("_blocks", "_body", "_buffers", "_data", "_lease", "_total")

    def __init__(
        self, buffers: int, data: int, total: int, body: bytes, lease: Lease | None = None, blocks: Sequence[Lease] = ()
    ) -> None:
        self._buffers, self._data, self._total = buffers, data, total
        self._body, self._lease, self._blocks = body, lease, blocks

    def read(self, where: str = "a value") -> Any:
        """The value. Its tensors lie in the mapped segment and may be written without harm to anyone."""
        openers: Sequence[Opener] = ()
        if self._blocks:
            from podium.backends.local.store import LocalBlock

            openers = [partial(LocalBlock, lease) for lease in self._blocks]
            self._blocks = ()
        if self._lease is None:
            if not self._buffers:
                return _CONSTANTS[self._body] if self._body in _CONSTANTS else decode(self._body, (), where, openers)
            memory: Any = np.frombuffer(bytearray(self._body), dtype=np.uint8)
        else:
            memory = map_segment(self._lease, self._total)
            self._lease = None
        at = _aligned(8 * self._buffers + self._data)
        view = memoryview(memory)
        sizes = struct.unpack_from(f"<{self._buffers}Q", view)
        data = view[8 * self._buffers : 8 * self._buffers + self._data]
        parts: list[memoryview] = []
        for size in sizes:
            parts.append(view[at : at + size])
            at += _aligned(size)
        return decode(data, parts, where, openers)


class _Lost(Inbound):
    """A parcel whose descriptors this process could not take."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, b"")

    def read(self, where: str = "a value") -> Any:
        raise too_many_files(f"{where} came without its shared memory")


def read_answer(message: memoryview, fds: list[int], releases: Releases, segments: SegmentPool) -> Inbound:
    """The parcel of an answer. Most answers are None: those share one."""
    releases.flush()
    if len(message) == _NOTHING.size and bytes(message[ANSWER.size :]) == _NOTHING.wire:
        return _NOTHING.inbound
    return read_parcel(message, ANSWER.size, fds, releases, segments)[0]


def read_parcel(
    message: memoryview, at: int, fds: list[int], releases: Releases, segments: SegmentPool
) -> tuple[Inbound, int]:
    """The parcel at ``at`` in a message and where the next one begins; takes its descriptors from ``fds``."""
    buffers, data, total, segment, count = _PARCEL.unpack_from(message, at)
    at += _PARCEL.size
    named = [_BLOCK.unpack_from(message, at + place * _BLOCK.size) for place in range(count)]
    at += count * _BLOCK.size
    if len(fds) < count + bool(segment):
        for number in [segment] * bool(segment) + [number for number, _ in named]:
            releases.add(number)
        return _Lost(), at if segment else at + total
    lease = segments.adopt(fds.pop(0), total, partial(releases.add, segment)) if segment else None
    blocks = [segments.adopt(fds.pop(0), size, partial(releases.add, number)) for number, size in named]
    if lease is not None:
        return Inbound(buffers, data, total, b"", lease, blocks), at
    return Inbound(buffers, data, total, bytes(message[at : at + total]), None, blocks), at + total


class _NOTHING:
    body = pickle.dumps(None, 5)
    wire = _PARCEL.pack(0, len(body), len(body), 0, 0) + body
    size = ANSWER.size + len(wire)
    inbound = Inbound(0, len(body), len(body), body)


class Releases:
    """Tells the other end which of its segments are read, without ever waiting and from within any thread's garbage
    collection: what the socket does not take now goes with the next message, of any kind and in either direction."""

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
                self._connection.send(b"R" + struct.pack(f"<{len(numbers)}Q", *numbers), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._late.extendleft(reversed(numbers))
                return
            except OSError:
                return  # the other end is gone, and its segments with it


def released(message: memoryview) -> tuple[int, ...]:
    """Numbers in a message of type R."""
    return struct.unpack(f"<{(len(message) - 1) // 8}Q", message[1:])


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
    late = len(fds) % MOST_FDS or len(fds)
    before = [(b"F", fds[at : at + MOST_FDS]) for at in range(0, len(fds) - late, MOST_FDS)]
    return [*before, (message, fds[len(fds) - late :])]


class Receiver:
    """Receives messages into one buffer, which is valid until the next call."""

    _ANCILLARY = socket.CMSG_SPACE(MOST_FDS * 4)
    _NO_FDS: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(RECEIVE_LIMIT))
        self._into = [self._buffer]
        self._early: list[int] = []
        self._cut = False

    def receive(self, connection: socket.socket, *, wait: bool) -> tuple[memoryview, list[int]]:
        """One message and its descriptors, all of them, or none if this process may not open so many; an empty message
        is the end. Raises BlockingIOError unless ``wait``."""
        count, ancillary, flags, _ = connection.recvmsg_into(
            self._into, self._ANCILLARY, _RECEIVE if wait else _RECEIVE_NOW
        )
        cut = flags & _CUT
        if (
            not ancillary and not cut and (not self._early or self._buffer[0] == RELEASE)
        ):  # a release may come between two parts
            return self._buffer[:count], self._NO_FDS
        fds, self._early = self._early, []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", data[: len(data) - len(data) % 4]))
        self._cut = self._cut or bool(cut)
        if count == 1 and self._buffer[0] == MORE:
            self._early = fds
            return self.receive(connection, wait=wait)
        if self._cut:
            self._cut, self._early, fds = False, fds, []
            self.close()
        return self._buffer[:count], fds

    def close(self) -> None:
        """Let go of descriptors whose message does not come."""
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


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
