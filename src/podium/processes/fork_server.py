"""A process that has imported something, and forks children that have it at once.

    controller ──frame: number, pickled arguments, descriptors──▶ fork server ──fork──▶ child
               ──frame: number─────────────────────────kill────▶
               ◀─frame: number, wait status─────────────────────              ◀─SIGCHLD─

The controller numbers the children. No process but a child's parent can know that a process id still means it.
"""

import contextlib
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from podium.processes.channel import Channel
from podium.processes.launcher import Launched
from podium.processes.limits import explain_limit
from podium.processes.supervisor import Supervisor


class ForkServer(Launched):
    """The controller's side of a process whose ``main`` calls :func:`serve_forks`."""

    def __init__(self, line: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        super().__init__(line, env=env)
        self._on_end: dict[int, Callable[[int | None], object]] = {}  # by the child's number

    def fork(
        self, number: int, arguments: tuple[Any, ...], *descriptors: int, on_end: Callable[[int | None], object]
    ) -> None:
        """Start a child, which gets copies of ``descriptors``. Where :meth:`read_ends` runs, ``on_end`` is called with
        the child's wait status, or with None if the fork server ends before. Raises OSError if that is gone."""
        self._on_end[number] = on_end
        self.resume()
        self.channel.send(number, pickle.dumps(arguments), *descriptors)

    def kill(self, number: int) -> None:
        """Kill a child, unless it has ended. Raises OSError if the fork server is gone."""
        self.resume()
        self.channel.send(number)

    def read_ends(self, *, wait: bool = True) -> bool:
        """Read once, and tell of the children that have ended. Returns False when the fork server has ended."""
        frames = self.channel.read(wait=wait)
        for number, status in [(number, None) for number in self._on_end] if frames is None else frames:
            self._on_end.pop(number)(None if status is None else int(status))
        return frames is not None


def serve_forks(supervisor: Supervisor, channel: Channel, run: Callable[..., int]) -> None:
    """Serve until the controller is gone. A child calls ``run`` with its descriptors and arguments, and ends with the
    exit code that this returns. It inherits no other child's descriptors."""
    numbers: dict[int, int] = {}  # by process id
    pids: dict[int, int] = {}  # by number

    def live(descriptors: list[int], arguments: bytes) -> int:
        for fd in itertools.chain.from_iterable(channel.descriptors):
            os.close(fd)
        return run(descriptors, *pickle.loads(arguments))

    while (ready := supervisor.wait()) is not None:
        for pid, status in supervisor.reap():
            number = numbers.pop(pid)
            del pids[number]
            with contextlib.suppress(OSError):  # the controller is gone: the loop ends next
                channel.send(number, b"%d" % status)
        if channel.fileno() not in ready:
            continue
        frames = channel.read()
        if frames is None:
            return
        for number, body in frames:
            if not body:
                supervisor.kill(pids.get(number, -1))
                continue
            descriptors = channel.descriptors.popleft()
            play = partial(live, descriptors, body)
            pid = _try_fork(supervisor, channel, number, play)
            numbers[pid], pids[number] = number, pid
            for fd in descriptors:
                os.close(fd)


def _try_fork(supervisor: Supervisor, channel: Channel, number: int, run: Callable[[], int]) -> int:
    """Start a child. Returns its process id. Where the system refuses, which the controller hears as the child's end,
    it is 0: this process goes on for its other children."""
    try:
        return supervisor.fork(run)
    except OSError as error:
        sys.stderr.write(f"cannot start a process: {error}; {explain_limit(error)}\n")
        channel.send(number, b"%d" % (os.EX_OSERR << 8))
        return 0
