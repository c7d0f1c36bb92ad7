"""Channels: frames of any cut arrive whole, long ones are refused, and requests get their answers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from podium.processes import HEADER, Channel, FrameError, Requests, make_frame, read_frame


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_frames_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    frames = [(7, b"seven"), (0, b""), ((1 << 64) - 1, bytes(100))]
    data = b"".join(make_frame(number, body) for number, body in frames)
    for size in (1, 3, HEADER.size, len(data)):
        channel = Channel(ends[1])
        received = list[tuple[int, bytes]]()
        for start in range(0, len(data), size):
            ends[0].sendall(data[start : start + size])
            received += channel.read() or []
        assert received == frames


def test_a_channel_that_has_nothing_does_not_wait_unless_it_shall(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(ends[1])
    assert channel.read(wait=False) == []
    ends[0].close()
    assert channel.read(wait=False) is None
    assert channel.receive() is None


def test_a_long_frame_is_refused_after_those_before_it(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(make_frame(1, b"short") + HEADER.pack(2, 1 << 60) + b"x")
    channel = Channel(ends[1], longest=10)
    assert channel.read() == [(1, b"short")]
    assert channel.head() == (2, 1 << 60)
    ends[0].sendall(b"x")
    with pytest.raises(FrameError, match="longer than 10"):
        channel.read()


def test_a_stream_of_asyncio_has_the_same_frames(ends: tuple[socket.socket, socket.socket]) -> None:
    async def read_all() -> list[Any]:
        reader, writer = await asyncio.open_connection(sock=ends[1])
        frames = [await read_frame(reader), await read_frame(reader)]
        with pytest.raises(FrameError):
            await read_frame(reader, longest=3)
        ends[0].close()
        frames.append(await read_frame(reader))  # the frame before has lost its body
        writer.close()
        return frames

    ends[0].sendall(make_frame(1, b"one") + make_frame(2) + make_frame(3, b"four"))
    assert asyncio.run(read_all()) == [(1, b"one"), (2, b""), None]


def test_only_a_trusted_end_brings_descriptors(ends: tuple[socket.socket, socket.socket]) -> None:
    """A user's code could fill the table of open files of a process that took them."""
    read, write = os.pipe()
    before = {*os.listdir("/proc/self/fd")}
    near, far = Channel(ends[0]), Channel(ends[1])
    near.send(1, b"body", write)
    assert far.receive() == (1, b"body")
    assert not far.descriptors
    assert {*os.listdir("/proc/self/fd")} <= before  # others may be closed meanwhile
    far = Channel(ends[1], trusted=True)
    near.send(2, b"body", write)
    assert far.receive() == (2, b"body")
    ((received,),) = far.descriptors
    assert not os.get_inheritable(received)
    os.write(received, b"through")
    assert os.read(read, 100) == b"through"
    for fd in (read, write, received):
        os.close(fd)


def test_requests_get_their_own_answers_and_can_be_taken_back(ends: tuple[socket.socket, socket.socket]) -> None:
    def settle(answer: Future[Any], body: bytes) -> None:
        answer.set_result(json.loads(body))

    far = Channel(ends[1])
    requests = Requests(Channel(ends[0]), settle)
    reader = threading.Thread(target=requests.settle_until_end)
    reader.start()
    first, second, third = (requests.send({"what": word}) for word in ("first", "second", "third"))
    numbers = [number for number, _ in (far.receive() or (0, b"") for _ in range(3))]
    requests.cancel(third)
    assert far.receive() == (numbers[2], b"")
    far.send(numbers[1], b'"for the second"')
    far.send(99, b'"for nobody"')
    far.send(numbers[0], b'"for the first"')
    assert (first.result(60), second.result(60)) == ("for the first", "for the second")
    ends[1].shutdown(socket.SHUT_RDWR)
    reader.join(60)
    assert not reader.is_alive()
    requests.fail(ConnectionError("it is over"))
    with pytest.raises(ConnectionError):
        third.result(60)
