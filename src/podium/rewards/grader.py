"""Run a reward over completions, in processes that can be killed.

    grade() ── chunks of items ──▶ child ── one result an item ──▶ grade()
       │                             ▲
       └── "kill child 3" ──▶ helper ┘ forks, kills, reaps; tells when a child has ended and how

Everything here happens in the thread that calls ``grade``: no thread of our own. Each child has one chunk at a time and
says when it takes it up; from then on each result pushes its deadline on. A child that passes it is killed for the item
it is at; what it had answered is kept, what lay behind that item goes to others. Who waits for whom: ``grade`` for
results, for ends and for the nearest deadline, all in one select; a child for its next chunk; the helper for commands.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from podium.errors import ConfigError, RewardError
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.helper import Result
from podium.rewards.processes import Child, GradingProcesses, describe_status
from podium.rewards.resolve import RewardFn
from podium.telemetry import Note, emit

__all__ = ["Grader"]

_CHUNK: Final = 64  # most items a message: enough to make its cost vanish, few enough to share out evenly
_MOST_PROCESSES: Final = 8
_BEGIN_LIMIT_S: Final = 60.0  # for a fork to take up its first chunk
_MOST_BLAMELESS: Final = 3  # children in a row that end before they take anything up


class Grader:
    """Scores completions with a reward that may spin, crash or leak without harm to the run.

    Processes start at the first ``grade`` (or ``start``) and are reused. May be called from any thread; calls wait for
    one another. Ends its processes when closed, collected, or when this process dies in any way.

    Args:
        config: the reward's name and what happens when it misbehaves.
        reward: a function to use in place of ``config.name``. It travels by cloudpickle.
        log_path: file to which the reward's own output is appended; by default it goes where this process's goes.

    >>> with Grader(RewardConfig(name="gsm8k")) as grader:
    ...     grader.grade(["She has 3 + 4 = 7."], [{"answer": "#### 7"}])[0].score
    1.0
    """

    def __init__(
        self,
        config: RewardConfig | None = None,
        *,
        reward: RewardFn | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        self.config = config or RewardConfig()
        self.name = self.config.name if reward is None else _name_of(reward)
        self._source: str | RewardFn = self.config.name if reward is None else reward
        self._log_path = Path(log_path) if log_path is not None else None
        self._lock = threading.RLock()
        self._processes: GradingProcesses | None = None
        self._closed = False

    def start(self) -> None:
        """Load the reward now, so that a wrong name or a failing import shows before anything else is done.

        Raises:
            ConfigError: there is no such reward; names the nearest.
            RewardError: its module cannot be imported, or the function cannot be sent; with the traceback.
        """
        with self._lock:
            self._started()

    def grade(self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """One grade a completion, in order; ``examples[i]`` is the row that belongs to ``completions[i]``.

        Raises:
            RewardError: the reward raised, ended its process, or returned what is no finite score, and
                ``config.on_error`` is "raise"; names reward, item and remedy.
            ConfigError: there is no such reward, the grader is closed, or the lengths differ.
        """
        if len(completions) != len(examples):
            raise ConfigError(f"{len(completions)} completions and {len(examples)} examples: expected one example each")
        with self._lock:
            if not completions:
                return []
            try:
                grades = _Round(self._started(), self.name, self.config, completions, examples).run()
            except Exception:
                self._stop()  # children may still be busy with this round; the next one starts anew
                raise
            except BaseException:
                self.close()
                raise
        self._tell(grades)
        return grades

    def _tell(self, grades: Sequence[Grade]) -> None:
        """A note if some completions got no score of the reward's own: a run goes on, but its owner should know."""
        failed = [grade for grade in grades if grade.error is not None]
        if failed:
            emit(
                Note(
                    f"the reward {self.name} failed on {len(failed)} of {len(grades)} completions, which got "
                    f"{self.config.failure_score:g}; the first: {failed[0].error}"
                )
            )

    def close(self) -> None:
        """End all processes. A closed grader grades no more."""
        with self._lock:
            self._closed = True
            self._stop()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> GradingProcesses:
        if self._closed:
            raise ConfigError(f"the grader for the reward {self.name} is closed; make a new Grader")
        if self._processes is not None and not self._processes.alive():
            self._stop()  # it ended while nothing was asked of it: nothing is lost
        if self._processes is None:
            threads = max(1, _cores() // _process_count(self.config))
            self._processes = GradingProcesses(self._source, self.name, self._log_path, threads)
        return self._processes

    def _stop(self) -> None:
        if self._processes is not None:
            self._processes.stop()
            self._processes = None


class _Round:
    """One call of ``grade``: which items wait, which child has which, what is known."""

    def __init__(
        self,
        processes: GradingProcesses,
        name: str,
        config: RewardConfig,
        completions: Sequence[str],
        examples: Sequence[Mapping[str, Any]],
    ) -> None:
        self._processes = processes
        self._name = name
        self._config = config
        self._completions = completions
        self._examples = examples
        self._waiting = deque(range(len(completions)))
        self._grades: dict[int, Grade] = {}
        self._width = _process_count(config)
        self._blameless = 0

    def run(self) -> list[Grade]:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._processes, selectors.EVENT_READ, None)
            self._bury()  # those that ended since the last round
            for child in self._processes.children.values():
                selector.register(child.sock, selectors.EVENT_READ, child)
            while len(self._grades) < len(self._completions):
                self._hand_out()
                for key, _ in selector.select(self._patience()):
                    if key.data is not None:
                        self._hear(key.data)
                self._bury()
                self._expire()
        return [self._grades[index] for index in range(len(self._completions))]

    def _hand_out(self) -> None:
        """Chunks to idle children, smaller towards the end, so that all finish at about the same time."""
        while self._waiting:
            child = self._idle_child()
            if child is None:
                return
            size = min(_CHUNK, max(1, len(self._waiting) // (2 * self._width)))
            indices = [self._waiting.popleft() for _ in range(size)]
            child.deadline = time.monotonic() + _BEGIN_LIMIT_S
            try:
                child.give(indices, [(self._completions[i], self._examples[i]) for i in indices])
            except Exception as error:  # pickling runs code of any class
                raise RewardError(
                    f"an example among items {indices[0]} to {indices[-1]} cannot be sent to a grading process: "
                    f"{type(error).__name__}: {error}; rows hold plain values"
                ) from error

    def _idle_child(self) -> Child | None:
        children = self._processes.children.values()
        for child in children:
            if not child.pending and child.doomed is None:
                return child
        if len(children) >= self._width:
            return None
        child = self._processes.fork()
        self._selector.register(child.sock, selectors.EVENT_READ, child)
        return child

    def _patience(self) -> float | None:
        """Seconds until the first deadline."""
        busy = [c.deadline for c in self._processes.children.values() if c.pending and c.doomed is None]
        return max(0.0, min(busy) - time.monotonic()) if busy else None

    def _hear(self, child: Child) -> None:
        for frame in child.take():
            child.deadline = time.monotonic() + self._config.time_limit_s
            child.begun = True
            self._blameless = 0
            if frame is not None:
                child.pending.popleft()
                self._record(frame)

    def _record(self, result: Result) -> None:
        if result.problem:
            self._fail(result.item, result.problem, result.traceback)
        else:
            correct = result.score >= self._config.correct_at
            self._grades[result.item] = Grade(result.score, result.parts, correct)

    def _bury(self) -> None:
        """Settle what children left that ended: their last words, the item they ended at, the items behind it."""
        for child, status in self._processes.ended():
            self._hear(child)
            if child.sock in self._selector.get_map():
                self._selector.unregister(child.sock)
            child.sock.close()
            if child.pending and not child.begun:
                self._excuse(status)
            elif child.doomed in child.pending:
                error = f"ran over {self._config.time_limit_s:g} s"
                index = child.pending.popleft()
                self._grades[index] = Grade(self._config.failure_score, error=error, timed_out=True)
            elif child.pending and child.doomed is None:
                self._fail(child.pending.popleft(), f"ended its process ({describe_status(status)})", "")
            self._waiting.extendleft(reversed(child.pending))

    def _excuse(self, status: int) -> None:
        """A child ended before it took up its chunk: not an item's fault, but it must not go on for ever."""
        self._blameless += 1
        if self._blameless >= _MOST_BLAMELESS:
            raise RewardError(
                f"{self._blameless} processes in a row that were to grade with {self._name} ended at once "
                f"({describe_status(status)}); what they wrote to stderr says more"
            )

    def _expire(self) -> None:
        now = time.monotonic()
        for child in list(self._processes.children.values()):
            if not child.pending or child.doomed is not None or child.deadline > now:
                continue
            self._hear(child)  # this thread may have been late, not the child
            if not child.pending or child.deadline > now:
                continue
            if not child.begun:
                raise RewardError(
                    f"a process that was to grade with {self._name} did nothing for {_BEGIN_LIMIT_S:.0f} s: does its "
                    "module start threads when imported? Start them in the function"
                )
            child.doomed = child.pending[0]
            self._processes.kill(child)

    def _fail(self, index: int, problem: str, trace: str) -> None:
        if self._config.on_error == "score":
            self._grades[index] = Grade(self._config.failure_score, error=problem)
            return
        what = f"item {index}, completion {self._completions[index][:80]!r}: the reward {self._name} {problem}"
        remedy = (
            'expected a finite number, or a mapping of named finite numbers with "score": repair the reward, or set '
            f"reward.on_error to score, which gives such items {self._config.failure_score:g} and goes on"
        )
        raise RewardError(f"{what}; {remedy}" + (f"\n\nIn the grading process:\n{trace.rstrip()}" if trace else ""))


def _process_count(config: RewardConfig) -> int:
    return config.processes or min(_MOST_PROCESSES, _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name_of(function: RewardFn) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}:{name}" if module else name
