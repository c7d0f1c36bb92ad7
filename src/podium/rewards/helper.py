"""The far side of a grader: a small process that loads the reward once, and the forks of it that run the reward.

    grader ──control──▶ helper ──fork──▶ child 0, child 1, …
       └───────── one socket to each child: chunks of items down, one result an item up ─────────┘

The helper imports and never computes, so that its forks are clean and start in milliseconds however long the reward
takes to import. It alone is the children's parent: it kills and reaps them, hence no process id is ever guessed at.
It ends, and its children with it, when the control socket closes or its own parent is gone; a child whose helper is
killed gets SIGKILL from the kernel. Every child leads a process group, which dies with it: what a reward started ends
too.

What crosses the sockets: frames of an 8-byte length and a pickle (the greeting, chunks, results), and on the control
socket after the greeting fixed records, COMMAND down (FORK carries a descriptor) and EVENT up (a child's end).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from podium.errors import ConfigError
from podium.rewards.resolve import RewardFn, resolve_reward

__all__ = ["COMMAND", "EVENT", "FORK", "HEADER", "KILL", "Result", "judge", "main", "receive", "send"]

HEADER: Final = struct.Struct("<Q")
COMMAND: Final = struct.Struct("<cq")  # FORK or KILL, the child's serial number
EVENT: Final = struct.Struct("<qq")  # the child's serial number, its status as os.waitstatus_to_exitcode gives it
FORK: Final = b"F"
KILL: Final = b"K"

_PARENT_CHECK_S: Final = 1.0  # a copy of the control socket in a fork of the controller would hide its end
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class Result(NamedTuple):
    """One item's outcome. ``problem`` says what was wrong, reading on from "the reward …"; then there is no score."""

    item: int
    score: float
    parts: dict[str, float]
    problem: str
    traceback: str


def send(sock: socket.socket, value: object) -> None:
    """One frame."""
    data = pickle.dumps(value, protocol=5)
    sock.sendall(HEADER.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """The value of one frame. Raises EOFError if the other side closed."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = sock.recv_into(view[done:])
        if got == 0:
            raise EOFError
        done += got
    return data


def main(control_fd: int) -> None:
    """The helper's whole life. Its first frame is the reward: a name as text, or a pickled function as bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which ends us when it wants to
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    try:
        source = receive(control)
    except EOFError:
        return
    try:
        reward = resolve_reward(source) if isinstance(source, str) else pickle.loads(source)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        known = isinstance(error, ConfigError)
        send(control, (known, str(error) if known else f"{type(error).__name__}: {error}", "" if known else _trace()))
        return
    send(control, None)
    gc.freeze()  # no collection in a child touches, and thereby copies, what was loaded here
    _serve(control, reward, parent)


def _serve(control: socket.socket, reward: RewardFn, parent: int) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a child started and left behind is ours to reap
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    children: dict[int, int] = {}  # serial number -> process id
    incoming = select.poll()  # select() cannot take a descriptor above 1023
    incoming.register(control, select.POLLIN)
    incoming.register(wake_read, select.POLLIN)
    try:
        while os.getppid() == parent:
            ready = [fd for fd, _ in incoming.poll(1000 * _PARENT_CHECK_S)]
            if wake_read in ready:
                os.read(wake_read, 4096)
            for serial, status in _reap(children):
                control.sendall(EVENT.pack(serial, status))
            if control.fileno() in ready and not _obey(control, children, reward):
                break
    except (BrokenPipeError, ConnectionResetError):  # the controller is gone: what follows is all there is to do
        pass
    finally:
        for pid in children.values():
            _kill_group(pid)
        for pid in children.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _obey(control: socket.socket, children: dict[int, int], reward: RewardFn) -> bool:
    """Carry out one command; False when there will be no more."""
    data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
    if len(data) < COMMAND.size:
        return False
    order, serial = COMMAND.unpack(data)
    if order == KILL:
        if serial in children:
            _kill_group(children[serial])
        return True
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(fds[0], parent, control, reward)
    with suppress(OSError):  # the child does the same: whoever comes first
        os.setpgid(pid, pid)
    children[serial] = pid
    os.close(fds[0])
    return True


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group, and the process itself if it has not got its group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _reap(children: dict[int, int]) -> list[tuple[int, int]]:
    """Serial number and exit status of every child that ended; what is left of its group is killed."""
    serials = {pid: serial for serial, pid in children.items()}
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if pid in serials:  # else it is what a child started and left behind
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                del children[serials[pid]]
                ended.append((serials[pid], os.waitstatus_to_exitcode(status)))
    return ended


def _child(fd: int, parent: int, control: socket.socket, reward: RewardFn) -> None:
    """Run items until the socket closes. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that took hold
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        faulthandler.enable()
        sock = socket.socket(fileno=fd)
        while True:
            first, items = receive(sock)
            send(sock, None)  # "begun": from here on the time limit of the first item runs
            for index, (completion, row) in zip(first, items, strict=True):
                send(sock, tuple(judge(reward, index, completion, row)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may climb out of a fork into the helper's own loop
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prctl(option: int, value: int) -> None:
    with suppress(
        OSError, AttributeError
    ):  # Linux has it; elsewhere children of a killed helper end at their next read
        ctypes.CDLL(None).prctl(option, value)


def judge(reward: RewardFn, item: int, completion: str, row: Mapping[str, Any]) -> Result:
    """Run ``reward`` once and check what it returns."""
    try:
        value = reward(completion, row)
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a reward that leaves is a reward that failed
        return Result(item, math.nan, {}, f"raised {type(error).__name__}: {error}", _trace())
    if not isinstance(value, Mapping):
        score, problem = _number(value)
        return Result(item, score, {}, problem and f"returned {problem}", "")
    parts: dict[str, float] = {}
    for name, part in value.items():
        parts[str(name)], problem = _number(part)
        if problem:
            return Result(item, math.nan, {}, f"returned {problem} as part {name!r}", "")
    if "score" not in parts:
        names = ", ".join(map(repr, parts)) or "nothing"
        return Result(item, math.nan, {}, f'returned a mapping without "score" (it has {names})', "")
    return Result(item, parts["score"], parts, "", "")


def _number(value: object) -> tuple[float, str]:
    """A finite float and "", or nan and what ``value`` is instead."""
    problem = f"{repr(value)[:60]} ({type(value).__name__})"
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return math.nan, problem
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - it has __float__
    except Exception:  # noqa: BLE001 - tensors of many elements, overflow, a user's own class: no number, whatever it says
        return math.nan, problem
    return (number, "") if math.isfinite(number) else (math.nan, problem)


def _trace() -> str:
    """The traceback of the exception in flight, without this module's own frames."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace))
