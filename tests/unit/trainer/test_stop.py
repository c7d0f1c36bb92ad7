"""How a stop is asked for. tests/integration/test_train_stops.py has whole runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import podium.trainer.signals as signals
from podium.errors import RunInterrupted
from podium.trainer.signals import ECHO_S, StopRequest, listen_for_stop
from tests.waits import wait_until
from tests.warm_python import WarmPopen

BOTH = [signal.SIGINT, signal.SIGTERM]


@contextmanager
def training() -> Iterator[StopRequest]:
    """A run that trains already, so that there is a step to finish."""
    with listen_for_stop() as stop:
        stop.begun = True
        yield stop


def send(number: signal.Signals, stop: StopRequest) -> None:
    """Send a signal, and wait until it was heard."""
    os.kill(os.getpid(), number)
    assert wait_until(lambda: stop.requested)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's parent passes no signals on."""
    monkeypatch.setattr(signals, "_parent_passes_signals_on", lambda: False)


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.usefixtures("alone")
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted) as interruption, training() as stop:
        send(number, stop)
        assert not stop.forced
        os.kill(os.getpid(), number)
        threading.Event().wait(60)
    assert interruption.value.code == 128 + number
    assert isinstance(interruption.value, KeyboardInterrupt)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("alone")
def test_within_the_run_a_signal_is_a_keyboard_interrupt_which_no_handler_of_system_exit_takes() -> None:
    """As those are that explain what a user's code raises. RunInterrupted, a SystemExit, is the script's alone."""
    with pytest.raises(RunInterrupted) as interruption, training() as stop:
        send(signal.SIGTERM, stop)
        try:
            wait_for_second(signal.SIGTERM)
        except (Exception, SystemExit) as error:
            raise AssertionError("the signal was taken for a failure") from error
        except KeyboardInterrupt as error:
            assert type(error) is KeyboardInterrupt
            raise
    assert "wait_for_second" in [entry.name for entry in interruption.traceback]
    assert interruption.value.__suppress_context__


def wait_for_second(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(60)


@pytest.mark.usefixtures("alone")
def test_a_notebook_gets_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt) as interruption, training() as stop:
        listener = [thread for thread in threading.enumerate() if thread.name == "podium-signals"][-1]  # the newest
        send(signal.SIGINT, stop)
        try:
            wait_for_second(signal.SIGINT)
        finally:
            listener.join(0.2)
            assert listener.is_alive(), "it ends with the run: a signal's handler writes to the pipe that it closes"
    assert type(interruption.value) is KeyboardInterrupt
    assert "wait_for_second" in [entry.name for entry in interruption.traceback]


@pytest.mark.parametrize("number", [*BOTH, signal.SIGHUP])
def test_the_first_signal_before_the_training_begins_ends_the_run(number: signal.Signals) -> None:
    with pytest.raises(RunInterrupted), listen_for_stop():
        os.kill(os.getpid(), number)
        threading.Event().wait(60)


@pytest.mark.usefixtures("alone")
def test_what_the_second_signal_causes_does_not_take_its_place() -> None:
    with pytest.raises(RunInterrupted), training() as stop:
        send(signal.SIGINT, stop)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(60)
        finally:
            raise ValueError("a worker is gone")


@pytest.mark.usefixtures("alone")
def test_a_terminal_that_is_gone_only_asks() -> None:
    """The kernel and the shell send SIGHUP, and a session's manager sends SIGTERM with it."""
    with training() as stop:
        send(signal.SIGHUP, stop)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            before = stop.requested_at
            os.kill(os.getpid(), number)
            assert number == signal.SIGHUP or wait_until(lambda: stop.requested_at > before)  # noqa: B023 - called here
        assert not stop.forced


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listen_for_stop():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_copy_of_the_first_signal_from_the_parent_is_no_second_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_parent_passes_signals_on", lambda: True)
    with pytest.raises(RunInterrupted), training() as stop:
        send(signal.SIGTERM, stop)
        stop.requested_at = time.monotonic() + 3600  # however long the next one takes
        send(signal.SIGTERM, stop)
        send(signal.SIGHUP, stop)
        assert not stop.forced
        stop.requested_at = time.monotonic() - 2 * ECHO_S
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)


@pytest.mark.parametrize("own_group", [True, False])
def test_only_a_parent_in_this_process_group_passes_signals_on(own_group: bool) -> None:
    """As ``timeout`` and ``make`` are, and an interactive shell is not."""
    code = "from podium.trainer.signals import _parent_passes_signals_on as passes; print(passes())"
    with WarmPopen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=own_group
    ) as child:
        assert child.communicate()[0] == f"{not own_group}\n"


@pytest.mark.usefixtures("alone")
def test_a_signal_of_a_fork_is_not_the_runs() -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with training() as stop:
            reads, writes = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(writes, b"forked")
                signal.pause()
            assert os.read(reads, 6) == b"forked"
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
            send(signal.SIGTERM, stop)
            assert not stop.forced
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.usefixtures("alone")
def test_a_handler_of_somebody_elses_gets_its_signals() -> None:
    """A debugger that has begun to run code takes Ctrl-C for itself."""
    heard: list[int] = []
    with training() as stop:
        ours = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_until(lambda: heard)
        send(signal.SIGTERM, stop)  # it is the first that the run has heard of
        assert not stop.forced
        signal.signal(signal.SIGINT, ours)


@pytest.mark.usefixtures("alone")
def test_a_loop_that_hears_signals_itself_does_not_keep_the_run_from_hearing_them() -> None:
    reads, writes = socket.socketpair()
    with reads, writes, training() as stop:
        writes.setblocking(False)
        ours = signal.set_wakeup_fd(writes.fileno())  # as a loop of asyncio does for its signal handlers
        send(signal.SIGINT, stop)
        assert not stop.forced
        assert signal.set_wakeup_fd(ours) == writes.fileno()


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
