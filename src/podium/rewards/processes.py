"""The near side of a grader's processes: start the helper, ask it for children, talk to them, end them all."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import cloudpickle

from podium.errors import ConfigError, RewardError
from podium.rewards.helper import COMMAND, EVENT, FORK, HEADER, KILL, Result, receive, send
from podium.rewards.resolve import RewardFn

__all__ = ["START_LIMIT_S", "Child", "GradingProcesses", "describe_status"]

START_LIMIT_S: Final = 300.0  # for the helper to import the reward

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from podium.rewards.helper import main; main(int(sys.argv[1]))"
)


@dataclass(eq=False)
class Child:
    """One grading process as the controller sees it.

    Attributes:
        serial: its number in the helper's records.
        pending: indices of the items it was given and has not answered, in the order it takes them.
        begun: whether it has taken up the chunk it was given last.
        deadline: on time.monotonic's clock, for the item it is at (or for taking up the chunk).
        doomed: the item it was told to die for, if it was.
    """

    serial: int
    sock: socket.socket
    pending: deque[int] = field(default_factory=deque)
    begun: bool = False
    deadline: float = 0.0
    doomed: int | None = None
    _buffer: bytearray = field(default_factory=bytearray)

    def give(self, indices: Sequence[int], items: Sequence[tuple[str, Any]]) -> None:
        """Send one chunk; an end of the child that shows here is reported by the helper anyway."""
        self.pending.extend(indices)
        self.begun = False
        with suppress(BrokenPipeError, ConnectionResetError):
            send(self.sock, (indices, items))

    def take(self) -> list[Result | None]:
        """Every frame that has arrived: results, and None where it took up a chunk. Never waits."""
        with suppress(BlockingIOError, ConnectionResetError):
            while data := self.sock.recv(1 << 18, socket.MSG_DONTWAIT):
                self._buffer += data
        frames: list[Result | None] = []
        start, end = 0, len(self._buffer)
        while end - start >= HEADER.size:
            stop = start + HEADER.size + HEADER.unpack_from(self._buffer, start)[0]
            if stop > end:
                break
            frame = pickle.loads(memoryview(self._buffer)[start + HEADER.size : stop])
            frames.append(None if frame is None else Result(*frame))
            start = stop
        del self._buffer[:start]
        return frames


class GradingProcesses:
    """A helper that has loaded the reward, and its children. Not thread-safe; :meth:`stop` may be called twice.

    Raises:
        ConfigError: the reward's name is wrong.
        RewardError: the reward cannot be imported or sent, or the helper did not come up.
    """

    def __init__(self, source: str | RewardFn, label: str, log_path: Path | None, threads: int) -> None:
        self._label = label
        payload = source if isinstance(source, str) else _pickled(source, label)
        self._control, far = socket.socketpair()
        with far:
            self._helper = _launch(far, log_path, threads)
        self.children: dict[int, Child] = {}
        self._finalizer = weakref.finalize(self, _end, self._control, self._helper, self.children)
        self._serials = 0
        try:
            self._greet(payload)
        except BaseException:
            self.stop()
            raise

    def _greet(self, payload: str | bytes) -> None:
        self._control.settimeout(START_LIMIT_S)
        try:
            send(self._control, payload)
            answer = receive(self._control)
        except TimeoutError:
            raise RewardError(
                f"importing the reward {self._label} took over {START_LIMIT_S:.0f} s; move what it waits for into the "
                "function, or make it available beforehand"
            ) from None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RewardError(self.how_it_ended()) from None
        if answer is not None:
            known, text, trace = answer
            if known:
                raise ConfigError(text)
            raise RewardError(f"the reward {self._label} cannot be imported in a grading process: {text}\n\n{trace}")
        self._control.settimeout(None)

    def alive(self) -> bool:
        """Whether the helper is there."""
        return self._helper.poll() is None

    def fileno(self) -> int:
        """The control socket's, readable when :meth:`ended` has something to say."""
        return self._control.fileno()

    def fork(self) -> Child:
        """One more child, ready to be given a chunk."""
        near, far = socket.socketpair()
        child = Child(self._serials, near)
        self._serials += 1
        with far:
            self._command(FORK, child.serial, [far.fileno()])
        self.children[child.serial] = child
        return child

    def kill(self, child: Child) -> None:
        """Have it killed; :meth:`ended` tells when that is done."""
        self._command(KILL, child.serial, [])

    def ended(self) -> list[tuple[Child, int]]:
        """The children that ended since the last call, each with its status; what they sent can still be taken.

        Raises:
            RewardError: the helper itself ended.
        """
        try:
            data = self._control.recv(EVENT.size * 256, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            raise RewardError(self.how_it_ended())
        while len(data) % EVENT.size:
            data += self._control.recv(EVENT.size - len(data) % EVENT.size)
        return [(self.children.pop(serial), status) for serial, status in EVENT.iter_unpack(data)]

    def how_it_ended(self) -> str:
        """For an error: the helper is gone, and with which status."""
        with suppress(subprocess.TimeoutExpired):
            self._helper.wait(timeout=5)
        status = self._helper.returncode
        cause = "closed its socket" if status is None else f"ended ({describe_status(status)})"
        return (
            f"the process that grades with the reward {self._label} {cause}; what it wrote to stderr says more. If it "
            "was killed for memory, set reward.processes lower"
        )

    def stop(self) -> None:
        """End the helper and all children, and wait for them."""
        self._finalizer()

    def _command(self, order: bytes, serial: int, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [COMMAND.pack(order, serial)], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise RewardError(self.how_it_ended()) from None


def describe_status(status: int) -> str:
    """ "signal SIGKILL" or "exit code 3"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _pickled(function: RewardFn, label: str) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling runs code of any class: whatever it raises is our user's to see
        raise RewardError(
            f"the reward {label} cannot be sent to a grading process: {type(error).__name__}: {error}; let it load "
            "what it needs itself, or name it as module:function"
        ) from error


def _launch(far: socket.socket, log_path: Path | None, threads: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter with our sys.path and working directory, out of reach of the terminal's Ctrl-C."""
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    log: IO[bytes] | None = None
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(far.fileno()), path],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,
        )
    finally:
        if log is not None:
            log.close()


def _end(control: socket.socket, helper: subprocess.Popen[bytes], children: dict[int, Child]) -> None:
    control.close()  # the helper's signal to end its children and itself
    for child in children.values():
        child.sock.close()
    children.clear()
    try:
        helper.wait(timeout=5)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.wait()
