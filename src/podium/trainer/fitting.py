"""What every recipe's run has in common: open, resume, drive the schedule, evaluate, save, report.

fit ─▶ open session ─▶ start roles ─▶ resume ─▶ schedule: step, evaluate, save … ─▶ model, summary, report
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from podium.errors import ConfigError
from podium.rewards import Grader, RewardFn
from podium.rollout.tasks import check_data
from podium.runtime import Cluster
from podium.telemetry import EvalFinished, Note, PhaseStarted, emit
from podium.telemetry.sinks.console import terminal
from podium.trainer.clock import StageClock
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.evaluate import Evaluator, evaluation_sampling
from podium.trainer.given import check_given, names_of_given
from podium.trainer.lengths import check_lengths
from podium.trainer.loading import config_to_yaml
from podium.trainer.prompts import PairSource, PromptSource, load_held_out
from podium.trainer.report import Accuracy, Comparison, Report, plot_curve, read_curve, render
from podium.trainer.roles import Roles, RoleWorkers, start_roles
from podium.trainer.run_dir import Summary
from podium.trainer.schedules import Plan, sync
from podium.trainer.session import Session, open_session
from podium.trainer.state import Evaluation, TrainerState, load_checkpoint, save_checkpoint
from podium.trainer.stop_tokens import with_stop_tokens
from podium.workers import Generator, load_tokenizer

__all__ = ["Trainer"]

C = TypeVar("C", bound=PPOConfig | SFTConfig)
S = TypeVar("S", bound=PromptSource | PairSource)


class Trainer(ABC, Generic[C, S]):
    """The frame of a recipe; a recipe says what a step is. See :class:`PPOTrainer` for the arguments."""

    session: Session
    roles: Roles
    source: S

    def __init__(
        self,
        config: C,
        *,
        cluster: Cluster | str = "local",
        backend_options: Mapping[str, Any] | None = None,
        workers: RoleWorkers | None = None,
        reward: RewardFn | None = None,
        show: bool = True,
        report: bool = True,
    ) -> None:
        self.config = config
        self._cluster = cluster
        self._backend_options = backend_options
        self._workers = workers
        self._reward = reward
        self._show = show
        self._reports = show and report
        self.clock = StageClock()
        self.state = TrainerState()

    @property
    @abstractmethod
    def recipe(self) -> str:
        """What the run is called in its directory's name, its metrics and its report."""

    @abstractmethod
    def load_data(self) -> S:
        """What a step takes from, with a place that can be kept."""

    @abstractmethod
    def step(self, step: int) -> Mapping[str, float]:
        """Train once; the step's metrics."""

    @abstractmethod
    def stage_tokens(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Tokens that each stage of the step dealt with."""

    def fit(self) -> Summary:
        """Train to the last step, or until somebody asks to stop, and return what it came to.

        Raises:
            PodiumError: whatever ended the run; what was computed until then is in the run's directory.
        """
        with ExitStack() as stack:
            self.prepare(stack)
            # Only now is it a run: what failed until here leaves its directory free for the next attempt.
            self.session.directory.write_config(config_to_yaml(self.config))
            first = self.resume() + 1
            self._began = time.monotonic()
            run, evaluation = self.config.run, self.config.eval
            emit(PhaseStarted(self.recipe, run.steps, first))
            plan = Plan(
                first=first,
                last=run.steps,
                eval_at_start=evaluation.at_start,
                eval_every=evaluation.every,
                save_every=self.config.save.every,
            )
            done = sync(_Timed(self), plan, self.session.stop)
            return self.finish(done)

    # -- the parts of a run ----------------------------------------------------------------------------------------

    def prepare(self, stack: ExitStack) -> None:
        """Open everything; what is opened goes on ``stack``. Data and reward come first: their mistakes are cheap."""
        check_data(self.config.data)
        session = open_session(
            self.config, self.recipe, self._cluster, backend_options=self._backend_options, show=self._show
        )
        self.session = stack.enter_context(session)
        self.tokenizer = load_tokenizer(self.config.model.tokenizer_source)
        self.sampling = with_stop_tokens(self.config.sampling, self.config.model, self.tokenizer)
        self.source = self.load_data()
        held_out = load_held_out(self.config.data, self.tokenizer, items) if (items := self.config.eval.items) else None
        prompts = {"training": self.source, "held-out": held_out}
        generated = {name: source for name, source in prompts.items() if isinstance(source, PromptSource)}
        check_lengths(self.config.model, self.sampling.max_new_tokens, generated)
        self.grader = stack.enter_context(
            Grader(self.config.reward, reward=self._reward, log_path=self.session.directory.logs / "reward.log")
        )
        self.grader.start()
        self.roles = start_roles(self.session.cluster, self.config, self._workers)
        stack.callback(self.roles.close, self.session.cluster)
        self._evaluator = self._make_evaluator(held_out)

    def resume(self) -> int:
        """Go back to the latest checkpoint if this run is resumed; the last step that is finished."""
        checkpoint = self.session.checkpoint
        if checkpoint is not None:
            self.state = load_checkpoint(checkpoint, self.roles)
            check_given(self.state.given, self._given, self.config.reward.name)
            self.restore(self.state)
            emit(Note(f"going on after step {self.state.step} from {checkpoint.path}"))
        elif self.config.run.resume:
            emit(Note(f"{self.session.directory.path} has no checkpoint yet: starting at step 1"))
        self.roles.publish(self.state.step)
        return self.state.step

    def restore(self, state: TrainerState) -> None:
        """Take up what ``state`` remembers."""
        self.source.restore(state.prompts)
        self.clock.totals_s, self.clock.totals_tokens = dict(state.stage_s), dict(state.stage_tokens)

    def remember(self, step: int) -> TrainerState:
        """What to write down after ``step``."""
        now = time.monotonic()
        spent, self._began = now - self._began, now
        return replace(
            self.state,
            step=step,
            prompts=self.source.state(),
            wall_s=self.state.wall_s + spent,
            stage_s=dict(self.clock.totals_s),
            stage_tokens=dict(self.clock.totals_tokens),
            given=self._given,
        )

    def evaluate(self, step: int) -> bool:
        """Score the held-out prompts with the weights after ``step``; whether ``eval.stop_at`` is reached."""
        if self._evaluator is None:
            return False
        found = self._evaluator.run(step)
        best = self.state.best
        self.state = replace(
            self.state,
            first=self.state.first or found,
            last=found,
            best=found if best is None or found.accuracy > best.accuracy else best,
        )
        emit(EvalFinished(step, found.accuracy, found.items, found.reward_mean))
        return self._reached

    @property
    def _given(self) -> dict[str, str]:
        return names_of_given(self._reward, self.config.reward.name, self._workers)

    @property
    def _reached(self) -> bool:
        goal, last = self.config.eval.stop_at, self.state.last
        return goal is not None and last is not None and last.accuracy >= goal

    def save(self, step: int) -> None:
        """Write a checkpoint from which the run goes on at ``step + 1``."""
        self.state = self.remember(step)
        save_checkpoint(self.session.directory, self.roles, self.state, keep=self.config.save.keep)

    def finish(self, done: int) -> Summary:
        """Model, summary and report of a run whose last step was ``done``."""
        finished = done >= self.config.run.steps or self._reached
        if finished and self._evaluator is not None and (self.state.last is None or self.state.last.step != done):
            self.evaluate(done)  # a run that was stopped after its last step, and resumed
        self.state = self.remember(done)
        directory = self.session.directory
        model = self._write_model() if self.config.save.model and finished else None
        first, last = self.state.first, self.state.last
        summary = Summary(
            task=self.config.data.train,
            seed=self.config.run.seed,
            steps=done,
            wall_s=self.state.wall_s,
            accuracy_before=first.accuracy if first and first.step == 0 else None,
            accuracy_after=last.accuracy if last and last.step == done else None,
            items=last.items if last else 0,
            tokens_per_s=self.clock.tokens_per_s(),
            finished=finished,
            model_path=str(model) if model else None,
        )
        directory.write_summary(summary)
        self._report(summary)
        return summary

    # -- details -----------------------------------------------------------------------------------------------------

    @property
    def generator(self) -> Generator:
        """The generator. Raises ConfigError in a run that has none."""
        if self.roles.generator is None:
            raise ConfigError("this run has no generator: eval.items = 0")
        return self.roles.generator

    def _make_evaluator(self, held_out: PromptSource | None) -> Evaluator | None:
        if held_out is None:
            return None
        sampling = evaluation_sampling(self.sampling, self.config.eval)
        return Evaluator(self.generator, held_out, self.grader, self.tokenizer, sampling, self.config.run.seed)

    def _write_model(self) -> Path:
        final = self.session.directory.path / "model"
        aside = final.with_name(".model.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        self.roles.policy.save_pretrained(str(aside.absolute()))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        return final

    def _report(self, summary: Summary) -> None:
        directory = self.session.directory
        curve = read_curve(directory.metrics_path, self.recipe)
        paths: dict[str, Path | str] = {"run": directory.path, "metrics": directory.metrics_path}
        if curve is not None:
            paths["curve"] = plot_curve(curve, directory.curve_path, f"{self.recipe}: {summary.task}")
        if summary.model_path:
            paths["model"] = summary.model_path
        paths["trace"] = directory.trace_path
        if not self._reports:
            return
        first, last = self.state.first, self.state.last
        report = Report(
            title=f"{self.recipe}: {summary.task}",
            steps=summary.steps,
            wall_s=summary.wall_s,
            before=_accuracy(first) if first and last and (first.step < last.step or first.step == 0) else None,
            after=_accuracy(last) if last and last.step > 0 else None,
            after_step=last.step if last and last.step != summary.steps else None,
            comparisons=_comparisons(first, last),
            curve=curve,
            paths=paths,
        )
        render(report, terminal())


class _Timed:
    """A trainer as the schedule drives it: each step on the clock."""

    def __init__(self, trainer: Trainer[Any, Any]) -> None:
        self._trainer = trainer
        self.evaluate = trainer.evaluate
        self.save = trainer.save

    def step(self, step: int) -> Mapping[str, float]:
        clock = self._trainer.clock
        clock.start(step)
        metrics = self._trainer.step(step)
        return {**metrics, **clock.finish(self._trainer.stage_tokens(metrics))}


def _accuracy(found: Evaluation) -> Accuracy:
    return Accuracy(found.correct, found.items)


def _comparisons(first: Evaluation | None, last: Evaluation | None) -> list[Comparison]:
    if first is None or last is None or first.step == last.step:
        return []
    return [
        Comparison(
            prompt=before.prompt,
            before=before.completion,
            after=after.completion,
            reward_before=before.reward,
            reward_after=after.reward,
            expected=after.expected,
        )
        for before, after in zip(first.samples, last.samples, strict=False)
    ]
