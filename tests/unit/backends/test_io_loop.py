"""Who polls the sockets of the backend local, and who sleeps meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.backends.local.io import TICK_S, IoLoop
from podium.backends.local.process import Outbox
from podium.errors import ConfigError
from tests.waits import LONG_S, wait_until


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    loop = IoLoop()
    yield loop
    loop.stop()


def drive(loop: IoLoop, ended: Callable[[], bool], timeout_s: float | None = None) -> None:
    """Drive once the I/O thread has given the turn away. On a busy machine one request for it is not enough."""
    assert wait_until(lambda: loop.drive(ended, timeout_s))


def wake_ups(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep so far."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_the_io_thread_sleeps_while_somebody_waits_for_a_long_call(loop: IoLoop) -> None:
    ended = threading.Event()
    driver = threading.Thread(target=drive, args=(loop, ended.is_set))
    driver.start()
    assert wait_until(lambda: loop._asleep)
    before = wake_ups(loop._thread)
    time.sleep(50 * TICK_S)
    assert wake_ups(loop._thread) - before <= 2, "it goes to sleep once, and not again after each tick"
    ended.set()
    loop.wake()
    driver.join()


def test_the_io_thread_takes_in_what_comes_after_a_long_call(loop: IoLoop) -> None:
    readable, writable = os.pipe()
    heard = threading.Event()

    def on_readable() -> bool:
        os.read(readable, 1)
        heard.set()
        return True

    loop.watch(readable, on_readable)
    for _ in range(20):
        drive(loop, lambda: False, 10 * TICK_S)  # so long that the I/O thread has gone to sleep
        os.write(writable, b"x")
        assert heard.wait(LONG_S)
        heard.clear()
    loop.unwatch(readable)
    os.close(readable)
    os.close(writable)


@pytest.mark.parametrize("who", ["nobody", "the I/O thread", "somebody who waits for a long call"])
def test_what_is_to_be_done_soon_is_done_whoever_polls(loop: IoLoop, who: str) -> None:
    done, ended = threading.Event(), threading.Event()
    driver = threading.Thread(target=drive, args=(loop, ended.is_set))
    if who == "the I/O thread":
        time.sleep(10 * TICK_S)
    elif who != "nobody":
        driver.start()
        time.sleep(10 * TICK_S)
    loop.soon(done.set)
    assert done.wait(LONG_S)
    ended.set()
    loop.wake()
    if driver.ident is not None:
        driver.join()


def test_sending_without_end_does_not_keep_the_io_thread_from_polling(loop: IoLoop) -> None:
    readable, writable = os.pipe()
    heard = threading.Event()
    loop.watch(readable, lambda: bool(os.read(readable, 1)) and heard.set() is None)
    drive(loop, lambda: True)
    os.write(writable, b"x")
    until = time.monotonic() + LONG_S
    while not heard.is_set() and time.monotonic() < until:
        loop.sent_at = time.monotonic()
        time.sleep(TICK_S / 10)
    assert heard.is_set()
    loop.unwatch(readable)
    os.close(readable)
    os.close(writable)


def test_a_loop_ends_while_its_thread_sleeps() -> None:
    loop = IoLoop()
    driver = threading.Thread(target=drive, args=(loop, lambda: False))
    driver.start()
    time.sleep(10 * TICK_S)
    loop.stop()
    driver.join(LONG_S)
    assert not driver.is_alive()


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Have a handler of a signal run a function once, in the main thread."""
    before = signal.getsignal(signal.SIGUSR1)

    def run_in_handler(function: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: function())

    yield run_in_handler
    signal.signal(signal.SIGUSR1, before)


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_handler_of_a_signal_may_wait_inside_a_wait(loop: IoLoop, on_signal: Any) -> None:
    """As one does that saves a checkpoint: nobody else would take in its reply, nor those that it waits behind."""
    readable, writable = os.pipe()
    heard: list[bytes] = []

    def on_readable() -> bool:
        heard.append(os.read(readable, 1))
        return True

    def wait_inside() -> None:
        os.write(writable, b"x")
        assert loop.drive(lambda: len(heard) == 1, LONG_S)

    loop.watch(readable, on_readable)
    on_signal(wait_inside)
    sender = threading.Timer(5 * TICK_S, send_signal)
    sender.start()
    drive(loop, lambda: len(heard) == 1, 100 * LONG_S)  # it ends although the handler has taken in its reply
    assert heard == [b"x"]
    sender.join()
    loop.unwatch(readable)
    os.close(readable)
    os.close(writable)
    drive(loop, lambda: True, 0.0)  # the turn is free again
    assert not loop._polling


def test_no_wait_begins_inside_a_message(loop: IoLoop, on_signal: Any) -> None:
    """The message has to be taken in first, and its reader waits below: neither would ever go on."""
    readable, writable = os.pipe()
    refused: list[str] = []

    def wait_inside() -> None:
        try:
            loop.drive(lambda: False, LONG_S)
        except ConfigError as error:
            refused.append(str(error))

    def on_readable() -> bool:
        os.read(readable, 1)
        send_signal()
        return True

    loop.watch(readable, on_readable)
    on_signal(wait_inside)
    begun: list[int] = []

    def is_refused() -> bool:
        if not begun:  # this thread polls from here on
            begun.append(os.write(writable, b"x"))
        return bool(refused)

    drive(loop, is_refused, LONG_S)
    assert "set a flag there, and call where the script looks at it" in refused[0]
    loop.unwatch(readable)
    os.close(readable)
    os.close(writable)


def test_a_handler_of_a_signal_may_close_what_waits(on_signal: Any) -> None:
    loop = IoLoop()
    on_signal(loop.stop)
    sender = threading.Timer(5 * TICK_S, send_signal)
    sender.start()
    drive(loop, lambda: False, 100 * LONG_S)
    sender.join()


def test_no_message_is_sent_inside_another_one_of_its_thread(on_signal: Any) -> None:
    """Its thread would wait for itself, or its parts would come between those of the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    refused: list[str] = []

    class Interrupted:
        """A connection whose sending a signal interrupts."""

        def send(self, message: bytes, flags: int) -> int:
            send_signal()
            return ours.send(message, flags)

    def send_inside() -> None:
        try:
            outbox.send(b"inside", ())
        except ConfigError as error:
            refused.append(str(error))

    on_signal(send_inside)
    outbox = Outbox(Interrupted(), lambda fd: None, lambda: None)  # pyright: ignore[reportArgumentType] - what is used
    outbox.send(b"outside", ())
    assert "came inside a message from or to a worker" in refused[0]
    assert theirs.recv(100) == b"outside"
    on_signal(lambda: None)
    outbox.send(b"later", ())
    assert theirs.recv(100) == b"later"
    ours.close()
    theirs.close()
