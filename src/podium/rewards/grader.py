"""Run the reward functions over completions, in processes that can be killed or, for a debugger, in the script.

    submit(), grade() ──items───▶ dispatcher ──chunks of items───▶ grading processes
    reader thread     ◀─results──             ◀─one result an item─

The caller's thread sends items. A thread of the grader reads the results and settles futures. In the script there are
no processes: the caller's thread runs the functions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.dispatcher_client import GradingProcesses
from podium.rewards.in_script import GradingInScript
from podium.rewards.resolve import Rewards, Source, check_weights, list_rewards, name_of
from podium.rewards.text import find_reader, reads_answers
from podium.spelling import write_count
from podium.telemetry import Note, emit
from podium.telemetry.progress import Counting


class Grader:
    """Scores completions. A reward that hangs, crashes or leaks memory does not harm the run.

    Processes start at the first item, or at ``start``, and are reused. Any thread may use a grader. The processes, and
    whatever the reward started, end when the grader is closed or collected, and when this process ends in any way.

    Args:
        config: The reward's name, or several, and what happens when it misbehaves.
        reward: A function, or a list of functions and names, to use in place of ``config.name``. Functions travel by
            cloudpickle.
        log_path: File to which the reward's own output is appended. By default it goes where this process's goes.
        columns: The columns that every row has. Parameters of the functions are checked against them at the start. By
            default they are those of the first rows.
        steps: The number of steps of the run, which a function may ask for by ``trainer_state``.
        optional: Whether something else may score all completions. A function that cannot be called for such rows is
            then noted, and refused when it is called.
        in_script: Whether the functions run in this process. Breakpoints, prints and debuggers then work, and the
            limits of time and memory do not.

    Attributes:
        is_sum: Whether scores are sums of several rewards.

    >>> with Grader(RewardConfig(name="gsm8k")) as grader:
    ...     future = grader.submit("She has 3 + 4 = 7.", {"answer": "#### 7"})
    ...     future.result().score
    1.0
    """

    def __init__(
        self,
        config: RewardConfig | None = None,
        *,
        reward: Rewards | None = None,
        log_path: str | Path | None = None,
        columns: Collection[str] | None = None,
        steps: int = 0,
        optional: bool = False,
        in_script: bool = False,
    ) -> None:
        self.config = config or RewardConfig()
        rewards = list_rewards(self.config, reward)
        check_weights(self.config, len(rewards))
        self.name = ", ".join(map(name_of, rewards))
        column_names = None if columns is None else tuple(columns)
        self.is_sum = self.config.adds_up(len(rewards))
        self._source = Source(rewards=rewards, columns=column_names, steps=steps, optional=optional, is_sum=self.is_sum)
        self._log_path = Path(log_path) if log_path is not None else None
        self._in_script = in_script
        self._lock = threading.RLock()
        self._processes: GradingProcesses | GradingInScript | None = None
        self._end: weakref.finalize[..., Grader] | None = None
        self._closed = False

    @property
    def extras(self) -> frozenset[str]:
        """What the functions ask for beside text and row: some of ``forms.EXTRAS``.

        Raises:
            ConfigError, RewardError: :meth:`start` raises it.
        """
        with self._lock:
            return self._start_once().extras

    def read_answers(
        self, completions: Sequence[str], grades: Sequence[Grade | None], stop_texts: Sequence[str] = ()
    ) -> list[str | None] | None:
        """Return the answers that the reward reads in completions; None where it does not say what it reads.

        ``stop_texts`` are the texts that ended the completions, if any did.

        A reward says it by an entry ``answer`` beside its score. Of Podium's own, those that compare numbers, formulas
        and texts are known.
        """
        rewards = self._source.rewards
        if not reads_answers(rewards, grades):
            return None
        return [*map(find_reader(rewards), completions, grades, stop_texts or [""] * len(completions))]

    def start(self) -> None:
        """Load the reward now, so that a wrong name or a failing import raises before the run starts.

        Raises:
            ConfigError: The reward does not exist, a library that it needs is missing, its module raised an exception,
                or a function has a parameter whose value nobody knows.
            RewardError: The function cannot be sent. The message has the traceback.
        """
        with self._lock:
            self._start_once()

    def submit(self, completion: str, row: Mapping[str, Any]) -> Future[Grade]:
        """Send one completion to be graded, and return at once. The future can be cancelled.

        The future raises RewardError where :meth:`grade` does.

        Raises:
            ConfigError: :meth:`start` raises it, or the grader is closed.
            RewardError: :meth:`start` raises it, or the row cannot be sent to a grading process.
        """
        return self._send([completion], [row], None, None)

    def grade(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Grade]:
        """Return one grade for each completion, in order; ``rows[i]`` is the row that belongs to ``completions[i]``.

        ``extras[i]`` has the values of those :attr:`extras` that the functions ask for: ``completion_ids`` and
        ``prompt_ids`` as lists, and as ``trainer_state`` the number of finished steps.

        Raises:
            RewardError: The reward raised, ended its process, or returned no finite score, and ``config.on_error`` is
                "raise". The message names the reward, the item and the remedy.
            ConfigError: There is no such reward, the grader is closed, or the lengths differ.
        """
        if len(completions) != len(rows):
            raise ConfigError(
                f"{write_count(len(completions), 'completion')} and {write_count(len(rows), 'row')}: expected one "
                "row for each"
            )
        with Counting("rows graded", len(completions)) as count:
            sent = self._send(completions, rows, extras, count)
            return self._wait([sent], sent.result)

    def gather(self, futures: Sequence[Future[Grade]]) -> list[Grade]:
        """Wait for all ``futures``, and emit a note if the reward failed on some.

        If one future raises, the others are cancelled and the error is raised here. Ctrl-C closes the grader.
        """
        return self._wait(futures, lambda: [future.result() for future in futures])

    def _wait(self, futures: Sequence[Future[Any]], grades_of: Callable[[], list[Grade]]) -> list[Grade]:
        try:
            grades = grades_of()
        except Exception:
            for future in futures:
                future.cancel()
            raise
        except BaseException:
            self.close()
            raise
        failed = [grade for grade in grades if grade.error is not None]
        if failed:
            emit(
                Note(
                    f"the reward {self.name} failed on {len(failed)} of {write_count(len(grades), 'completion')}, "
                    f"which got {self.config.failure_score:g}; the first: {failed[0].error}"
                )
            )
        return grades

    def drop(self) -> None:
        """Cancel all items without a grade, and keep the processes. The futures of these items raise CancelledError."""
        with self._lock:
            if self._processes is not None:
                self._processes.drop_all()

    def close(self) -> None:
        """End all processes. Futures without a grade raise RewardError. A closed grader cannot be used again."""
        with self._lock:
            self._closed = True
            self._stop()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        extras: Sequence[Mapping[str, Any]] | None,
        count: Counting | None,
    ) -> Future[Any]:
        with self._lock:
            if self._source.columns is None and self._processes is None and rows:
                columns = sorted(set(rows[0]).intersection(*rows[1:]))
                self._source = replace(self._source, columns=tuple(columns))
            return self._start_once().send(completions, rows, extras or [{}] * len(rows), count)

    def _start_once(self) -> GradingProcesses | GradingInScript:
        if self._closed:
            raise ConfigError(f"the grader for the reward {self.name} is closed; make a new Grader")
        if self._processes is not None and not self._processes.alive():
            self._stop()  # the dispatcher ended while it had no items, so nothing is lost
        if self._processes is None:
            if self._in_script:
                self._processes = GradingInScript(self._source, self.name, self.config)
            else:
                self._processes = GradingProcesses(self._source, self.name, self.config, self._log_path)
            self._end = weakref.finalize(self, self._processes.stop)
            for note in self._processes.notes:
                emit(Note(note))
        return self._processes

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._processes = self._end = None
