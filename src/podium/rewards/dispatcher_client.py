"""The controller's side of a grader: start the dispatcher, send it items, settle each item when its result comes."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

import cloudpickle

from podium.errors import ConfigError, RewardError
from podium.exceptions import describe_error
from podium.processes import (
    START_LIMIT_S,
    Frame,
    FrameError,
    Launched,
    command,
    describe_exit,
    make_frame,
)
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.grading_dispatcher import Settings
from podium.rewards.grading_process import decode
from podium.rewards.resolve import RewardFn, Source, name_of
from podium.rewards.reward_functions import Result, make_grade, show_traceback
from podium.secrecy import find_secrets
from podium.telemetry import Note, emit
from podium.telemetry.progress import Counting

_MOST_PROCESSES: Final = 8
_LOOKS_S: Final = 1.0  # after which a silent dispatcher is told to go on
MOST_LOG_BYTES: Final = 64 << 20
_SLICE: Final = 256  # items that are sent at once


class Pending(Future[Any]):
    """The future of items that were sent together: a list of grades, which ``count`` counts, or without it one grade.

    Cancelling ends the work on the items, and so does the first error.
    """

    def __init__(
        self, processes: GradingProcesses, first: int, completions: Sequence[str], count: Counting | None
    ) -> None:
        super().__init__()
        self.numbers = range(first, first + len(completions))
        self._processes = processes
        self._completions = completions
        self._count = count
        self._grades: dict[int, Grade] = {}
        if not completions:
            self.set_result([])

    def name(self, number: int) -> str:
        """Return what errors call an item."""
        index = number - self.numbers.start
        return f"item {index}, " * (self._count is not None) + f"completion {self._completions[index][:80]!r}"

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._processes.drop(self.numbers)
        return cancelled

    def settle(self, number: int, outcome: Grade | Exception) -> None:
        """Take the grade of one item, or what it raises."""
        try:
            if isinstance(outcome, Exception):
                self.set_exception(outcome)
                self._processes.drop(self.numbers)
                return
            self._grades[number] = outcome
            if self._count is not None:
                self._count.done = len(self._grades)
            if len(self._grades) == len(self.numbers):
                grades = [self._grades[number] for number in self.numbers]
                self.set_result(grades[0] if self._count is None else grades)
        except InvalidStateError:
            pass  # it was cancelled


class GradingProcesses:
    """A dispatcher that has loaded the reward, and the thread that settles pending grades.

    Attributes:
        extras: What the reward asks for beside text and row.
        notes: What a person should know of how it is called.

    Raises:
        ConfigError: The reward's name is wrong, a library that it needs is missing, its module raised an exception, or
            it has a parameter whose value nobody knows.
        RewardError: The reward cannot be sent, or the dispatcher did not start.
    """

    def __init__(self, source: Source, label: str, config: RewardConfig, log_path: Path | None) -> None:
        self._label = label
        self._config, self._is_sum = config, source.is_sum
        loading = Pending(self, 0, [label], None)
        self._pending = {0: loading}  # by the item's number; item 0 is the reward's import
        self._next = 1
        self._stopping = False
        self._log_path, self._said = log_path, False
        self._error: RewardError | None = None  # why no more items are graded
        self._withheld = find_secrets(config.env)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = config.processes or min(_MOST_PROCESSES, cores)
        memory_bytes = None if config.memory_gib is None else int(config.memory_gib * (1 << 30))
        settings = Settings(
            tuple(reward if isinstance(reward, str) else _pickle(reward) for reward in source.rewards),
            config.weights,
            source.columns,
            source.steps,
            config.time_limit_s,
            memory_bytes,
            processes,
            is_auto=not config.processes,
            optional=source.optional,
        )
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // processes)),
            **{name: value for name, value in os.environ.items() if name not in self._withheld},
        }
        self._launched = Launched(command("podium.rewards.grading_dispatcher"), env=environment, log_path=log_path)
        self._reader = threading.Thread(target=self._read, name="podium-grader", daemon=True)
        self._reader.start()
        self._write(make_frame(0, pickle.dumps(settings)))
        try:
            loaded = loading.result(START_LIMIT_S).extra
            self.notes, self.extras = loaded["notes"].splitlines(), frozenset(loaded["extras"].split())
            self.notes += self._explain_withheld(loaded["texts"])
        except BaseException as error:
            self.stop(_LOOKS_S)  # while it imports, the dispatcher does not hear
            if not isinstance(error, TimeoutError):
                raise
            raise RewardError(
                f"importing the reward {label} took over {START_LIMIT_S:.0f} s; move slow work, such as a download, "
                "from the import into the function, or do it before the run"
            ) from None

    def alive(self) -> bool:
        """Return whether the dispatcher runs."""
        return self._launched.alive() and self._reader.is_alive()

    def send(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        extras: Sequence[Mapping[str, Any]],
        count: Counting | None,
    ) -> Pending:
        """Send completions to be graded. ``count`` is that of :class:`Pending`. Calls must not overlap.

        Raises:
            RewardError: A row cannot be sent.
        """
        pending = Pending(self, self._next, completions, count)
        self._next = pending.numbers.stop
        try:
            for start in range(0, len(completions), _SLICE):  # grading begins while the rest is pickled
                numbers = pending.numbers[start : start + _SLICE]
                parts = (values[start : start + _SLICE] for values in (completions, rows, extras))
                items = zip(*parts, strict=True)
                frames: list[bytes] = []
                for number, item in zip(numbers, items, strict=True):
                    try:
                        data = pickle.dumps(item, protocol=5)
                    except Exception as error:  # pickling runs code of any class
                        raise RewardError(
                            f"{pending.name(number)} cannot be sent to a grading process with its row: "
                            f"{describe_error(error)}; a row must hold plain values"
                        ) from error
                    frames.append(make_frame(number, data))
                self._pending.update(dict.fromkeys(numbers, pending))
                self._write(b"".join(frames))
        except BaseException:
            pending.cancel()
            raise
        if pending.done():  # an item has failed already, and those sent after it are dropped as well
            self.drop(pending.numbers)
        if self._error is not None:  # the reader has ended, perhaps before it could see these
            self._settle_all(self._error)
        return pending

    def drop(self, numbers: Sequence[int]) -> None:
        """Stop the work on those of these items that have no grade yet."""
        pending_numbers = [number for number in numbers if self._pending.pop(number, None) is not None]
        self._write(b"".join(map(make_frame, pending_numbers)))

    def drop_all(self) -> None:
        """Cancel all items that have no grade yet."""
        for pending in list(self._pending.values()):
            pending.cancel()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # after an end, which the reader tells
            self._launched.channel.write(data)

    def _read(self) -> None:
        """The reader thread: settle what a result comes for, and at the end all others."""
        error: RewardError | None = None
        try:
            while (frames := self._read_frames()) is not None:
                for number, body in frames:
                    if number >= self._next:
                        raise FrameError(f"no item has the number {number}")
                    if (pending := self._pending.pop(number, None)) is not None:
                        pending.settle(number, self._outcome(pending, number, decode(body)))
        except FrameError:
            error = RewardError(f"the process that loaded the reward {self._label} sent something other than a result")
        except Exception as failed:  # noqa: BLE001 - whoever waits for a grade would wait for ever
            error = RewardError(f"the grades of the reward {self._label} cannot be read: {describe_error(failed)}")
        self._error = error or self._explain_end()
        self._launched.channel.close()
        self._settle_all(self._error)

    def _read_frames(self) -> list[Frame] | None:
        """The next results from the dispatcher; None at the end. If its reward has stopped the dispatcher, which runs
        as the same user, the dispatcher goes on within a second."""
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._launched.channel, select.POLLIN)
        while not incoming.poll(1000 * _LOOKS_S):
            self._launched.resume()
            self._shorten_log()
        self._shorten_log()
        return self._launched.channel.read()

    def _shorten_log(self) -> None:
        """Drop the oldest half of what the reward has printed once this is long, and emit a note the first time."""
        path = self._log_path
        with suppress(OSError):
            if path is None or path.stat().st_size <= MOST_LOG_BYTES:
                return
            log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(log, "r+b", buffering=0) as file:
                _keep_end(file, MOST_LOG_BYTES // 2)
            if not self._said:
                self._said = True
                emit(
                    Note(
                        f"the reward {self._label} has printed over {MOST_LOG_BYTES >> 20} MiB: the oldest half of "
                        f"{path} is dropped, now and whenever the file is as long again; print less in the reward"
                    )
                )

    def _settle_all(self, error: RewardError) -> None:
        with suppress(KeyError):
            while True:
                number, pending = self._pending.popitem()
                pending.settle(number, error)

    def _outcome(self, pending: Pending, number: int, result: Result) -> Grade | Exception:
        missing = self._explain_missing(result.problem + result.traceback)
        if number == 0 and result.limit == "configuration":
            return ConfigError(result.problem + missing)
        if number == 0 and result.problem:
            text = f"the reward {self._label} cannot be imported in a grading process: {result.problem}{missing}"
            return RewardError(text + show_traceback(result))
        return make_grade(result, self._config, self._label, pending.name(number), missing, is_sum=self._is_sum)

    def _explain_missing(self, said: str) -> str:
        """The end of a message about an error that names variables which rewards do not have."""
        named = [name for name in self._withheld if name in said]
        return "".join(
            f". The environment's {name} does not reach rewards unless reward.env names it" for name in named
        )

    def _explain_withheld(self, texts: str) -> list[str]:
        """Sentences on variables that rewards do not have and whose names are in their code. A reward that handles
        their absence by itself would never raise an error that tells of it.

        Args:
            texts: A line for each reward, with its name, a tab, and the texts in its code.
        """
        notes = list[str]()
        for line in texts.splitlines():
            name, _, reached = line.partition("\t")
            if named := [variable for variable in self._withheld if variable in reached.split()]:
                do = "does" if len(named) == 1 else "do"
                notes.append(
                    f"the reward {name} names {' and '.join(named)}, which {do} not reach it, because variables that "
                    f"look like secrets are withheld: set --reward.env '[{', '.join([*self._config.env, *named])}]' "
                    "if the reward reads them"
                )
        return notes

    def _explain_end(self) -> RewardError:
        if self._stopping:
            return RewardError(f"the grader for the reward {self._label} was closed before this was graded")
        with suppress(subprocess.TimeoutExpired):
            self._launched.process.wait(5.0)
        status = self._launched.process.returncode
        self._launched.reap()
        self._launched.kill_descendants()  # the reward's import may have ended the dispatcher as if all were well
        cause = "closed its socket" if status is None else f"ended ({describe_exit(status)})"
        what = f"the process that grades with the reward {self._label}"
        error = RewardError(
            f"{what} {cause}; see what the process wrote to stderr. "
            "If it ran out of memory, set reward.processes or reward.memory_gib lower"
        )
        error.lost = f"{what}, which {cause}"
        return error

    def stop(self, limit_s: float = 10.0) -> None:
        """End all processes and wait for them, by force after ``limit_s``. Items without a result get an error."""
        self._stopping = True
        self._launched.end(limit_s)
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(timeout=1)


def _pickle(function: RewardFn) -> bytes:
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling runs code of any class: whatever it raises is our user's to see
        raise RewardError(
            f"the reward {name_of(function)} cannot be sent to a grading process: {describe_error(error)}; "
            "load what the reward needs inside the function, or name the reward as module:function"
        ) from error


def _keep_end(file: FileIO, nbytes: int) -> None:
    """Drop all of a log but its last ``nbytes``, from a whole line on. Others append to it meanwhile, and go on at the
    new end: what they write moves along, until nothing is new before the rest is cut off."""
    read = file.seek(-nbytes, os.SEEK_END)
    part, end = file.readall(), 0
    kept = b"(what the reward had printed before was dropped)\n" + part.partition(b"\n")[2]
    while part:
        end += os.pwrite(file.fileno(), kept, end)
        read += len(part)
        file.seek(read)
        part = kept = file.readall()
    file.truncate(end)
