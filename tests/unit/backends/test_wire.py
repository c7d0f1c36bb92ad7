"""Parcels, releases, and sending without waiting, over real sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from podium.backends.local.process import Outbox
from podium.backends.local.shared_memory import Key, Lease, SegmentPool
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
    short_answer,
    short_call,
    split_message,
)
from podium.data import keep
from podium.errors import StoreFullError
from podium.runtime.codec import read_references

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


def no_release(key: Key) -> None:
    raise AssertionError(f"{key} was released")


def outgoing(parcel: Parcel) -> tuple[bytes, list[Lease]]:
    """A message with ``parcel``, and its segments."""
    message = pickle.dumps(("answer", parcel.wire), 5)
    return message, parcel.leases


def released(message: Message) -> list[Key]:
    """The keys in a message that says which segments were read."""
    kind, keys = message
    assert kind == "release"
    return keys


def carry(value: Any, segments: SegmentPool, pair: Pair) -> tuple[Any, int]:
    """``value`` after its way through the sockets, and how many descriptors came along."""
    parcel = pack(value, segments)
    message, leases = outgoing(parcel)
    for lease in leases:
        segments.hold(lease.segment, "reader")
    send_message(pair[0], message, leases, wait=True)
    (_, wire), received = Receiver(no_release).receive(pair[1], wait=True)
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


def segment_descriptors() -> int:
    """How many descriptors of segments are open here; other threads open and close descriptors of other kinds."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return found


def test_many_buffers_and_empty_ones(segments: SegmentPool, pair: Pair) -> None:
    arrays = [np.full(at % 50, at % 256, dtype=np.uint8) for at in range(3000)]
    got, _ = carry(arrays, segments, pair)
    assert all(np.array_equal(sent, back) for sent, back in zip(arrays, got, strict=True))


def test_a_parcel_that_is_dropped_unread_lets_go_of_its_segment(segments: SegmentPool, pair: Pair) -> None:
    parcel = pack(np.zeros(1 << 20, dtype=np.uint8), segments)
    message, leases = outgoing(parcel)
    (lease,) = leases
    key = lease.segment.key
    before = segment_descriptors()
    send_message(pair[0], message, leases, wait=True)
    (_, wire), received = Receiver(no_release).receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), SegmentPool())
    del inbound
    answer, _ = Receiver(no_release).receive(pair[0], wait=True)
    assert released(answer) == [key]
    assert segment_descriptors() == before


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("size", [0, 100, INLINE_LIMIT // 2, INLINE_LIMIT * 4])
def test_the_collector_frees_parcels_of_a_circle(
    encoded: bool, size: int, segments: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error's traceback makes one. A parcel that held the exported memory of its value crashed the process."""
    complaints: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", complaints.append)
    for _ in range(20):
        parcel = pack({"a": torch.zeros(size), "b": np.ones(size), "c": bytearray(size)}, segments)
        if encoded:
            _ = parcel.wire
        circle: list[Any] = [parcel]
        circle.append(circle)
        cast("Any", parcel.leases).append(circle)
        del parcel, circle
        gc.collect()
    assert complaints == []


@pytest.mark.parametrize("count", [1, MOST_FDS, MOST_FDS + 1, 2 * MOST_FDS, 555])
def test_more_blocks_than_one_message_has_room_for(count: int, segments: SegmentPool, pair: Pair) -> None:
    store = LocalStore(segments)
    refs = [keep(torch.full((INLINE_LIMIT,), float(at)), store, f"maker {at}") for at in range(count)]
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    parcel = pack(refs, segments)
    sent, leases = outgoing(parcel)
    assert len(leases) in (count, count + 1), "the pickle itself may need a segment"
    *early, last = split_message(sent, leases)
    for at in range(len(early)):  # no name keeps a segment
        send_message(pair[0], *early[at], wait=True)
        Releases(pair[0]).add((7, 7))  # from a garbage collection, whenever it likes
    send_message(pair[0], *last, wait=True)
    send_message(pair[0], pickle.dumps(("next",)), [], wait=True)
    receiver, theirs = Receiver(no_release), SegmentPool()
    for _ in early:
        message, received = receiver.receive(pair[1], wait=True)
        assert (released(message), received) == ([(7, 7)], [])
    (_, wire), received = receiver.receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), theirs)
    assert receiver.receive(pair[1], wait=True) == (("next",), [])
    back = read_references("tensor", inbound.read)
    assert [float(tensor[-1]) for tensor in back] == list(range(count))
    del back, inbound, refs, parcel, leases, early, last
    assert store.usage().nbytes == 0
    assert theirs.usage()[0] == 0


@pytest.mark.parametrize("target", ["scorer", "", "Größe", "a\0b"])
def test_short_messages_arrive_as_the_tuples_that_they_stand_for(pair: Pair, target: str) -> None:
    receiver = Receiver(no_release)
    for number, wants in [(0, True), (2**63 - 1, False)]:
        short = short_call(number, target, "score", wants)
        assert short is not None
        pair[0].send(short)
        assert receiver.receive(pair[1], wait=True) == (("call", number, target, "score", wants, None), [])
        pair[0].send(short_answer(number, 5, 7))
        assert receiver.receive(pair[1], wait=True) == (("answer", number, "ok", 5, 7, None), [])
    pair[0].close()
    assert receiver.receive(pair[1], wait=True) == ((), []), "the end is no message, whatever came before"


def test_a_name_that_is_too_long_for_a_short_message_travels_in_a_pickle() -> None:
    assert short_call(1, "x" * 2000, "score", True) is None


def test_a_message_carries_the_releases_that_were_not_sent_yet(pair: Pair) -> None:
    asked: list[str] = []
    releases = Releases(pair[0], lambda: asked.append("flush"))
    keys = [(2**64 - 1, number) for number in range(250)]
    for key in keys:
        releases.add(key)
    assert len(asked) == 250, "the key is late, and somebody is told"
    seen: list[Key] = []
    receiver = Receiver(seen.append)
    short = short_call(7, "scorer", "score", True)
    assert short is not None
    for message in (short, short_answer(7, 1, 2), pickle.dumps(("next",), 5)):
        pair[0].send(releases.carried(message))
    found = [receiver.receive(pair[1], wait=True) for _ in range(3)]
    assert [message[0] for message, _ in found] == ["call", "answer", "next"]
    assert found[0] == (("call", 7, "scorer", "score", True, None), [])
    assert seen == keys
    assert not releases.late


def test_releases_are_held_for_the_message_that_comes_next(pair: Pair) -> None:
    releases = Releases(pair[0])
    releases.held = True
    releases.add((1, 2))
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)
    assert list(releases.late) == [(1, 2)]


def test_releases_that_a_full_socket_does_not_take_go_with_what_comes_next(pair: Pair) -> None:
    """The next release, or a flush where another message was sent or came."""
    releases = Releases(pair[0])
    for number in range(5000):
        releases.add((0, number))
    seen: list[Key] = []
    pair[1].setblocking(False)
    for send in [lambda: releases.add((0, 5000)), releases.flush, releases.flush, releases.flush]:
        while True:
            try:
                message, _ = Receiver(no_release).receive(pair[1], wait=False)
            except BlockingIOError:
                break
            seen += released(message)
        send()
    assert sorted(seen) == [(0, number) for number in range(5001)]


def test_an_outbox_keeps_order_and_segments(pair: Pair, segments: SegmentPool) -> None:
    asked: list[int] = []
    outbox = Outbox(pair[0], asked.append, lambda: None)
    lease = segments.take(1, "a test")
    before = segment_descriptors()
    for number in range(2000):
        outbox.send(pickle.dumps((number, bytes(400))), [lease] if number % 100 == 0 else [])
    assert asked
    assert segment_descriptors() == before
    del lease
    receiver, seen, came = Receiver(no_release), list[int](), 0
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
    assert segments.usage()[0] == 0


def test_nothing_comes_between_the_parts_of_a_message_whoever_else_sends(pair: Pair, segments: SegmentPool) -> None:
    outbox = Outbox(pair[0], lambda fd: None, lambda: None)
    lease = segments.take(1, "a test")
    counts = [("many", 2 * MOST_FDS + 1), ("none", 0), ("one", 1)]
    senders = [
        threading.Thread(
            target=lambda kind=kind, count=count: [
                outbox.send(pickle.dumps((kind,)), [lease] * count) for _ in range(20)
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
    receiver = Receiver(no_release)
    for _ in range(60):
        message, fds = receiver.receive(pair[1], wait=True)
        assert len(fds) == dict(counts)[message[0]]
        for fd in fds:
            os.close(fd)
    ended.set()
    for thread in (*senders, flusher):
        thread.join()


def test_a_message_that_loses_descriptors_loses_all_and_says_why(
    segments: SegmentPool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(segments)
    refs = [keep(torch.full((INLINE_LIMIT,), float(at)), store, "maker") for at in range(5)]
    parcel = pack(refs, segments)
    sent, leases = outgoing(parcel)
    before = segment_descriptors()
    send_message(pair[0], sent, leases, wait=True)
    with monkeypatch.context() as few:  # as where the process may open two more files
        few.setattr(Receiver, "_ANCILLARY", socket.CMSG_SPACE(2 * 4))
        (_, wire), received = Receiver(no_release).receive(pair[1], wait=True)
    inbound = receive_parcel(wire, received, Releases(pair[1]), SegmentPool())
    assert segment_descriptors() == before
    with pytest.raises(StoreFullError, match=r"an argument arrived without .* open .*ulimit -n"):
        inbound.read("an argument")
    answers = [Receiver(no_release).receive(pair[0], wait=True)[0] for _ in leases]
    told = sorted(key for answer in answers for key in released(answer))
    assert told == sorted(lease.segment.key for lease in leases)


def test_a_closed_outbox_drops_what_is_kept(pair: Pair, segments: SegmentPool) -> None:
    outbox = Outbox(pair[0], lambda fd: None, lambda: None)
    lease = segments.take(1, "a test")
    for _ in range(1000):
        outbox.send(b"x" * 1000, [lease])
    del lease
    assert segments.usage()[0] > 0
    outbox.close()
    outbox.send(b"x", [])
    assert segments.usage()[0] == 0
