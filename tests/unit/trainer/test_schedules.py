"""What a schedule drives, in which order; and what a wrong schedule is told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Semaphore
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from podium.errors import ConfigError, RewardError
from podium.runs.evaluation import Evaluation
from podium.runs.schedules import declaration_of
from podium.telemetry import Note, subscribe
from podium.trainer.checks.preflight import load_schedule
from podium.trainer.schedules import Schedule, ScheduleDeclaration, Steps, sync
from podium.trainer.schedules.asynchronous import asynchronous
from podium.trainer.schedules.one_step_off import one_step_off
from podium.trainer.schedules.steps import Evaluated, StepCalls
from podium.trainer.signals import StopRequest
from tests.waits import LONG_S


class Taken(NamedTuple):
    step: int


class Recorder:
    """A trainer that writes down what was asked of it. The place of its data is the number of steps taken."""

    keeps_apart = ""

    def __init__(
        self,
        last: int = 4,
        eval_every: int = 0,
        save_every: int = 0,
        save_minutes: float = 0,
    ) -> None:
        self.calls: list[str] = []
        self.stop, self.stop_at, self.good_at = StopRequest(), 0, 0
        self.evaluated = Evaluated()
        self.config: Any = SimpleNamespace(
            run=SimpleNamespace(steps=last, schedule="mine.py:mine", max_staleness=2),
            eval=SimpleNamespace(every=eval_every, items=4),
            save=SimpleNamespace(every=save_every, minutes=save_minutes),
        )
        self.taken = 0
        self.saved: list[tuple[int, Mapping[str, Any]]] = []
        self.ledger: list[str] = []
        self.reported: list[tuple[int, dict[str, float]]] = []
        self.learning = Event()

    def state(self) -> Mapping[str, Any]:
        return {"taken": self.taken}

    def collect(self, step: int) -> Taken:
        self.calls.append(f"collect {step}")
        self.taken += 1
        return Taken(step)

    def learn(self, rollout: Taken) -> Mapping[str, float]:
        self.calls.append(f"learn {rollout.step}")
        if rollout.step == self.stop_at:
            self.stop.request()
        self.learning.set()
        return {"loss": 0.0}

    def evaluate(self, step: int) -> bool:
        self.calls.append(f"evaluate {step}")
        return step == self.good_at > 0

    def save(self, step: int) -> None:
        self.calls.append(f"save {step}")
        self.saved.append((step, self.steps.place))

    def run(self, schedule: Schedule = sync, first: int = 1) -> int:
        """Drive this by ``schedule``; the last step that was done."""
        with ThreadPoolExecutor(4) as threads:
            calls = StepCalls(
                collect=self.collect,
                learn=self.learn,
                report=lambda step, metrics: self.reported.append((step, dict(metrics))),
                evaluate=self.evaluate,
                save=self.save,
                check_saved=lambda: None,
                stop_requested=lambda: self.stop.requested,
                place=self.state,
                take=lambda step: self.ledger.append(f"take {step}"),
                train=lambda step: self.ledger.append(f"train {step}"),
                drop=lambda step, reason: self.ledger.append(f"drop {step}: {reason}"),
                apart=self.keeps_apart,
                evaluated=self.evaluated,
            )
            self.steps = Steps(calls, self.config, declaration_of(schedule), first, threads)
            schedule(self.steps)
            self.steps.check_whole()
            return self.steps.done


def between(calls: list[str]) -> list[str]:
    """What happened beside the halves."""
    return [call for call in calls if call.split()[0] not in ("collect", "learn")]


def test_evaluation_and_saving_come_when_they_are_due() -> None:
    trainer = Recorder(eval_every=2, save_every=3)
    assert trainer.run() == 4
    assert trainer.calls == [
        *("collect 1", "learn 1", "collect 2", "learn 2", "evaluate 2", "collect 3", "learn 3", "save 3"),
        *("collect 4", "learn 4", "evaluate 4", "save 4"),
    ]


def test_without_a_rhythm_both_come_at_the_end_only() -> None:
    trainer = Recorder(last=2)
    trainer.run()
    assert between(trainer.calls) == ["evaluate 2", "save 2"]


def test_a_checkpoint_is_due_so_many_minutes_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is 40 seconds after the one before; the clock of stages is another."""
    seconds = iter(range(0, 10_000, 40))
    monkeypatch.setattr("podium.trainer.schedules.steps.time.monotonic", lambda: float(next(seconds)))
    trainer = Recorder(last=5, save_minutes=2)
    trainer.run()
    assert between(trainer.calls) == ["save 3", "evaluate 5", "save 5"]


@pytest.mark.parametrize(("evaluated", "first"), [(0, ["evaluate 2", "save 2"]), (2, [])])
def test_a_step_that_was_not_evaluated_is_made_up_for_with_a_note(evaluated: int, first: list[str]) -> None:
    """A stop left it out, or the resume has another eval.every."""
    trainer, notes = Recorder(eval_every=2), list[str]()
    trainer.evaluated = Evaluated(last=evaluated)
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        trainer.run(first=3)
    finally:
        unsubscribe()
    assert between(trainer.calls) == [*first, "evaluate 4", "save 4"]
    note = "step 2 is evaluated before the run goes on, because it was not evaluated, and eval.every = 2"
    assert notes == [note] * bool(first)


def test_a_step_that_other_sets_have_evaluated_is_made_up_for() -> None:
    rows = [{"kind": "eval", "step": 2, "items": 8, "items/easy": 8}]
    last = Evaluation(step=2, items=8, figures={"reward_mean": 0.5}, set_name="easy")
    for sets, why in (({"easy", "hard"}, " by hard"), ({"hard"}, " by hard"), ({""}, " by these data"), ({"easy"}, "")):
        trainer, notes = Recorder(eval_every=2), list[str]()
        trainer.evaluated = Evaluated.of(2, last, rows, sets)
        assert trainer.evaluated.has_others == ("easy" not in sets), "the row has figures that are not measured again"
        unsubscribe = subscribe(
            lambda event, notes=notes: notes.append(event.text) if isinstance(event, Note) else None
        )
        try:
            trainer.run(first=3)
        finally:
            unsubscribe()
        assert between(trainer.calls) == [*["evaluate 2", "save 2"] * bool(why), "evaluate 4", "save 4"]
        note = f"step 2 is evaluated before the run goes on, because it was not evaluated{why}, and eval.every = 2"
        assert notes == [note] * bool(why)
    assert not Evaluated.of(2, last, [], {"easy"}).new_sets, "a run without its metrics"
    assert Evaluated.of(2, None, rows, {"easy"}).is_unknown


def test_a_resumed_run_goes_on_at_its_step_and_a_finished_one_has_none_left() -> None:
    resumed, finished = Recorder(), Recorder()
    assert resumed.run(first=4) == 4
    assert resumed.calls == ["collect 4", "learn 4", "evaluate 4", "save 4"]
    assert finished.run(first=5) == 4
    assert finished.calls == []


def test_a_stop_ends_after_the_step_with_a_checkpoint() -> None:
    trainer = Recorder(eval_every=1)
    trainer.stop_at = 2
    assert trainer.run() == 2
    assert between(trainer.calls) == ["evaluate 1", "save 2"]


def test_a_run_that_is_good_enough_ends_with_a_checkpoint() -> None:
    trainer = Recorder(eval_every=2)
    trainer.good_at = 2
    assert trainer.run() == 2
    assert trainer.calls[-2:] == ["evaluate 2", "save 2"]


# -- schedules that run ahead, and wrong ones


class Ahead(Recorder):
    """``learn`` goes on only when the next step is collected, so that a test knows how far the run is."""

    def __init__(self, last: int, **more: Any) -> None:
        super().__init__(last, **more)
        self.next_collected = Semaphore(0)

    def collect(self, step: int) -> Taken:
        taken = super().collect(step)
        if step > 1:
            self.next_collected.release()
        return taken

    def learn(self, rollout: Taken) -> Mapping[str, float]:
        if rollout.step < self.config.run.steps:
            assert self.next_collected.acquire(timeout=LONG_S)
        return super().learn(rollout)


def test_a_checkpoint_holds_the_place_of_what_was_learned_not_of_what_was_collected_ahead() -> None:
    trainer = Ahead(last=3, save_every=1)
    trainer.run(one_step_off)
    assert trainer.calls[:3] == ["collect 1", "collect 2", "learn 1"]
    assert trainer.saved == [(1, {"taken": 1}), (2, {"taken": 2}), (3, {"taken": 3})]


def test_what_was_collected_ahead_is_dropped_when_somebody_asks_to_stop() -> None:
    trainer = Ahead(last=9)
    trainer.stop_at = 2
    assert trainer.run(one_step_off) == 2
    assert trainer.taken == 3
    assert trainer.saved == [(2, {"taken": 2})]


def returns_early(steps: Steps) -> None:
    for step in steps:
        steps.learn(steps.collect(step))
        if step == 2:
            return


def skips(steps: Steps) -> None:
    for step in steps:
        steps.collect(step)


def learns_twice(steps: Steps) -> None:
    for step in steps:
        rollout = steps.collect(step)
        steps.learn(rollout)
        steps.learn(rollout)


def collects_out_of_order(steps: Steps) -> None:
    for step in steps:
        steps.collect(step + 1)


def leaves_out_a_step(steps: Steps) -> None:
    for step in steps:
        steps.collect(2 * step - 1)
        steps.learn(steps.collect(2 * step + 1))


def counts_itself(steps: Steps) -> None:
    for step in range(steps.first, steps.last + 1):
        steps.learn(steps.collect(step))


def breaks_and_counts_itself(steps: Steps) -> None:
    for step in steps:
        steps.learn(steps.collect(step))
        break
    steps.learn(steps.collect(2))


def does_nothing(steps: Steps) -> None:
    del steps


def forgets_the_result(steps: Steps) -> None:
    for step in steps:
        steps.learn(steps.collect_ahead(step))  # type: ignore[arg-type] # the mistake


def learns_a_number(steps: Steps) -> None:
    for step in steps:
        steps.learn(step)  # type: ignore[arg-type] # the mistake


def never_stops_collecting(steps: Steps) -> None:
    coming = steps.collect_ahead(steps.first)
    for step in steps:
        rollout, coming = coming.result(), steps.collect_ahead(step + 1)
        coming.result()
        steps.learn(rollout)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            returns_early,
            "it learned steps 1 to 2 of 4 and left the loop over `steps`; let `for step in steps` run to its end",
        ),
        (does_nothing, "it learned no step and left the loop over `steps`"),
        (counts_itself, r"learn\(1\) was called before the loop over `steps` gave step 1; write `for step in steps`"),
        (breaks_and_counts_itself, r"learn\(2\) was called before the loop over `steps` gave step 2"),
        (skips, "it was given step 1 and did not learn it; call learn once a step"),
        (learns_twice, r"learn\(1\) was called twice; each step is learned once, in order"),
        (collects_out_of_order, r"collect\(2\) was called first; expected collect\(1\)"),
        (leaves_out_a_step, r"collect\(3\) was called after collect\(1\); expected collect\(2\)"),
        (forgets_the_result, r"learn takes what collect returned; it got a Future: call \.result\(\)"),
        (learns_a_number, "learn takes what collect returned; it got a value of type int$"),
        (never_stops_collecting, r"collect\(5\) is beyond the last step, 4; ask `if step < steps\.last`"),
    ],
)
def test_a_schedule_that_loses_a_step_or_trains_on_it_twice_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.schedule = 'mine\.py:mine': " + message):
        Recorder().run(schedule)


class Slow(Recorder):
    """``collect`` of the second step goes on until a step is being learned; after that, until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.collecting, self.go_on = Event(), Event()

    def collect(self, step: int) -> Taken:
        if step == 2:
            self.collecting.set()
            self.go_on.wait(LONG_S)
        return super().collect(step)


def beside(steps: Steps) -> Iterator[Any]:
    """Step 2 is being collected while the caller goes on."""
    trainer: Any = steps._calls.collect.__self__  # type: ignore[attr-defined] # a method of the recorder
    rollout = steps.collect(1)
    coming = steps.collect_ahead(2)
    trainer.collecting.wait(LONG_S)
    try:
        yield rollout
    finally:
        trainer.go_on.set()
        coming.result()


def test_halves_that_share_a_process_are_not_run_beside_each_other() -> None:
    trainer = Slow()
    trainer.keeps_apart = "the generator reads the policy's weights"

    def schedule(steps: Steps) -> None:
        for rollout in beside(steps):
            steps.learn(rollout)

    with pytest.raises(ConfigError, match="beside each other, but the generator reads the policy's weights"):
        trainer.run(schedule)
    assert "learn 1" not in trainer.calls


def test_halves_are_not_run_beside_each_other_where_the_schedule_declares_that_the_newest_weights_draw() -> None:
    trainer = Slow()

    @ScheduleDeclaration(staleness=0)
    def schedule(steps: Steps) -> None:
        for rollout in beside(steps):
            steps.learn(rollout)

    with pytest.raises(ConfigError, match="beside each other, but the schedule declares staleness = 0"):
        trainer.run(schedule)
    assert "learn 1" not in trainer.calls


def test_a_declaration_of_several_steps_at_a_time_has_its_bound_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"leave out staleness, which is run\.max_staleness"):
        ScheduleDeclaration(staleness=1, side_by_side=True)
    with pytest.raises(ConfigError, match=r"staleness=-1\): expected 0 or more"):
        ScheduleDeclaration(staleness=-1)
    with pytest.raises(ConfigError, match=r"staleness=0, overlaps=True\): halves that overlap have older weights"):
        ScheduleDeclaration(staleness=0, overlaps=True)


def test_the_ledger_and_the_metrics_of_each_step_are_written_once() -> None:
    trainer = Recorder(last=2)
    trainer.run()
    assert trainer.ledger == ["take 1", "train 1", "take 2", "train 2"]
    assert trainer.reported == [(1, {"loss": 0.0}), (2, {"loss": 0.0})]


def test_one_collect_runs_at_a_time() -> None:
    def schedule(steps: Steps) -> None:
        for _ in beside(steps):
            steps.collect(2)

    with pytest.raises(ConfigError, match=r"collect\(2\) began while collect\(2\) was running"):
        Slow().run(schedule)


def test_the_page_on_schedules_prints_the_synchronous_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], scope)
    own, printed = Recorder(), Recorder()
    assert own.run() == printed.run(scope["sync"])
    assert own.calls == printed.calls


def test_a_schedule_is_a_name_or_a_function_in_a_file(tmp_path: Path) -> None:
    assert load_schedule("sync") is sync
    (tmp_path / "mine.py").write_text("def twice(steps):\n    pass\n")
    assert load_schedule(f"{tmp_path}/mine.py:twice").__name__ == "twice"
    with pytest.raises(ConfigError, match=r"run\.schedule = 'sinc': expected one of sync.*did you mean sync"):
        load_schedule("sinc")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("async def mine(steps): ...", "'mine' is a coroutine function; write a plain function"),
        ("def mine(steps): yield", "'mine' is a generator function; write a plain function"),
        ("async def mine(steps): yield", "'mine' is an asynchronous generator function; write a plain function"),
        ("class mine:\n    def __init__(self, steps): ...", "'mine' is a class; write a plain function"),
        ("def mine(): ...", "'mine' must take exactly one argument, the steps"),
        ("def mine(steps, depth): ...", "'mine' must take exactly one argument, the steps"),
        ("mine = 3", "'mine' in .* is not a function"),
    ],
)
def test_what_is_no_plain_function_of_one_argument_is_refused(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=r"run\.schedule = .*" + message):
        load_schedule(f"{tmp_path}/mine.py:mine")


class SideBySide(Recorder):
    """Its first three steps wait for one another while they are collected."""

    def __init__(self, last: int) -> None:
        super().__init__(last)
        self.version, self.drawn = 0, dict[int, int]()
        self.together = Barrier(3, timeout=LONG_S)

    def collect(self, step: int) -> Taken:
        self.drawn[step] = self.version
        self.taken += 1
        assert self.taken == step, "prompts are taken in order"
        self.steps.took(step)
        if step <= 3:
            self.together.wait()
        return Taken(step)

    def learn(self, rollout: Taken) -> Mapping[str, float]:
        self.version = rollout.step
        return super().learn(rollout)


def test_the_asynchronous_schedule_collects_several_steps_at_once_within_its_bound() -> None:
    trainer = SideBySide(12)
    assert trainer.run(asynchronous) == 12
    assert [call for call in trainer.calls if call.startswith("learn")] == [f"learn {step}" for step in range(1, 13)]
    assert all(step - 1 - version <= 2 for step, version in trainer.drawn.items())
    assert trainer.drawn[3] == 0
    assert trainer.taken == 12


def test_a_collect_that_fails_beside_others_ends_the_schedule() -> None:
    class Failing(SideBySide):
        def collect(self, step: int) -> Taken:
            if step == 4:
                raise RewardError("no reward")
            return super().collect(step)

    with pytest.raises(RewardError, match="no reward"):
        Failing(12).run(asynchronous)


def test_a_later_collect_that_fails_ends_the_wait_for_one_that_never_comes() -> None:
    ended, released = Event(), list[bool]()

    class FailsBesideAStuckOne(Recorder):
        def collect(self, step: int) -> Taken:
            self.steps.took(step)
            if step == 2:
                raise RewardError("no reward")
            released.append(ended.wait(LONG_S))
            return Taken(step)

    @ScheduleDeclaration(side_by_side=True)
    def told_when_it_ends(steps: Steps) -> None:
        try:
            asynchronous(steps)
        finally:
            ended.set()

    with pytest.raises(RewardError, match="no reward"):
        FailsBesideAStuckOne(12).run(told_when_it_ends)
    assert released == [True] * len(released), "the schedule waited for the first step"


@pytest.mark.parametrize("schedule", [sync, one_step_off, asynchronous])
def test_a_request_during_a_save_ends_the_run_without_another_step(schedule: Schedule) -> None:
    class Asked(Recorder):
        def save(self, step: int) -> None:
            super().save(step)
            self.stop.request()

    trainer = Asked(save_every=1)
    assert trainer.run(schedule) == 1
    assert between(trainer.calls) == ["save 1"]
    assert "learn 2" not in trainer.calls


def test_a_request_hears_what_is_still_done() -> None:
    heard: list[str] = []

    class Asked(Recorder):
        """Is asked what it would still do, at each moment of its steps."""

        def ask(self) -> None:
            self.steps._took_s = dict.fromkeys(self.steps._took_s, 72.0)  # pyright: ignore[reportPrivateUsage]
            heard.append(self.steps.describe_rest(3.0 if self.saved else 0.0))

        def learn(self, rollout: Taken) -> Mapping[str, float]:
            self.ask()
            return super().learn(rollout)

        def evaluate(self, step: int) -> bool:
            self.ask()
            return super().evaluate(step)

        def save(self, step: int) -> None:
            self.ask()
            super().save(step)

    Asked(last=3, eval_every=2, save_every=2).run()
    assert heard == [
        "the run finishes step 1 and saves",
        "the run finishes step 2 (the last one took 1m12s) and saves",
        "the run finishes the evaluation of step 2 and saves",
        "the run finishes the checkpoint of step 2 and ends",
        *["step 3 is the last, and the run ends as it would have done"] * 2,
        "the run finishes its last checkpoint and its files, and ends",
    ]
