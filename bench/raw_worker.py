"""The least a worker process can be: reads a message from a pipe, does one copy or none, writes one byte back.

Run as a script by bench.floors with the descriptors of its pipes and of two shared segments; numpy only, so that it
starts at once. A message is one operation byte and the number of bytes it concerns.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

MESSAGE = struct.Struct("=cQ")
NOOP, ECHO, TOUCH = b"n", b"e", b"t"


def pipe_loop(requests_fd: int, replies_fd: int) -> None:
    """One byte in, one byte out, until the controller closes its end."""
    while os.read(requests_fd, 1):
        os.write(replies_fd, b"k")


def segment_loop(requests_fd: int, replies_fd: int, inbox_fd: int, outbox_fd: int) -> None:
    """Copy the inbox to the outbox (ECHO), or look at its first byte (TOUCH), until the controller closes its end."""
    import numpy as np

    inbox = np.frombuffer(mmap.mmap(inbox_fd, 0), dtype=np.uint8)
    outbox = np.frombuffer(mmap.mmap(outbox_fd, 0), dtype=np.uint8)
    while message := os.read(requests_fd, MESSAGE.size):
        operation, nbytes = MESSAGE.unpack(message)
        if operation == ECHO:
            np.copyto(outbox[:nbytes], inbox[:nbytes])
        elif operation == TOUCH:
            outbox[0] = inbox[0]
        os.write(replies_fd, b"k")


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[1:]]
    (pipe_loop if len(descriptors) == 2 else segment_loop)(*descriptors)
