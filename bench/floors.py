"""Raw floors: the same traffic with nothing between, written the way one would if nothing else were needed.

- PipeFloor: worker processes on os.pipe, one byte each way. No floor for a call is lower in Python.
- SharedFloor: worker processes on shared segments mapped once and touched before, one message a call. An echo costs
  the three copies that no design can avoid when a worker may write into what it got and keeps what it returns:
  controller to segment, segment to segment in the worker, segment to the joined result.
- HopFloor: two processes of which one puts a tensor into shared memory and passes its descriptor to the other.
- decode_rate, step_rate: the matrix products of a model's tokens, and nothing between them.
- copy_s: one thread's copy of bytes, into pages that were touched before or into fresh ones.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import raw_hop
from bench.raw_worker import ECHO, MESSAGE, TOUCH
from bench.workload import SHAPES, Shape, StepLoad

RAW_WORKER = Path(__file__).with_name("raw_worker.py")
RAW_HOP = Path(__file__).with_name("raw_hop.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def raw_worker(*segment_fds: int) -> Iterator[tuple[int, int]]:
    """A raw worker process; yields the descriptors to write requests to and to read replies from."""
    requests_read, requests_write = os.pipe()
    replies_read, replies_write = os.pipe()
    theirs = (requests_read, replies_write)
    command = [sys.executable, str(RAW_WORKER), *map(str, (*theirs, *segment_fds))]
    process = subprocess.Popen(command, pass_fds=(*theirs, *segment_fds), env={**os.environ, **ONE_THREAD})
    for fd in theirs:
        os.close(fd)
    try:
        yield requests_write, replies_read
    finally:
        os.close(requests_write)  # its end of file ends the worker
        process.wait(timeout=10)
        os.close(replies_read)


class PipeFloor:
    """`workers` processes that answer one byte with one byte."""

    def __init__(self, pipes: Sequence[tuple[int, int]]) -> None:
        self._pipes = pipes

    @classmethod
    @contextmanager
    def start(cls, workers: int) -> Iterator[PipeFloor]:
        with ExitStack() as stack:
            floor = cls([stack.enter_context(raw_worker()) for _ in range(workers)])
            floor.noop()
            yield floor

    def noop(self) -> None:
        for requests, _ in self._pipes:
            os.write(requests, b"n")
        for _, replies in self._pipes:
            os.read(replies, 1)


@dataclass(frozen=True)
class Segment:
    """Anonymous shared memory, every page touched, seen here as bytes."""

    fd: int
    bytes_N: Tensor


@contextmanager
def segment(nbytes: int) -> Iterator[Segment]:
    fd = os.memfd_create("bench-floor")
    os.ftruncate(fd, nbytes)
    bytes_N = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    bytes_N.zero_()
    try:
        yield Segment(fd, bytes_N)
    finally:
        os.close(fd)  # the mapping goes with the last tensor that looks at it


class SharedFloor:
    """`workers` processes, each with an inbox and an outbox of shared memory."""

    def __init__(
        self, pipes: Sequence[tuple[int, int]], inboxes: Sequence[Segment], outboxes: Sequence[Segment]
    ) -> None:
        self._pipes = pipes
        self._inboxes = inboxes
        self._outboxes = outboxes

    @classmethod
    @contextmanager
    def start(cls, workers: int, capacity: int, *, one_inbox: bool = False) -> Iterator[SharedFloor]:
        """Room for `capacity` bytes a worker; with `one_inbox` all read the same segment, as a broadcast would."""
        with ExitStack() as stack:
            if one_inbox:
                inboxes = [stack.enter_context(segment(capacity))] * workers
                outboxes = [stack.enter_context(segment(mmap.PAGESIZE)) for _ in range(workers)]
            else:
                inboxes = [stack.enter_context(segment(capacity)) for _ in range(workers)]
                outboxes = [stack.enter_context(segment(capacity)) for _ in range(workers)]
            pipes = [
                stack.enter_context(raw_worker(inbox.fd, outbox.fd))
                for inbox, outbox in zip(inboxes, outboxes, strict=True)
            ]
            floor = cls(pipes, inboxes, outboxes)
            floor._ask(TOUCH, [1] * workers)
            floor._wait()
            yield floor

    def echo(self, rows_BN: Tensor, joined_BN: Tensor | None = None) -> Tensor:
        """Rows through the workers and back, in order; into `joined_BN` if given, else into fresh memory."""
        source_N = rows_BN.reshape(-1).view(torch.uint8)
        parts = source_N.chunk(len(self._pipes))
        for inbox, (requests, _), part in zip(self._inboxes, self._pipes, parts, strict=True):
            inbox.bytes_N[: len(part)].copy_(part)
            os.write(requests, MESSAGE.pack(ECHO, len(part)))  # the worker copies while the next part goes in
        joined_N = torch.empty_like(source_N) if joined_BN is None else joined_BN.reshape(-1).view(torch.uint8)
        for outbox, (_, replies), target in zip(
            self._outboxes, self._pipes, joined_N.chunk(len(self._pipes)), strict=True
        ):
            os.read(replies, 1)
            target.copy_(outbox.bytes_N[: len(target)])
        return joined_N.view(rows_BN.dtype).view(rows_BN.shape)

    def broadcast(self, tensor: Tensor) -> None:
        """One copy into the segment that all workers see, and one message to each."""
        source_N = tensor.reshape(-1).view(torch.uint8)
        self._inboxes[0].bytes_N[: len(source_N)].copy_(source_N)
        self._ask(TOUCH, [len(source_N)] * len(self._pipes))
        self._wait()

    def _ask(self, operation: bytes, nbytes: Sequence[int]) -> None:
        for (requests, _), count in zip(self._pipes, nbytes, strict=True):
            os.write(requests, MESSAGE.pack(operation, count))

    def _wait(self) -> None:
        for _, replies in self._pipes:
            os.read(replies, 1)


class HopFloor:
    """Two processes, the producer and the consumer of a hop through shared memory."""

    def __init__(self, requests_fd: int, produced_fd: int, consumed_fd: int) -> None:
        self._requests_fd = requests_fd
        self._replies = {"producer": produced_fd, "consumer": consumed_fd}

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[HopFloor]:
        requests_read, requests_write = os.pipe()
        produced_read, produced_write = os.pipe()
        consumed_read, consumed_write = os.pipe()
        for_producer, for_consumer = (end.detach() for end in socket.socketpair())
        theirs = [(requests_read, produced_write, for_producer), (consumed_write, for_consumer)]
        environment = {**os.environ, **ONE_THREAD}
        processes = [
            subprocess.Popen([sys.executable, str(RAW_HOP), *map(str, fds)], pass_fds=fds, env=environment)
            for fds in theirs
        ]
        for fd in (fd for fds in theirs for fd in fds):
            os.close(fd)
        try:
            yield cls(requests_write, produced_read, consumed_read)
        finally:
            os.close(requests_write)  # its end of file ends the producer, whose end ends the consumer
            for process in processes:
                process.wait(timeout=10)
            os.close(produced_read)
            os.close(consumed_read)

    def hop(self, nbytes: int, *, fresh: bool) -> dict[str, float]:
        """The figures of one tensor of ones, in seconds; see bench.suites.dataplane. It is put into `fresh` shared
        memory, or into some that was touched before, as that of a pool is."""
        self._ask(raw_hop.PREPARE, nbytes)
        create_s, _, _ = self._ask(raw_hop.CREATE, nbytes)
        put_s, _, _ = self._ask(raw_hop.PUT)
        put_s = create_s + put_s if fresh else self._ask(raw_hop.PUT)[0]
        hop_s, inside_s, first = self._ask(raw_hop.FIRST, replier="consumer")
        touch_s, _, pages = self._ask(raw_hop.PAGES, replier="consumer")
        self._ask(raw_hop.DROP)
        if (first, pages) != (1, -(-nbytes // mmap.PAGESIZE)):
            raise AssertionError(f"{nbytes} bytes arrived as {pages} pages of ones")
        return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}

    def _ask(self, operation: bytes, nbytes: int = 0, replier: str = "producer") -> tuple[float, float, int]:
        """Seconds from the request to the reply, seconds inside the one who replies, the sum of what it saw."""
        started = time.perf_counter()
        os.write(self._requests_fd, raw_hop.MESSAGE.pack(operation, nbytes))
        reply = os.read(self._replies[replier], raw_hop.REPLY.size)
        seconds = time.perf_counter() - started
        inside_s, seen = raw_hop.REPLY.unpack(reply)
        return seconds, inside_s, seen


def copy_s(nbytes: int, *, fresh: bool) -> float:
    """Seconds in which one thread copies `nbytes`, into pages fresh from the kernel or touched before."""
    source = np.ones(nbytes, dtype=np.uint8)
    target = np.empty_like(source) if fresh else np.ones_like(source)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def products_s(shape: Shape, rows: int, dtype: torch.dtype = torch.float32) -> float:
    """Seconds of the matrix products alone by which `rows` tokens pass once through a model of this shape."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_a_layer = [
        (shape.hidden, heads + 2 * kv),
        (heads, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
    ]
    sizes = [*of_a_layer * shape.layers, (shape.hidden, shape.vocabulary)]
    weights = [torch.ones(size[::-1], dtype=dtype).t() for size in sizes]  # each its own, and laid out, as a model's
    inputs = {size[0]: torch.ones(rows, size[0], dtype=dtype) for size in sizes}
    outputs = {size[1]: torch.empty(rows, size[1], dtype=dtype) for size in sizes}

    def multiply() -> float:
        started = time.perf_counter()
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight, out=outputs[weight.shape[1]])
        return time.perf_counter() - started

    multiply()
    return min(multiply() for _ in range(3))


def decode_rate(shape: Shape, batch: int, dtype: torch.dtype = torch.float32) -> float:
    """Tokens a second of a batch that is decoded by matrix products alone, the output layer's included."""
    return batch / products_s(shape, batch, dtype)


def step_rate(load: StepLoad, ranks: int = 2) -> float:
    """Completion tokens a second of a step that is matrix products alone: decoding, and three passes of an update.

    Each of the ranks does its part with one thread, as Podium's do. One of them is measured.
    """
    shape, completions = SHAPES[load.shape], load.prompts * load.completions // ranks
    rows = completions * (load.prompt_tokens + load.new_tokens)
    chunk = min(rows, 2048)  # an update takes micro-batches too
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        decode_s = load.new_tokens * products_s(shape, completions)
        return load.tokens / (decode_s + 3 * products_s(shape, chunk) * rows / chunk)
    finally:
        torch.set_num_threads(threads)
