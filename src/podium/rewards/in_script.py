"""A reward in the script's own process, where breakpoints, prints and debuggers work, and nothing can kill it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from podium.errors import RewardError
from podium.rewards.call_forms import Item
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.resolve import Source
from podium.rewards.reward_functions import Clock, Result, RewardFunctions, await_rewards, call_rewards, make_grade
from podium.telemetry import Note, emit
from podium.telemetry.progress import Counting

T = TypeVar("T")

_MOST_AWAITED: Final = 64  # items at once


class GradingInScript:
    """Scores items when they are sent. It offers what :class:`GradingProcesses` does.

    Attributes:
        extras: What the reward asks for beside text and row.
        notes: What a person should know of how it is called.

    Raises:
        ConfigError: A function does not exist, or has a parameter whose value nobody knows.
    """

    def __init__(self, source: Source, label: str, config: RewardConfig) -> None:
        self._functions = RewardFunctions(
            source.rewards,
            config.weights,
            source.columns,
            source.steps,
            optional=source.optional,
            time_limit_s=config.time_limit_s,
        )
        self.extras, self.notes = self._functions.extras, self._functions.notes
        self._label, self._config, self._is_sum = label, config, source.is_sum
        self._calling = threading.RLock()  # threads take turns, as calls of workers in this process do
        self._runner: asyncio.Runner | None = None
        self._was_slow = False

    def alive(self) -> bool:
        """Return True: what is in this process lives."""
        return True

    def send(
        self,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        extras: Sequence[Mapping[str, Any]],
        count: Counting | None,
    ) -> Future[Any]:
        """Score the items. The future is done: it has a list of grades, which ``count`` counts, or, without it, one
        grade; or it has an error."""
        sent: Future[Any] = Future()
        try:
            items = [Item(*parts) for parts in zip(completions, rows, extras, strict=True)]
            with self._calling:
                results = enumerate(self._call_rewards(items, count or Counting("")))
                names = "" if count is None else "item {}, "
                grades = [self._grade(names.format(number), items[number], result) for number, result in results]
        except RewardError as error:
            sent.set_exception(error)
        else:
            sent.set_result(grades[0] if count is None else grades)
        return sent

    def drop_all(self) -> None:
        """Do nothing: no item waits."""

    def stop(self) -> None:
        """Close the event loop."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with suppress(KeyboardInterrupt):  # which a task has raised already, and raises again as it is cancelled
                _run_apart(runner.close)

    def _call_rewards(self, items: Sequence[Item], count: Counting) -> Iterator[Result]:
        if self._functions.is_async and items:
            yield from self._run(lambda: self._judge_awaited(items, count))
            return
        for item in count.over(items):
            began_s = time.monotonic()
            result = call_rewards(self._functions, item)
            self._note_slow(time.monotonic() - began_s)
            yield result

    async def _judge_awaited(self, items: Sequence[Item], count: Counting) -> list[Result]:
        clock, room = Clock(self._config.time_limit_s), asyncio.Semaphore(_MOST_AWAITED)

        async def judge_one(item: Item) -> Result:
            async with room:
                result = await await_rewards(self._functions, item, clock)
            count.done += 1
            return result

        return await asyncio.gather(*map(judge_one, items))

    def _run(self, make: Callable[[], Coroutine[Any, Any, list[Result]]]) -> list[Result]:
        """Run a coroutine in the one event loop of the reward, whose clients may belong to it."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        runner = self._runner
        return _run_apart(lambda: runner.run(make()))

    def _grade(self, prefix: str, item: Item, result: Result) -> Grade:
        if type(result.error).__name__ == "BdbQuit":
            raise RewardError(f"the debugger was left within the reward {self._label}") from result.error
        name = f"{prefix}completion {item.completion[:80]!r}"
        grade = make_grade(result, self._config, self._label, name, is_sum=self._is_sum)
        if isinstance(grade, RewardError):
            raise grade
        return grade

    def _note_slow(self, seconds: float) -> None:
        """Say once that nothing ends a reward that takes longer than its limit."""
        if seconds > self._config.time_limit_s and not self._was_slow:
            self._was_slow = True
            emit(
                Note(
                    f"the reward {self._label} took {seconds:.1f} s for one completion, and reward.time_limit_s = "
                    f"{self._config.time_limit_s:g}. On this backend it runs in the script's own process, where it is "
                    "not killed, so its score counts; on the others it is killed and gets reward.failure_score"
                )
            )


def _run_apart(run: Callable[[], T]) -> T:
    """Call ``run``, in a thread of its own where this thread runs an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, thread_name_prefix="podium-reward") as thread:
        return thread.submit(run).result()
