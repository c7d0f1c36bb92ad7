"""Messages between the controller and its worker processes, over Unix sockets that keep their bounds (SOCK_SEQPACKET).

A message is a tuple:

    to a worker process  ("call", number, target, method, wants result, shared, own)
    to the controller    ("ready", process id, ids of two threads that end only with it), once
                         ("answer", number, status, started, ended, result)
    either way           ("release", keys of segments that the sender has read)

``shared``, ``own`` and the result are parcels. A *parcel* is (pickle, buffers, segment, blocks): the pickle of a value,
its out-of-band buffers, and the keys of the segments of the blocks to which it refers. A small value is in the message.
A large one lies in a segment, whose key is in the parcel: the pickle of (pickle, sizes of the buffers), whose size is
the parcel's second entry, and then the buffers. A parcel is None where there are no arguments, or where the result is
None.

A tuple crosses as its pickle, but for the two that are most frequent and have no parcel, a call without arguments and
its answer, whose fields are laid end to end: see :func:`short_call` and :func:`short_answer`.

Either may carry releases in front of it, as :meth:`Releases.carried` lays them out, so that these need no message of
their own, for which the other end would wake up.

The descriptors of the segments go with the message, in the order of their keys. Those that do not fit go before it, in
messages of one byte.
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from podium.backends.local.shared_memory import INLINE_LIMIT, Key, Lease, SegmentPool
from podium.backends.local.store import LocalBlock, bring
from podium.data.store import ALIGN, Block, Bytes, lay_out
from podium.errors import SerializationError, StoreFullError
from podium.runtime.codec import decode, encode

RECEIVE_LIMIT = 6 * INLINE_LIMIT
MOST_FDS = 200  # in one message; the kernel takes 253

# Flags as plain integers: combining the enum's members takes longer than the system call saves. macOS lacks two of
# them, and LocalBackend.stand_in says so.
SEND = int(getattr(socket, "MSG_NOSIGNAL", 0))
SEND_NOW = SEND | int(socket.MSG_DONTWAIT)
_RECEIVE = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CUT = int(socket.MSG_CTRUNC)
_RECEIVE_NOW = _RECEIVE | int(socket.MSG_DONTWAIT)

Message = tuple[Any, ...]

_SHORT_CALL, _SHORT_ANSWER, _CARRIED = 1, 2, 3  # first byte of what is no pickle; that of a pickle is 0x80
_CALL = struct.Struct("<B?Q")  # and then the worker's name, a zero byte and the method's name
_ANSWER = struct.Struct("<BQQQ")
_LONGEST_NAMES = 1000  # bytes
_RELEASES = struct.Struct("<BH")  # how many keys follow, and then the message
_KEY = struct.Struct("<QQ")
_MOST_CARRIED = 100  # keys in one message


def short_call(number: int, target: str, method: str, wants_result: bool) -> bytes | None:
    """The message of a call without arguments. None if its names are too long for it."""
    names = f"{target}\0{method}".encode()
    return _CALL.pack(_SHORT_CALL, wants_result, number) + names if len(names) <= _LONGEST_NAMES else None


def short_answer(number: int, started_ns: int, ended_ns: int) -> bytes:
    """The answer "ok" without a result."""
    return _ANSWER.pack(_SHORT_ANSWER, number, started_ns, ended_ns)


class Parcel:
    """A value that can be sent any number of times.

    A large value is copied into its segment when it is first sent, so that the first of several workers is at work
    while the next one's part is copied.

    Attributes:
        leases: The segments that go with the message, in the order of their keys in the parcel.
    """

    __slots__ = ("_parts", "_segments", "_where", "_wire", "leases")

    def __init__(
        self, parts: Sequence[bytes | Bytes], segments: SegmentPool, where: str, blocks: Sequence[LocalBlock]
    ) -> None:
        self._parts, self._segments, self._where = parts, segments, where
        self._wire: Message | None = None
        self.leases: list[Lease] = [block.lease for block in blocks]

    @property
    def wire(self) -> Message | None:
        """The parcel as it stands in a message. Raises SerializationError if there is no memory for its segment."""
        if self._parts:
            blocks = [lease.segment.key for lease in self.leases]
            data, *buffers = self._parts
            if len(data) + sum(len(buffer) + ALIGN for buffer in buffers) <= INLINE_LIMIT:
                self._wire = (data, [bytearray(buffer) for buffer in buffers], None, blocks)
            else:
                head = pickle.dumps((data, list(map(len, buffers))), 5)
                self._wire = (None, len(head), self._store([head, *buffers]), blocks)
            self._parts = ()
        return self._wire

    def _store(self, parts: Sequence[bytes | Bytes]) -> Key:
        buffers = [np.frombuffer(part, dtype=np.uint8) for part in parts]
        offsets, nbytes = lay_out(buffers)
        try:
            lease = self._segments.store(buffers, offsets, nbytes, self._where)
        except StoreFullError as error:
            raise SerializationError(str(error)) from error
        self.leases = [lease, *self.leases]
        return lease.segment.key


NOTHING = Parcel((), SegmentPool(), "nothing", ())
"""The parcel of a call without arguments, and of the result None."""


def pack(value: Any, segments: SegmentPool, where: str = "a value") -> Parcel:
    """Pickle ``value``, its buffers aside.

    Raises:
        SerializationError: The value does not pickle.
        RefLostError: The value refers to tensors of another cluster which are gone.
    """
    blocks: list[Block] = []
    data, buffers = encode(value, where, blocks)
    carried_blocks = [bring(block, segments) for block in blocks]
    # As arrays, which the garbage collector does not look into: Python 3.11 crashes, or complains, where it frees a
    # circle of objects with views of views among them.
    views = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return Parcel([data, *views], segments, where, carried_blocks)


class Inbound:
    """A parcel that was received. Read it once, or drop it: either way its segments are released."""

    __slots__ = ("_blocks", "_buffers", "_data", "_lease")

    def __init__(self, data: bytes | None, buffers: Any, lease: Lease | None, blocks: Sequence[Lease]) -> None:
        self._data, self._buffers, self._lease, self._blocks = data, buffers, lease, blocks

    def read(self, where: str = "a value") -> Any:
        """The value. Its tensors may be written without harm to anyone."""
        openers = [partial(LocalBlock, lease) for lease in self._blocks]
        self._blocks = ()
        if self._lease is None:
            if self._data is None:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise StoreFullError(
                    f"{where} arrived without its shared memory, because this process has reached its limit of "
                    f"{limit} open files. A reference takes one file, and its tensor another; raise the limit "
                    "(ulimit -n) or hold fewer references at a time"
                )
            return decode(self._data, self._buffers, where, openers)
        view = memoryview(cast(Any, self._lease.open(self._lease.segment.nbytes)))
        self._lease = None
        data, sizes = pickle.loads(view[: self._buffers])
        buffers: list[memoryview] = []
        at = self._buffers
        for size in sizes:
            at += -at % ALIGN
            buffers.append(view[at : at + size])
            at += size
        return decode(data, buffers, where, openers)


def receive_parcel(wire: Message, fds: list[int], releases: Releases, segments: SegmentPool) -> Inbound:
    """The parcel that came as ``wire``; takes its descriptors from ``fds``."""
    data, buffers, stored, blocks = wire
    keys: list[Key] = [stored, *blocks] if stored else blocks
    if len(fds) < len(keys):  # this process could not take them
        for key in keys:
            releases.add(key)
        return Inbound(None, (), None, ())
    leases = [segments.adopt(fds.pop(0), partial(releases.add, key)) for key in keys]
    return Inbound(data, buffers, leases.pop(0) if stored else None, leases)


class Releases:
    """Tells the other end which of its segments have been read.

    Args:
        later: Called for each key, and has :meth:`flush` called soon. By default a key is sent at once.

    Attributes:
        late: Keys that were not sent yet; see :meth:`flush`.
        held: Nothing is sent at once, since a message that carries what is late comes next.

    Nothing here waits, and any thread's garbage collection may call it. What the socket does not take at once goes with
    the next message, of any kind and in either direction.
    """

    def __init__(self, connection: socket.socket, later: Callable[[], object] | None = None) -> None:
        self._connection = connection
        self._later = later
        self.late: deque[Key] = deque()
        self.held = False

    def add(self, key: Key) -> None:
        self.late.append(key)
        if self.held:
            return
        (self._later or self.flush)()

    def carried(self, message: bytes) -> bytes:
        """``message`` with keys that were not sent yet in front of it."""
        keys: list[Key] = []
        with contextlib.suppress(IndexError):
            while len(keys) < _MOST_CARRIED:
                keys.append(self.late.popleft())
        return b"".join([_RELEASES.pack(_CARRIED, len(keys)), *(_KEY.pack(*key) for key in keys), message])

    def flush(self) -> None:
        """Send what was not sent yet, as far as the socket takes it now."""
        while self.late:
            keys: list[Key] = []
            with contextlib.suppress(IndexError):
                while len(keys) < 1000:
                    keys.append(self.late.popleft())
            if not keys:
                return
            try:
                self._connection.send(pickle.dumps(("release", keys), 5), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self.late.extendleft(reversed(keys))
                return
            except OSError:
                return  # the other end is gone, and its segments with it


def send_message(connection: socket.socket, message: bytes, leases: Sequence[Lease], *, wait: bool) -> None:
    """Send one message with at most MOST_FDS segments. Raises BlockingIOError if it would wait, unless ``wait``."""
    flags = SEND if wait else SEND_NOW
    if not leases:
        connection.send(message, flags)
        return
    fds = array.array("i", [lease.segment.fd for lease in leases])
    while True:
        try:
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], flags)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # as many descriptors are on their way as this user may have open
                raise
            if not wait:
                raise BlockingIOError(error.errno, error.strerror) from None
        time.sleep(0.001)


def split_message(message: bytes, leases: Sequence[Lease]) -> list[tuple[bytes, Sequence[Lease]]]:
    """The messages to send for one that may have too many segments, in order."""
    if len(leases) <= MOST_FDS:
        return [(message, leases)]
    last = (len(leases) - 1) // MOST_FDS * MOST_FDS
    before = [(b"+", leases[at : at + MOST_FDS]) for at in range(0, last, MOST_FDS)]
    return [*before, (message, leases[last:])]


class Receiver:
    """Receives messages. ``release`` is called with the key of each segment that a message carries as released."""

    _ANCILLARY = socket.CMSG_SPACE(MOST_FDS * 4)
    _NO_FDS: ClassVar[list[int]] = []

    def __init__(self, release: Callable[[Key], object]) -> None:
        self._release = release
        self._buffer = memoryview(bytearray(RECEIVE_LIMIT))
        self._into = [self._buffer]
        self._early: list[int] = []  # descriptors of a message that has not come yet
        self._cut = False  # some of them were lost
        self._names: dict[bytes, tuple[str, str]] = {}  # worker and method, as short calls name them

    def receive(self, connection: socket.socket, *, wait: bool) -> tuple[Message, list[int]]:
        """One message and all its descriptors; no descriptors if this process may not open so many; () at the end.
        Raises BlockingIOError unless ``wait``."""
        count, ancillary, flags, _ = connection.recvmsg_into(
            self._into, self._ANCILLARY, _RECEIVE if wait else _RECEIVE_NOW
        )
        kind, start = self._buffer[0], 0  # of an earlier message if this is the end
        if kind == _CARRIED and count:
            start = self._take_releases()
            kind = self._buffer[start]
        if kind == _SHORT_ANSWER and count:
            _, number, started, ended = _ANSWER.unpack_from(self._buffer, start)
            return ("answer", number, "ok", started, ended, None), self._NO_FDS
        if kind == _SHORT_CALL and count:
            return self._call(start, count), self._NO_FDS
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._early = [*self._early, *array.array("i", data[: len(data) - len(data) % 4])]
        self._cut = self._cut or bool(flags & _CUT)
        if count == 1:
            return self.receive(connection, wait=wait)
        message: Message = pickle.loads(self._buffer[start:count]) if count else ()
        complete = not self._early and not self._cut
        if complete or not message or message[0] == "release":  # a release may come between two parts
            return message, self._NO_FDS
        if self._cut:
            self._cut = False
            self.close()
        fds, self._early = self._early, []
        return message, fds

    def _take_releases(self) -> int:
        """Take in the releases in front of a message. Returns where the message begins."""
        _, count = _RELEASES.unpack_from(self._buffer)
        end = _RELEASES.size + count * _KEY.size
        for key in _KEY.iter_unpack(self._buffer[_RELEASES.size : end]):
            self._release(cast(Key, key))
        return end

    def _call(self, start: int, count: int) -> Message:
        _, wants, number = _CALL.unpack_from(self._buffer, start)
        names = bytes(self._buffer[start + _CALL.size : count])
        if names not in self._names:
            target, _, method = names.decode().rpartition("\0")
            self._names[names] = target, method
        target, method = self._names[names]
        return "call", number, target, method, wants, None

    def close(self) -> None:
        """Close descriptors whose message does not come."""
        early, self._early = self._early, []
        for fd in early:
            os.close(fd)
