"""Who polls the sockets of the backend local, and who sleeps meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.backends.local.io import TICK_S, IoLoop
from tests.waits import LONG_S, wait_until


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    loop = IoLoop()
    yield loop
    loop.stop()


def wake_ups(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep so far."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_the_io_thread_sleeps_while_somebody_waits_for_a_long_call(loop: IoLoop) -> None:
    ended = threading.Event()
    driver = threading.Thread(target=loop.drive, args=(ended.is_set, None))
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
        loop.drive(lambda: False, 10 * TICK_S)  # so long that the I/O thread has gone to sleep
        os.write(writable, b"x")
        assert heard.wait(LONG_S)
        heard.clear()
    loop.unwatch(readable)
    os.close(readable)
    os.close(writable)


@pytest.mark.parametrize("who", ["nobody", "the I/O thread", "somebody who waits for a long call"])
def test_what_is_to_be_done_soon_is_done_whoever_polls(loop: IoLoop, who: str) -> None:
    done, ended = threading.Event(), threading.Event()
    driver = threading.Thread(target=loop.drive, args=(ended.is_set, None))
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
    loop.drive(lambda: True, None)
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
    driver = threading.Thread(target=loop.drive, args=(lambda: False, None))
    driver.start()
    time.sleep(10 * TICK_S)
    loop.stop()
    driver.join(LONG_S)
    assert not driver.is_alive()
