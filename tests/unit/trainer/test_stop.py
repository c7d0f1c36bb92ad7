"""How a stop is asked for."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from podium.trainer.signals import ECHO_S, listen_for_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen_for_stop() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)  # an echo of the first, as make and timeout send it: not a second wish
        stop.requested_at = time.monotonic() - 2 * ECHO_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_outside_the_main_thread_there_is_no_signal_to_hear() -> None:
    heard: list[bool] = []

    def run() -> None:
        with listen_for_stop() as stop:
            stop.request("somebody asked")
            heard.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [True]
