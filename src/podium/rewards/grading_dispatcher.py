"""The process between a grader and its grading processes. It loads the reward, hands out items and keeps deadlines.

    grader ──pickled items──▶ dispatcher ──chunks──▶ grading process, a fork of the dispatcher
           ◀─frames of JSON──            ◀─frames──

A grading process has one chunk of items at a time. Each result that it sends gives it a new deadline. It is killed if
it passes the deadline, ends, or writes anything but the result of the item that it is at, and this item has then
failed. Its earlier results are kept, and its later items go to another process. The dispatcher never waits for one
party: one poll covers the grader, the grading processes, their ends and the nearest deadline.

Where a function is to be awaited, a grading process works on many items at once and answers them in any order. It
keeps the time limit of what it awaits by itself, and its deadline is the end of the time in which it must send
something. Nobody knows which item is to blame where such a process is killed. Each of its items is then graded again,
alone.
"""

import os
import pickle
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from podium.errors import ConfigError
from podium.exceptions import describe_error, format_error
from podium.processes import Channel, Frame, FrameError, Supervisor, describe_exit, make_frame, supervise
from podium.rewards.grading_process import ALIVE, REPLACE, encode, grade_awaited, grade_items
from podium.rewards.reached_texts import list_reached_names
from podium.rewards.reward_functions import Result, RewardFunctions

MOST_RESULT_BYTES: Final = 1 << 20

_MOST_ITEMS: Final = 64  # in a chunk: enough to make the cost of a message vanish, few enough to balance processes
_GRACE_S: Final = 1.0  # for a process that awaits to see that the time of an item is over


class Settings(NamedTuple):
    """The first message to the dispatcher. A reward is a name, or a pickled function. ``columns`` are those of the
    data, if they are known. ``processes`` is what the machine has room for if ``is_auto``."""

    rewards: tuple[str | bytes, ...]
    weights: tuple[float, ...]
    columns: tuple[str, ...] | None
    steps: int
    time_limit_s: float
    memory_bytes: int | None
    processes: int
    is_auto: bool
    optional: bool


def main() -> None:
    """Dispatch until the grader closes the channel. The result of item 0 is the reward's import."""
    supervise(_dispatch)


def _dispatch(supervisor: Supervisor, channel: Channel) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    first = channel.receive()
    if first is None:
        return
    settings: Settings = pickle.loads(first[1])
    functions, result = _load(settings)
    channel.send(0, encode(result))
    if functions is not None:
        supervisor.settle()
        _Dispatcher(supervisor, channel.connection, functions, settings).run()


def _load(settings: Settings) -> tuple[RewardFunctions | None, Result]:
    """The reward functions, and the result of item 0, which tells the grader what they ask for."""
    try:
        rewards = [pickle.loads(reward) if isinstance(reward, bytes) else reward for reward in settings.rewards]
        functions = RewardFunctions(
            rewards,
            settings.weights,
            settings.columns,
            settings.steps,
            optional=settings.optional,
            time_limit_s=settings.time_limit_s,
        )
        texts = [f"{form.name}\t{' '.join(list_reached_names(form.reward))}" for form in functions.forms]
        extra = {"notes": functions.notes, "texts": texts, "extras": sorted(functions.extras)}
        return functions, Result(0.0, extra={name: "\n".join(lines) for name, lines in extra.items()})
    except ConfigError as error:
        return None, Result(problem=str(error), limit="configuration")
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        return None, Result(problem=describe_error(error), traceback=format_error(error))


class _Stream(Channel):
    """A channel that never blocks. Bytes that it does not take at once wait in memory."""

    def __init__(self, sock: socket.socket, poller: select.poll, *, trusted: bool = False) -> None:
        super().__init__(sock, trusted=trusted, longest=MOST_RESULT_BYTES)
        sock.setblocking(False)
        self._outgoing = bytearray()
        self._poller = poller
        poller.register(sock, select.POLLIN)

    def queue(self, frames: bytes | bytearray = b"") -> None:
        """Send frames, and what waits."""
        self._outgoing += frames
        if not self._outgoing:
            return
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            del self._outgoing[: self.connection.send(self._outgoing)]
        with suppress(FileNotFoundError):  # the other side has closed
            self._poller.modify(self.connection, select.POLLIN | (select.POLLOUT if self._outgoing else 0))

    def stop_polling(self) -> None:
        with suppress(KeyError):
            self._poller.unregister(self.connection)


@dataclass(eq=False)
class _Child:
    """A grading process.

    Attributes:
        pending: The numbers of the items that it was given and has not answered, in its order.
        answered: The number of the item that it answered last; 0 if it has answered none.
        deadline: The end of the time in which it must say something, on time.monotonic's clock.
    """

    pid: int
    stream: _Stream
    pending: deque[int] = field(default_factory=deque)
    answered: int = 0
    deadline: float = 0.0


class _Dispatcher:
    def __init__(
        self, supervisor: Supervisor, connection: socket.socket, functions: RewardFunctions, settings: Settings
    ) -> None:
        self._supervisor = supervisor
        self._grader = _Stream(connection, supervisor.poller, trusted=True)
        self._functions = functions
        self._settings = settings
        self._most_items = max([_MOST_ITEMS, *(form.most_items for form in functions.forms)])
        self._patience_s = settings.time_limit_s + (_GRACE_S if functions.is_async else 0.0)
        awaits_all = settings.is_auto and all(form.is_async for form in functions.forms)
        self._most_children = 1 if awaits_all else settings.processes  # what is awaited is computed elsewhere
        self._alone: set[int] = set()  # items of processes that ended while they worked on several
        self._items: dict[int, bytes] = {}  # all items without a result, by number
        self._waiting: deque[int] = deque()  # numbers of items that no child has; dropped items may be among them
        self._children: dict[int, _Child] = {}  # by process id
        self._results = bytearray()

    def run(self) -> None:
        """Serve the grader until it closes its end of the socket."""
        while (ready := self._supervisor.wait(self._find_time_left())) is not None:
            if self._grader.fileno() in ready and not self._receive():
                return
            for child in [child for child in self._children.values() if child.stream.fileno() in ready]:
                child.stream.queue()
                self._read_results(child)
            for pid, status in self._supervisor.reap():
                if pid in self._children:
                    self._fail_ended(self._children[pid], os.waitstatus_to_exitcode(status))
            self._enforce_time_limits()
            self._hand_out()
            self._grader.queue(self._results)
            self._results.clear()

    def _find_time_left(self) -> float:
        """Return the seconds until the first deadline."""
        busy = [child.deadline for child in self._children.values() if child.pending]
        return max(0.0, min(busy) - time.monotonic()) if busy else float("inf")

    def _receive(self) -> bool:
        """Read items, and orders to drop an item, which have no data. Returns False when the grader has closed."""
        frames = self._grader.read()
        if frames is None:
            return False
        dropped = False
        for number, body in frames:
            if body:
                self._items[number] = make_frame(number, body)
                self._waiting.append(number)
            else:
                self._alone.discard(number)
                dropped |= self._items.pop(number, None) is not None
        if dropped:
            for child in list(self._children.values()):
                if child.pending and not any(number in self._items for number in child.pending):
                    self._end(child)
        return True

    def _hand_out(self) -> None:
        """Give chunks to idle children. The last chunks are smaller, so that all finish at about the same time."""
        while True:
            while self._waiting and self._waiting[0] not in self._items:
                self._waiting.popleft()
            alone = bool(self._waiting) and self._waiting[0] in self._alone
            child = self._find_child(alone) if self._waiting else None
            if child is None:
                return
            size = min(
                self._most_items - len(child.pending), max(1, len(self._waiting) // (2 * self._settings.processes))
            )
            taken = [self._waiting.popleft()]
            while not alone and len(taken) < size and self._waiting[0] not in self._alone:
                taken.append(self._waiting.popleft())
            if not child.pending:
                child.deadline = time.monotonic() + self._patience_s
            items = [number for number in taken if number in self._items]
            child.pending.extend(items)
            child.stream.queue(b"".join(self._items[number] for number in items))

    def _find_child(self, alone: bool) -> _Child | None:
        """A child that has nothing to do. One that awaits may have, unless an item is to be alone."""
        child = min(self._children.values(), key=lambda child: len(child.pending), default=None)
        if child is not None and not child.pending:
            return child
        if len(self._children) < (self._settings.processes if alone else self._most_children):
            return self._start_child()
        if alone or child is None or not self._functions.is_async:
            return None
        open_children = [child for child in self._children.values() if self._alone.isdisjoint(child.pending)]
        child = min(open_children, key=lambda child: len(child.pending), default=None)
        return child if child is not None and len(child.pending) < self._most_items else None

    def _start_child(self) -> _Child:
        ours, theirs = socket.socketpair()
        others = [child.stream.connection for child in self._children.values()]

        def run() -> int:
            for sock in (ours, *others):
                sock.close()
            if self._functions.is_async:
                return grade_awaited(theirs, self._functions, self._settings.memory_bytes, self._settings.time_limit_s)
            return grade_items(theirs, self._functions, self._settings.memory_bytes)

        with theirs:
            pid = self._supervisor.fork(run)
        self._children[pid] = child = _Child(pid, _Stream(ours, self._supervisor.poller))
        return child

    def _read_results(self, child: _Child) -> None:
        """Read a child's results, and end the child if it sent anything but the result of its item."""
        frames: list[Frame] | None = []
        with suppress(FrameError):  # its head is looked at below
            frames = child.stream.read()
        if frames is None:
            child.stream.stop_polling()
            if not child.pending:
                return self._end(child)
        for number, body in frames or ():
            is_alive = number == ALIVE and not body and self._functions.is_async
            if not is_alive and not self._expects(child, number):
                return self._end_for_output(child, number, make_frame(number, body))
            child.deadline = time.monotonic() + self._patience_s
            if is_alive:
                continue
            child.answered = number
            child.pending.remove(number)
            if self._items.pop(number, None) is not None:  # else it was dropped
                self._results += make_frame(number, body)
        if (head := child.stream.head()) is None:
            return None
        number, length = head
        if not self._expects(child, number):
            return self._end_for_output(child, number, child.stream.data)
        if length > MOST_RESULT_BYTES:
            problem = f"wrote over {MOST_RESULT_BYTES:,} bytes to the channel of its results"
            self._end(child, Result(problem=problem))
        return None

    def _expects(self, child: _Child, number: int) -> bool:
        if self._functions.is_async:
            return number in child.pending
        return bool(child.pending) and child.pending[0] == number

    def _end_for_output(self, child: _Child, number: int, data: bytes | bytearray) -> None:
        """End a child that sent something else than the result of its item."""
        if child.answered and number == child.answered:
            return self._end(child)  # the reward had answered by itself: no other item is to blame
        return self._end(child, Result(problem=f"wrote {bytes(data[:60])!r} to the channel of its results"))

    def _fail_ended(self, child: _Child, code: int) -> None:
        """Read the last results of a child that has ended, and fail the item at which it ended."""
        self._read_results(child)
        if child.pid in self._children:
            replaced = code == REPLACE and child.answered
            self._end(child, None if replaced else Result(problem=f"ended its process ({describe_exit(code)})"))

    def _enforce_time_limits(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.pending and child.deadline <= now]:
            self._read_results(child)  # this process may have been late, not the child
            if child.pid in self._children and child.pending and child.deadline <= now:
                self._end(child, Result(problem=f"ran over {self._settings.time_limit_s:g} s", limit="time"))

    def _end(self, child: _Child, result: Result | None = None) -> None:
        """Kill a child. ``result`` is that of the item that it was at. Without a result the item is graded anew, and so
        are all on which it worked at once."""
        del self._children[child.pid]
        child.stream.stop_polling()
        child.stream.close()
        self._supervisor.kill(child.pid)
        if result is not None and self._functions.is_async and len(child.pending) > 1:
            self._alone.update(child.pending)
        elif result is not None and child.pending:
            number = child.pending.popleft()
            if self._items.pop(number, None) is not None:
                self._results += make_frame(number, encode(result))
        self._waiting.extendleft(reversed(child.pending))
