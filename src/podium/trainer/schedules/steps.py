"""The steps of a run, as a schedule drives them, and the times of their stages.

    steps.collect(step)     take prompts, roll out, grade             generator, grader
    steps.learn(rollout)    log-probabilities, values, advantages,    policy, reference, critic, estimator;
                            update, weight sync                       the sync reaches the generator
    for step in steps       the steps in order; after each it evaluates and saves where that is due

The halves of steps may run beside each other: ``collect_ahead`` starts a ``collect`` in a thread. Steps take their
prompts in order, and are learned in order, one at a time. So a checkpoint has one place in the data, and prompts that
were collected and not yet learned are taken again by a run that is resumed from it. Only a schedule that declares
``side_by_side`` has several ``collect`` at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, Protocol

from podium.errors import ConfigError, DeadlineExceeded
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.evaluation import Evaluation, sets_of
from podium.runs.schedules import ScheduleDeclaration
from podium.telemetry import Note, StageFinished, emit, metrics as names
from podium.telemetry.formatting import clock_duration
from podium.telemetry.progress import Counting


@contextmanager
def name_stage(name: str, step: int) -> Iterator[None]:
    """Show that the stage runs, and add it and the step to the error of a call that passes its deadline."""
    try:
        with Counting("", stage=name):
            yield
    except DeadlineExceeded as error:
        error.args = (f"step {step}, stage {name}: {error}",)
        raise


class StageClock:
    """Times the stages of steps, of which several may be in progress. ``totals_…`` are by stage, over all steps."""

    def __init__(self) -> None:
        self.totals_s: dict[str, float] = {}
        self.totals_tokens: dict[str, float] = {}
        self._stages: dict[int, list[tuple[str, int, int]]] = {}  # by unfinished step: name, start and end in ns
        self._finished_ns = 0

    @contextmanager
    def stage(self, name: str, step: int, half: str) -> Iterator[None]:
        """Time the block as stage ``name`` of ``step``. If a step enters a stage twice, both times are added."""
        started_ns = time.monotonic_ns()
        try:
            with name_stage(name, step):
                yield
        finally:
            ended_ns = time.monotonic_ns()
            self._stages.setdefault(step, []).append((name, started_ns, ended_ns))
            emit(StageFinished(name, step, started_ns, ended_ns, half))

    def finish(self, step: int, tokens: Mapping[str, float]) -> dict[str, float]:
        """Return the times and speeds of ``step`` as metrics; ``tokens`` are by stage, and "step" is the whole.

        A step lasts from its first stage to now, or from the end of the step before where the two overlap. So the
        times of steps add up to the time that passed.
        """
        now_ns, stages = time.monotonic_ns(), self._stages.pop(step, [])
        began_ns = max(min((started_ns for _, started_ns, _ in stages), default=now_ns), self._finished_ns)
        self._finished_ns = now_ns
        spent: dict[str, float] = {}
        for name, started_ns, ended_ns in [*stages, ("step", began_ns, now_ns)]:
            spent[name] = spent.get(name, 0.0) + (ended_ns - started_ns) / 1e9
        for totals, more in ((self.totals_s, spent), (self.totals_tokens, tokens)):
            totals.update({name: totals.get(name, 0.0) + amount for name, amount in more.items()})
        speeds = {name: count / max(spent[name], 1e-9) for name, count in tokens.items() if name in spent}
        return {names.TIME_PREFIX + name: seconds for name, seconds in spent.items()} | {
            names.TOKENS_PER_S_PREFIX + name: speed for name, speed in speeds.items()
        }

    def tokens_per_s(self) -> dict[str, float]:
        """Return the speed of each stage over the whole run."""
        return {
            name: count / self.totals_s[name] for name, count in self.totals_tokens.items() if self.totals_s.get(name)
        }


class Rollout(Protocol):
    """The result of ``collect`` for ``step``, which ``learn`` consumes. A schedule only passes it on."""

    @property
    def step(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What is known of the evaluation of the step from which a run goes on.

    Attributes:
        last: The last step that was evaluated; None for a run that begins, or that has no evaluations.
        is_unknown: Whether the step was evaluated after its checkpoint, which does not know it.
        new_sets: The names of evaluation sets by which the step was not evaluated, although it was by others.
        has_others: Whether it was evaluated by sets that are none of the run's any more.
    """

    last: int | None = None
    is_unknown: bool = False
    new_sets: tuple[str, ...] = ()
    has_others: bool = False

    @classmethod
    def of(
        cls, step: int, last: Evaluation | None, rows: Sequence[Mapping[str, Any]], sets: Collection[str]
    ) -> Evaluated:
        """What a checkpoint of ``step``, with its ``last`` evaluation, and the ``rows`` of evaluations in metrics.jsonl
        know of that step, for a run with these evaluation sets."""
        in_rows = set[str]().union(*(sets_of(row) for row in rows if row["step"] == step))
        is_own = last is not None and last.step == step
        known_sets = in_rows | ({last.set_name} if last is not None and is_own else set())
        return cls(
            last=last.step if last is not None else 0,
            is_unknown=bool(in_rows) and not is_own,
            new_sets=tuple(sorted({*sets} - known_sets)) if known_sets else (),
            has_others=bool(in_rows - {*sets}),
        )

    def is_missing(self, step: int, config: PPOConfig | SFTConfig) -> bool:
        """Whether ``step`` is evaluated before the run goes on or ends."""
        is_due = step >= config.run.steps or _is_due(step, config.eval.every)
        return self.is_unknown or (is_due and (self.last not in (None, step) or bool(self.new_sets)))

    def explain(self, every: int) -> str:
        """Say why it is missing, where ``eval.every`` is ``every``."""
        if self.is_unknown:
            return "its checkpoint lacks its evaluation"
        by_sets = f" by {', '.join(filter(None, self.new_sets)) or 'these data'}" if self.new_sets else ""
        return f"it was not evaluated{by_sets}, and eval.every = {every}"


@dataclass(frozen=True, kw_only=True)
class StepCalls:
    """What :class:`Steps` calls.

    Attributes:
        collect: The first half of a step.
        learn: The second half. Returns the step's metrics.
        report: Reports the metrics of a step that was learned.
        evaluate: Evaluates after a step. Returns whether that ends the run.
        save: Begins a checkpoint after a step.
        check_saved: Raises the error of a checkpoint that could not be written, if there is one.
        stop_requested: Whether somebody asked the run to end.
        place: The place of the data's stream.
        take: Enters the prompts that a step has taken in the ledger.
        train: Enters in the ledger that a step's prompts were trained.
        drop: Enters in the ledger that a step's prompts were dropped, and why.
        apart: Why the two halves cannot run at the same time; empty if they can.
        evaluated: What is known of the evaluation of the step before these.
    """

    collect: Callable[[int], Rollout]
    learn: Callable[[Any], Mapping[str, float]]
    report: Callable[[int, Mapping[str, float]], None]
    evaluate: Callable[[int], bool]
    save: Callable[[int], None]
    check_saved: Callable[[], None]
    stop_requested: Callable[[], bool]
    place: Callable[[], Mapping[str, Any]]
    take: Callable[[int], None]
    train: Callable[[int], None]
    drop: Callable[[int, str], None]
    apart: str = ""
    evaluated: Evaluated = Evaluated()


class Steps:
    """The steps from ``first`` to ``last``, which a schedule collects and learns. A resumed run begins with a step
    above 1.

    Attributes:
        done: The last step that was learned, evaluated and saved.
        place: Place of the data's stream after the prompts of the last step that was learned.
    """

    def __init__(
        self,
        calls: StepCalls,
        config: PPOConfig | SFTConfig,
        declared: ScheduleDeclaration,
        first: int,
        threads: Executor,
    ) -> None:
        self.first, self.last = first, config.run.steps
        self.max_staleness = config.run.max_staleness
        self.done = first - 1
        self.place = calls.place()
        self._calls, self._config, self._declared, self._threads = calls, config, declared, threads
        in_turns = "the schedule declares staleness = 0" if declared.staleness == 0 else ""
        self._apart = calls.apart or in_turns  # why the two halves must not run beside each other
        self._changed = Condition()  # guards what follows
        self._running: dict[str, set[int]] = {"collect": set(), "learn": set()}  # by half, the steps that it works on
        self._begun = {"collect": self.done, "learn": self.done}  # by half, the last step that it began
        self._finished = {"collect": self.done, "learn": self.done}  # by half, the last step that it finished
        self._took = self.done  # the last step that has its prompts
        self._places: dict[int, Mapping[str, Any]] = {}  # by step, of those collected and not yet learned
        self._ends = self.done >= self.last
        self._given = self.done  # the step that the loop is at
        self._saved_s = time.monotonic()
        self._now = "step"  # or "evaluation" or "checkpoint"; "" between them
        self._took_s: dict[str, float] = {}  # what each of them took the last time
        self._failures: dict[int, str] = {}  # by step, why its last collect failed
        self._failure: BaseException | None = None  # of a collect; later ones would not get their prompts in order

    def __iter__(self) -> Iterator[int]:
        """Yield each step. The loop ends after the last step, after a request to stop, or when settings of ``eval`` end
        the run.

        Raises:
            ConfigError: The schedule did not learn the step that it was given.
        """
        evaluation, save = self._config.eval, self._config.save
        # A stop, or another eval.every before the resume, may have left the evaluation out.
        if self._calls.evaluated.is_missing(self.done, self._config):
            why = self._calls.evaluated.explain(evaluation.every)
            emit(Note(f"step {self.done} is evaluated before the run goes on, because {why}"))
            with self._time_work("evaluation"), name_stage("evaluate", self.done):
                self._ends = self._calls.evaluate(self.done)
            with self._time_work("checkpoint"), name_stage("save", self.done):
                self._calls.save(self.done)  # it may be the best one
            self._ends = self._ends or self._calls.stop_requested()
        while not self._ends:
            self._given = step = self.done + 1
            with self._time_work("step"):
                yield step
            if self._finished["learn"] != step:
                raise self._refusal(f"it was given step {step} and did not learn it; call learn once a step")
            reached = is_saved = False
            is_stopped, evaluates = self._calls.stop_requested(), step == self.last or _is_due(step, evaluation.every)
            if evaluates and not is_stopped:
                with self._time_work("evaluation"), name_stage("evaluate", step):
                    reached = self._calls.evaluate(step)
            elif evaluates and evaluation.items and step != self.last:
                emit(Note(f"step {step}: the evaluation that is due is left to the run that resumes from here"))
            self._ends = step == self.last or reached
            overdue = save.minutes > 0 and time.monotonic() - self._saved_s >= 60 * save.minutes
            is_due = self._ends or overdue or _is_due(step, save.every)
            if is_due or self._calls.stop_requested():
                with self._time_work("checkpoint"), name_stage("save", step):
                    self._calls.save(step)
                self._saved_s, is_saved = time.monotonic(), True
            self.done = step
            self._calls.check_saved()
            # a request during the save ends the run now, when nothing is lost
            self._ends = self._ends or (is_saved and self._calls.stop_requested())

    @contextmanager
    def _time_work(self, what: str) -> Iterator[None]:
        self._now, began_ns = what, time.monotonic_ns()
        yield
        self._now, self._took_s[what] = "", (time.monotonic_ns() - began_ns) / 1e9

    def describe_rest(self, save_s: float) -> str:
        """Say what is still done if the run is asked to end now. The last checkpoint took ``save_s`` seconds."""

        def describe_last(seconds: float) -> str:
            return f" (the last one took {clock_duration(seconds)})" if seconds >= 1 else ""

        what, step = self._now, self._given
        if self._ends:
            return "the run finishes its last checkpoint and its files, and ends"
        if step == self.last:
            return f"step {step} is the last, and the run ends as it would have done"
        if what == "checkpoint":
            return f"the run finishes the checkpoint of step {step}{describe_last(save_s)} and ends"
        rest = f"the evaluation of step {step}" if what == "evaluation" else f"step {step}"
        return f"the run finishes {rest}{describe_last(self._took_s.get(what, 0.0))} and saves{describe_last(save_s)}"

    def collect(self, step: int) -> Rollout:
        """Take prompts, draw completions and grade them. Raises what a stage raises."""
        if self._declared.side_by_side:
            with self._changed:  # threads begin in any order
                self._changed.wait_for(lambda: self._took >= step - 1 or self._failure is not None)
                if self._took < step - 1 and self._failure is not None:
                    raise self._failure
        if reason := self._failures.pop(step, ""):  # only now: a resumed run takes the prompts of a failure again
            self._calls.drop(step, reason)
        try:
            with self._run_half("collect", step):
                rollout = self._calls.collect(step)
                if step > self._took:
                    self.took(step)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._took = min(self._took, step - 1)
                self._changed.notify_all()
            self._failures[step] = f"{type(error).__name__} in collect"
            raise
        return rollout

    def took(self, step: int) -> None:
        """Record that ``step`` has taken prompts from the stream, so that the next step may take its prompts.

        The step may take more later. If the next one has taken its prompts before, the place of the data stays that
        before these: a resumed run passes over what was trained out of turn."""
        self._calls.take(step)
        if step >= self._took:
            self._places[step] = self._calls.place()
            with self._changed:
                self._took = step
                self._changed.notify_all()

    def collect_ahead(self, step: int) -> Future[Rollout]:
        """Start ``collect(step)`` in a thread. ``result()`` waits for it and raises its error.

        A ``collect`` that was started before is finished first, unless the schedule declares ``side_by_side``.

        Raises:
            ConfigError: ``step`` is beyond the last step.
        """
        self._check_exists(step)
        return self._threads.submit(self.collect, step)

    def first_of(self, coming: Sequence[Future[Rollout]]) -> Rollout:
        """Wait for the first of several ``collect_ahead``.

        If a later one fails, its error is raised at once, since the first one may never end.
        """
        pending = {*coming}
        while not coming[0].done():
            over, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in over:
                future.result()
        return coming[0].result()

    def learn(self, rollout: Rollout) -> None:
        """Train on ``rollout`` and send the new weights to the generator. Raises what a stage raises."""
        step = getattr(rollout, "step", None)
        if not isinstance(step, int):
            is_future = isinstance(rollout, Future)
            description = "Future: call .result()" if is_future else f"value of type {type(rollout).__name__}"
            raise self._refusal(f"learn takes what collect returned; it got a {description}")
        with self._run_half("learn", step):
            metrics = self._calls.learn(rollout)
            self._calls.train(step)
            self.place = self._places.pop(step, self.place)
        self._calls.report(step, metrics)

    def check_whole(self) -> None:
        """Raise ConfigError if the schedule left its loop before the end."""
        if not self._ends:
            learned = self._finished["learn"]
            steps = f"steps {self.first} to {learned} of {self.last}" if learned >= self.first else "no step"
            raise self._refusal(
                f"it learned {steps} and left the loop over `steps`; let `for step in steps` run to its end"
            )

    @contextmanager
    def _run_half(self, name: str, step: int) -> Iterator[None]:
        """Record that a half runs during the block. Raises ConfigError if it must not run now."""
        with self._changed:
            running = self._running[name]
            if running and not (name == "collect" and self._declared.side_by_side):
                raise self._refusal(f"{name}({step}) began while {name}({min(running)}) was running")
            self._check_exists(step)
            expected = self._begun[name] + 1
            if self.first <= step < expected:
                past = "collected" if name == "collect" else "learned"
                raise self._refusal(f"{name}({step}) was called twice; each step is {past} once, in order")
            if step != expected:
                before = "first" if expected == self.first else f"after {name}({expected - 1})"
                raise self._refusal(f"{name}({step}) was called {before}; expected {name}({expected})")
            if any(self._running.values()) and self._apart:
                raise self._refusal(f"collect and learn run beside each other, but {self._apart}")
            if name == "learn" and step != self._given:
                raise self._refusal(
                    f"learn({step}) was called before the loop over `steps` gave step {step}; write `for step in steps`"
                )
            running.add(step)
            self._begun[name] = step
        try:
            yield
            self._finished[name] = step
        except BaseException:
            self._begun[name] = step - 1  # it may be tried again
            raise
        finally:
            with self._changed:
                running.discard(step)

    def _check_exists(self, step: int) -> None:
        if step > self.last:
            raise self._refusal(f"collect({step}) is beyond the last step, {self.last}; ask `if step < steps.last`")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"run.schedule = {self._config.run.schedule!r}: {reason}")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
