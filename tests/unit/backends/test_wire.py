"""Parcels, releases, and sending without waiting, over real sockets."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from podium.backends.local.outbox import Outbox
from podium.backends.local.shared_memory import SegmentPool
from podium.backends.local.store import LocalStore
from podium.backends.local.wire import (
    INLINE_LIMIT,
    MOST_FDS,
    Message,
    Parcel,
    Receiver,
    Releases,
    pack,
    receive_parcel,
    send_message,
    split_message,
)
from podium.data import keep
from podium.errors import StoreFullError
from podium.runtime.codec import read_as

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def segments() -> Iterator[SegmentPool]:
    pool = SegmentPool()
    yield pool
    pool.close()


def outgoing(parcel: Parcel) -> tuple[bytes, list[int]]:
    """A message with ``parcel``, and its descriptors."""
    message = pickle.dumps(("answer", parcel.wire), 5)
    return message, [lease.segment.fd for lease in parcel.leases]


def released(message: Message) -> list[int]:
    """The numbers in a message that says which segments were read."""
    kind, numbers = message
    assert kind == "release"
    return numbers


def carry(value: Any, segments: SegmentPool, pair: Pair) -> tuple[Any, int]:
    """``value`` after its way through the sockets, and how many descriptors came along."""
    parcel = pack(value, segments)
    message, fds = outgoing(parcel)
    for lease in parcel.leases:
        segments.hold(lease.segment, "reader")
    send_message(pair[0], message, fds, wait=True)
    (_, wire), received = Receiver().receive(pair[1], wait=True)
    count = len(received)
    return receive_parcel(wire, received, Releases(pair[1]), SegmentPool()).read(), count


@pytest.mark.parametrize("size", [0, 1, INLINE_LIMIT // 2, INLINE_LIMIT - 200, INLINE_LIMIT, 3 * INLINE_LIMIT, 1 << 22])
def test_values_of_every_size_arrive(size: int, segments: SegmentPool, pair: Pair) -> None:
    for value in (b"x" * size, "é" * size):
        got, fds = carry(value, segments, pair)
        assert got == value
        assert fds == (size >= INLINE_LIMIT) or INLINE_LIMIT // 2 <= size < INLINE_LIMIT
    array = np.arange(size, dtype=np.uint8)
    got, _ = carry({"a": array, "b": [array[:3], "text"]}, segments, pair)
    assert np.array_equal(got["a"], array)
    assert got["b"][1] == "text"


def test_many_buffers_and_empty_ones(segments: SegmentPool, pair: Pair) -> None:
    arrays = [np.full(at % 50, at % 256, dtype=np.uint8) for at in range(3000)]
    got, _ = carry(arrays, segments, pair)
    assert all(np.array_equal(sent, back) for sent, back in zip(arrays, got, strict=True))


def test_a_parcel_that_is_dropped_unread_lets_go_of_its_segment(segments: SegmentPool, pair: Pair) -> None:
    parcel = pack(np.zeros(1 << 20, dtype=np.uint8), segments)
    message, fds = outgoing(parcel)
    (lease,) = parcel.leases
    number = lease.segment.number
    before = len(os.listdir("/proc/self/fd"))
    send_message(pair[0], message, fds, wait=True)
    (_, wire), received = Receiver().receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), SegmentPool())
    del inbound
    answer, _ = Receiver().receive(pair[0], wait=True)
    assert released(answer) == [number]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("count", [1, MOST_FDS, MOST_FDS + 1, 2 * MOST_FDS, 555])
def test_more_blocks_than_one_message_has_room_for(count: int, segments: SegmentPool, pair: Pair) -> None:
    store = LocalStore(segments)
    refs = [keep(torch.full((INLINE_LIMIT,), float(at)), store, f"maker {at}") for at in range(count)]
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    parcel = pack(refs, segments)
    sent, fds = outgoing(parcel)
    assert len(fds) in (count, count + 1), "the pickle itself may need a segment"
    *early, last = split_message(sent, fds)
    for part, some in early:
        send_message(pair[0], part, some, wait=True)
        Releases(pair[0]).add(77)  # from a garbage collection, whenever it likes
    send_message(pair[0], *last, wait=True)
    send_message(pair[0], pickle.dumps(("next",)), [], wait=True)
    receiver, theirs = Receiver(), SegmentPool()
    for _ in early:
        message, received = receiver.receive(pair[1], wait=True)
        assert (released(message), received) == ([77], [])
    (_, wire), received = receiver.receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), theirs)
    assert receiver.receive(pair[1], wait=True) == (("next",), [])
    back = read_as("tensor", inbound.read)
    assert [float(tensor[-1]) for tensor in back] == list(range(count))
    del back, inbound, refs, parcel
    assert store.usage().nbytes == 0
    assert theirs.usage()[0] == 0


def test_releases_that_a_full_socket_does_not_take_go_with_what_comes_next(pair: Pair) -> None:
    """The next release, or a flush where another message was sent or came."""
    releases = Releases(pair[0])
    for number in range(5000):
        releases.add(number)
    seen: list[int] = []
    pair[1].setblocking(False)
    for send in [lambda: releases.add(5000), releases.flush, releases.flush, releases.flush]:
        while True:
            try:
                message, _ = Receiver().receive(pair[1], wait=False)
            except BlockingIOError:
                break
            seen += released(message)
        send()
    assert sorted(seen) == list(range(5001))


def test_an_outbox_keeps_order_and_its_own_descriptors(pair: Pair) -> None:
    asked: list[int] = []
    outbox = Outbox(pair[0], asked.append)
    read_end, write_end = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2000):
        outbox.send(pickle.dumps((number, bytes(400))), [write_end] if number % 100 == 0 else [])
    assert asked
    os.close(write_end)
    receiver, seen, came = Receiver(), list[int](), 0
    while len(seen) < 2000:
        message, fds = receiver.receive(pair[1], wait=True)
        seen.append(message[0])
        came += len(fds)
        for fd in fds:
            os.close(fd)
        outbox.flush()
    assert seen == list(range(2000))
    assert came == 20
    assert outbox.flush()
    os.close(read_end)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_nothing_comes_between_the_parts_of_a_message_whoever_else_sends(pair: Pair) -> None:
    outbox = Outbox(pair[0], lambda fd: None)
    null = os.open(os.devnull, os.O_RDONLY)
    counts = [("many", 2 * MOST_FDS + 1), ("none", 0), ("one", 1)]
    senders = [
        threading.Thread(
            target=lambda kind=kind, count=count: [
                outbox.send(pickle.dumps((kind,)), [null] * count) for _ in range(20)
            ]
        )
        for kind, count in counts
    ]
    for sender in senders:
        sender.start()
    ended = threading.Event()

    def flush() -> None:
        while not ended.wait(0.001):
            outbox.flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    receiver = Receiver()
    for _ in range(60):
        message, fds = receiver.receive(pair[1], wait=True)
        assert len(fds) == dict(counts)[message[0]]
        for fd in fds:
            os.close(fd)
    ended.set()
    for thread in (*senders, flusher):
        thread.join()
    os.close(null)


def test_a_message_that_loses_descriptors_loses_all_and_says_why(
    segments: SegmentPool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(segments)
    refs = [keep(torch.full((INLINE_LIMIT,), float(at)), store, "maker") for at in range(5)]
    parcel = pack(refs, segments)
    sent, fds = outgoing(parcel)
    before = len(os.listdir("/proc/self/fd"))
    send_message(pair[0], sent, fds, wait=True)
    with monkeypatch.context() as few:  # as where the process may open two more files
        few.setattr(Receiver, "_ANCILLARY", socket.CMSG_SPACE(2 * 4))
        (_, wire), received = Receiver().receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), SegmentPool())
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StoreFullError, match=r"an argument came without .* open .*ulimit -n"):
        inbound.read("an argument")
    answers = [Receiver().receive(pair[0], wait=True)[0] for _ in fds]
    told = sorted(number for answer in answers for number in released(answer))
    assert told == sorted(lease.segment.number for lease in parcel.leases)


def test_a_closed_outbox_drops_what_waits(pair: Pair) -> None:
    outbox = Outbox(pair[0], lambda fd: None)
    null = os.open(os.devnull, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        outbox.send(b"x" * 1000, [null])
    assert len(os.listdir("/proc/self/fd")) > before
    outbox.close()
    outbox.send(b"x", [null])
    pair[1].close()  # with the descriptors that were on their way
    assert len(os.listdir("/proc/self/fd")) == before - 2
    os.close(null)


def test_what_cannot_be_kept_for_later_is_refused_whole(pair: Pair) -> None:
    """Half a message would give its descriptors to the next one."""
    outbox = Outbox(pair[0], lambda fd: None)
    null = os.open(os.devnull, os.O_RDONLY)
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + MOST_FDS, hard))
    try:
        with pytest.raises(StoreFullError, match=r"a call could not be kept .* open .*ulimit -n"):
            outbox.send(b"never", [null] * (2 * MOST_FDS + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == len(before)
    outbox.send(pickle.dumps(("next",)), [null])
    message, fds = Receiver().receive(pair[1], wait=True)
    assert (message, len(fds)) == (("next",), 1)
    for fd in (null, *fds):
        os.close(fd)
