"""The steps of a run, as a schedule drives them.

    steps.collect(step)     take prompts, roll out, grade             generator, grader
    steps.learn(rollout)    log-probabilities, values, advantages,    policy, reference, critic, estimator;
                            update, weight sync                       the sync reaches the generator
    for step in steps       the steps in order; after each it evaluates and saves where that is due

The halves of two steps may run beside each other: ``collect_ahead`` starts a ``collect`` in a thread. At most one
``collect`` and one ``learn`` run at a time, each in the order of steps. So a checkpoint has one place in the data, and
prompts that were collected and not yet learned are taken again by a run that is resumed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from podium.errors import ConfigError
from podium.telemetry import StepFinished, emit

if TYPE_CHECKING:
    from podium.trainer.session import StopRequest
    from podium.trainer.trainer import Trainer

__all__ = ["Rollout", "Steps"]


class Rollout(Protocol):
    """What ``collect`` returns and ``learn`` consumes. A schedule only passes it on."""

    @property
    def step(self) -> int:
        """The step that it was collected for."""
        ...


class Steps:
    """The steps from ``first`` to ``last``.

    Args:
        trainer: The trainer whose halves are driven.
        first: The first step to take; above 1 in a run that is resumed.
        stop: Says whether somebody asked the run to end.
        threads: Runs what ``collect_ahead`` starts.

    Attributes:
        done: The last step that was learned, evaluated and saved.
        place: Place of the data's stream after the prompts of the last step that was learned.
    """

    def __init__(self, trainer: Trainer[Any, Any, Any], first: int, stop: StopRequest, threads: Executor) -> None:
        self.first, self.last = first, trainer.config.run.steps
        self.done = first - 1
        self.place: Mapping[str, Any] = trainer.source.state()
        self._trainer, self._stop, self._threads = trainer, stop, threads
        self._lock = Lock()
        self._running: dict[str, int] = {}  # by half, the step that it works on
        self._finished = {"collect": self.done, "learn": self.done}  # by half, the last step that it finished
        self._places: dict[int, Mapping[str, Any]] = {}  # by step, of those collected and not yet learned
        self._ends = self.done >= self.last
        self._given = self.done  # the step that the loop is at

    def __iter__(self) -> Iterator[int]:
        """Give each step, until the last or until the run ends earlier: somebody asked, or ``eval.stop_at`` is reached.

        Raises:
            ConfigError: The schedule did not learn the step that it was given.
        """
        while not self._ends:
            self._given = step = self.done + 1
            yield step
            if self._finished["learn"] != step:
                raise self._refusal(f"it was given step {step} and did not learn it; call learn once a step")
            self._finish(step)

    def collect(self, step: int) -> Rollout:
        """Take prompts, draw completions and grade them. Raises what a stage raises."""
        with self._half("collect", step):
            rollout: Rollout = self._trainer.collect(step)
            self._places[step] = self._trainer.source.state()
        return rollout

    def collect_ahead(self, step: int) -> Future[Rollout]:
        """Start ``collect(step)`` in a thread. ``result()`` waits for it, and raises what it raised.

        A ``collect`` that was started before is finished first.

        Raises:
            ConfigError: ``step`` is beyond the last step.
        """
        self._check_exists(step)
        return self._threads.submit(self.collect, step)

    def learn(self, rollout: Rollout) -> None:
        """Train on ``rollout`` and send the new weights to the generator. Raises what a stage raises."""
        step, trainer = getattr(rollout, "step", None), self._trainer
        if not isinstance(step, int):
            found = (
                "Future: call .result()" if isinstance(rollout, Future) else f"value of type {type(rollout).__name__}"
            )
            raise self._refusal(f"learn takes what collect returned; it got a {found}")
        with self._half("learn", step):
            metrics = trainer.learn(rollout)
            self.place = self._places.pop(step, self.place)
        emit(StepFinished(step, {**metrics, **trainer.clock.finish(step, trainer.stage_tokens(metrics))}))

    def check_whole(self) -> None:
        """Check that the schedule's loop went to its end. Raises ConfigError if it left the loop before."""
        if not self._ends:
            learned = self._finished["learn"]
            steps = f"steps {self.first} to {learned} of {self.last}" if learned >= self.first else "no step"
            raise self._refusal(
                f"it learned {steps} and left the loop over `steps`; let `for step in steps` run to its end"
            )

    def _finish(self, step: int) -> None:
        """Evaluate and save after ``step``, where that is due, and find out whether the run ends here."""
        evaluation, save = self._trainer.config.eval, self._trainer.config.save
        reached = False
        if (step == self.last or _due(step, evaluation.every)) and not self._stop.requested:
            reached = self._trainer.evaluate(step)
        self._ends = step == self.last or reached or self._stop.requested
        if self._ends or _due(step, save.every):
            self._trainer.save(step)
        self.done = step

    @contextmanager
    def _half(self, name: str, step: int) -> Iterator[None]:
        """Note that a half runs. Raises ConfigError where it must not run now."""
        with self._lock:
            if name in self._running:
                raise self._refusal(f"{name}({step}) began while {name}({self._running[name]}) was running")
            self._check_exists(step)
            expected = self._finished[name] + 1
            if self.first <= step < expected:
                past = "collected" if name == "collect" else "learned"
                raise self._refusal(f"{name}({step}) was called twice; each step is {past} once, in order")
            if step != expected:
                before = "first" if expected == self.first else f"after {name}({expected - 1})"
                raise self._refusal(f"{name}({step}) was called {before}; expected {name}({expected})")
            if self._running and (reason := self._trainer.keeps_apart):
                raise self._refusal(f"collect and learn run beside each other, but {reason}")
            if name == "learn" and step != self._given:
                raise self._refusal(
                    f"learn({step}) was called before the loop over `steps` gave step {step}; write `for step in steps`"
                )
            self._running[name] = step
        try:
            yield
            self._finished[name] = step
        finally:
            with self._lock:
                del self._running[name]

    def _check_exists(self, step: int) -> None:
        if step > self.last:
            raise self._refusal(f"collect({step}) is beyond the last step, {self.last}; ask `if step < steps.last`")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"run.schedule = {self._trainer.config.run.schedule!r}: {reason}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
