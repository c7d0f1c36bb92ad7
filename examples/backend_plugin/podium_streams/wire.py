"""Frames on a stream socket: length of top | top, the pickle of (head, sizes of the parcels' parts) | the parts."""

import pickle
import socket
from typing import Any

from podium.runtime.codec import encode

Parcel = list[Any]  # a value: its pickle, then its out-of-band buffers


def pack(value: Any, where: str) -> Parcel:
    data, buffers = encode(value, where)
    return [data, *(bytes(buffer.raw()) for buffer in buffers)]  # copied now: the caller may change its tensors later


def send(connection: socket.socket, head: Any, *parcels: Parcel) -> None:
    top = pickle.dumps((head, [[len(part) for part in parcel] for parcel in parcels]), 5)
    for piece in (len(top).to_bytes(4) + top, *(part for parcel in parcels for part in parcel)):
        connection.sendall(piece)


def receive(connection: socket.socket) -> tuple[Any, list[Parcel]]:
    """The next frame, in memory that is its reader's own. Raises EOFError or OSError at the end."""
    head, sizes = pickle.loads(_exactly(connection, int.from_bytes(_exactly(connection, 4))))
    return head, [[_exactly(connection, size) for size in parcel] for parcel in sizes]


def _exactly(connection: socket.socket, size: int) -> bytearray:
    whole = bytearray(size)
    left = memoryview(whole)
    while left:
        if not (got := connection.recv_into(left)):
            raise EOFError
        left = left[got:]
    return whole
