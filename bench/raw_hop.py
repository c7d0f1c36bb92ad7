"""The least that two processes can be which pass shared memory on: numpy, pipes and one Unix socket between them.

Run as a script by bench.floors. A request, on the producer's pipe, is one operation byte and a number of bytes; a
reply, on the pipe of whoever did the work, is the seconds that it took inside and the sum of the bytes looked at.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MESSAGE = struct.Struct("=cQ")
REPLY = struct.Struct("=dQ")
PREPARE, CREATE, PUT, FIRST, PAGES, DROP = b"p", b"c", b"m", b"f", b"a", b"d"


def create(nbytes: int) -> tuple[int, np.ndarray]:
    """New anonymous shared memory, no page of it touched: its descriptor and its bytes."""
    import numpy as np

    fd = os.memfd_create("bench-hop")
    os.ftruncate(fd, nbytes)
    return fd, np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)


def produce(requests_fd: int, replies_fd: int, socket_fd: int) -> None:
    """Prepare a tensor, put it into shared memory, pass that on, until the controller closes its end."""
    import numpy as np

    consumer = socket.socket(fileno=socket_fd)
    source = target = np.zeros(1, dtype=np.uint8)
    fd = -1
    while message := os.read(requests_fd, MESSAGE.size):
        operation, nbytes = MESSAGE.unpack(message)
        started = time.perf_counter()
        if operation == PREPARE:
            source = np.ones(nbytes, dtype=np.uint8)
        elif operation == CREATE:
            fd, target = create(nbytes)
        elif operation == PUT:
            np.copyto(target, source)
        elif operation == DROP:
            os.close(fd)
            source = target = np.zeros(1, dtype=np.uint8)  # the mapping goes with the last array that looks at it
        else:
            socket.send_fds(consumer, [operation], [fd])
            continue  # the consumer replies
        os.write(replies_fd, REPLY.pack(time.perf_counter() - started, 0))


def consume(replies_fd: int, socket_fd: int) -> None:
    """Map what comes, copy-on-write as a worker may write into it, look at it and reply, until the producer ends."""
    import numpy as np

    producer = socket.socket(fileno=socket_fd)
    while True:
        operation, fds, _, _ = socket.recv_fds(producer, 1, 1)
        if not operation:
            return
        started = time.perf_counter()
        mapped = mmap.mmap(fds[0], 0, access=mmap.ACCESS_COPY)
        data = np.frombuffer(mapped, dtype=np.uint8)
        seen = int(data[0] if operation == FIRST else data[:: mmap.PAGESIZE].sum())
        os.write(replies_fd, REPLY.pack(time.perf_counter() - started, seen))
        os.close(fds[0])
        del data, mapped


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[1:]]
    (produce if len(descriptors) == 3 else consume)(*descriptors)
