"""The frame of every recipe's run: open, resume, drive the schedule, evaluate, save, report.

fit ─▶ prepare: session, data, grader, roles ─▶ resume ─▶ schedule: collect, learn, evaluate, save … ─▶ finish
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from podium.config import config_to_yaml
from podium.errors import ConfigError
from podium.rewards import Grader, RewardFn
from podium.runtime import Cluster
from podium.telemetry import EvalFinished, Note, PhaseStarted, emit
from podium.trainer.checkpoints import TrainerState
from podium.trainer.clock import StageClock
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.evaluate import Evaluator, evaluation_sampling
from podium.trainer.preflight import check_given, check_lengths, check_settings, names_of_given, with_stop_tokens
from podium.trainer.prompts import PairSource, PromptSource, load_held_out
from podium.trainer.report import report
from podium.trainer.roles import Roles, RoleWorkers, start_roles
from podium.trainer.run_dir import Summary
from podium.trainer.schedules import Steps, load_schedule
from podium.trainer.schedules.steps import Rollout
from podium.trainer.session import Session, open_session
from podium.workers import Generator, load_tokenizer

__all__ = ["Trainer"]

C = TypeVar("C", bound=PPOConfig | SFTConfig)
S = TypeVar("S", bound=PromptSource | PairSource)
R = TypeVar("R", bound=Rollout)


class Trainer(ABC, Generic[C, S, R]):
    """The frame of a recipe; a recipe says what the halves of a step are. See :class:`PPOTrainer` for the arguments."""

    session: Session
    roles: Roles
    source: S
    steps: Steps

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
        self._reports = report
        self.clock = StageClock()
        self.state = TrainerState()

    # -- what a recipe says ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def recipe(self) -> str:
        """The name of the recipe in the run's directory, its metrics and its report."""

    @abstractmethod
    def load_data(self) -> S:
        """Load the data that ``collect`` takes from; its place can be kept."""

    @abstractmethod
    def collect(self, step: int) -> R:
        """The first half of a step. It may run beside ``learn`` of the step before, in another thread."""

    @abstractmethod
    def learn(self, rollout: R, /) -> Mapping[str, float]:
        """The second half of a step. Returns the step's metrics."""

    @abstractmethod
    def stage_tokens(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Tokens that each stage of the step dealt with."""

    @property
    def keeps_apart(self) -> str:
        """Why the two halves cannot run beside each other; empty where they can."""
        return ""

    def stage_of(self, step: int, half: str) -> Callable[[str], AbstractContextManager[None]]:
        """A function from a stage's name to a block that is timed as that stage of ``step``."""
        return lambda name: self.clock.stage(name, step, half)

    # -- the run ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train to the last step, or until somebody asks to stop, and return a summary of the run.

        Raises:
            PodiumError: The error that ended the run. What was computed until then is in the run's directory.
        """
        with ExitStack() as stack:
            self.prepare(stack)
            # Only now is it a run: what failed until here leaves its directory free for the next attempt.
            self.session.directory.write_config(config_to_yaml(self.config))
            first = self.resume() + 1
            self._began = time.monotonic()
            emit(PhaseStarted(self.recipe, self.config.run.steps, first))
            self.steps = Steps(self, first, self.session.stop, self._threads)
            if self.config.eval.at_start and first == 1:
                self.evaluate(0)
            if first <= self.config.run.steps:
                self._schedule(self.steps)
            self.steps.check_whole()
            return self.finish(self.steps.done)

    def prepare(self, stack: ExitStack) -> None:
        """Open everything; what is opened goes on ``stack``. Data and reward come first: their mistakes are cheap."""
        config = self.config
        check_settings(config, reward=self._reward is None)
        self._schedule = load_schedule(config.run.schedule)
        self.session = stack.enter_context(
            open_session(config, self.recipe, self._cluster, backend_options=self._backend_options, show=self._show)
        )
        self.tokenizer = load_tokenizer(config.model.tokenizer_source)
        self.sampling = with_stop_tokens(config.sampling, config.model, self.tokenizer)
        self.source = self.load_data()
        held_out = load_held_out(config.data, self.tokenizer, config.eval.items) if config.eval.items else None
        prompts = {"training": self.source, "held-out": held_out}
        generated = {name: source for name, source in prompts.items() if isinstance(source, PromptSource)}
        check_lengths(config.model, self.sampling.max_new_tokens, generated)
        # Closed after the workers: their end is what ends a call that a thread still waits for.
        self._threads = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="collect"))
        log_path = self.session.directory.logs / "reward.log"
        self.grader = stack.enter_context(Grader(config.reward, reward=self._reward, log_path=log_path))
        self.grader.start()
        self.roles = start_roles(self.session.cluster, config, self._workers)
        stack.callback(self.roles.close, self.session.cluster)
        self._evaluator: Evaluator | None = None
        if held_out is not None:
            sampling = evaluation_sampling(self.sampling, config.eval)
            self._evaluator = Evaluator(
                self.generator, held_out, self.grader, self.tokenizer, sampling, config.run.seed
            )

    def resume(self) -> int:
        """Go back to the latest checkpoint if this run is resumed. Returns the last step that is finished."""
        checkpoint = self.session.checkpoint
        if checkpoint is not None:
            self.state = checkpoint.load(self.roles)
            check_given(self.state.given, self._given, self.config.reward.name)
            self.restore(self.state)
            emit(Note(f"going on after step {self.state.step} from {checkpoint.path}"))
        elif self.config.run.resume:
            emit(Note(f"{self.session.directory.path} has no checkpoint yet: starting at step 1"))
        self.roles.sync_weights(self.state.step)
        return self.state.step

    def restore(self, state: TrainerState) -> None:
        """Take up what ``state`` remembers."""
        self.source.restore(state.prompts)
        self.clock.totals_s, self.clock.totals_tokens = dict(state.stage_s), dict(state.stage_tokens)

    def remember(self, step: int) -> TrainerState:
        """The state to write down after ``step``."""
        now = time.monotonic()
        spent, self._began = now - self._began, now
        return replace(
            self.state,
            step=step,
            prompts=self.steps.place,
            wall_s=self.state.wall_s + spent,
            stage_s=dict(self.clock.totals_s),
            stage_tokens=dict(self.clock.totals_tokens),
            given=self._given,
        )

    def evaluate(self, step: int) -> bool:
        """Score the held-out prompts with the weights after ``step``. Returns whether ``eval.stop_at`` is reached."""
        if self._evaluator is None:
            return False
        found = self._evaluator.run(step)
        self.state = replace(self.state, first=self.state.first or found, last=found)
        emit(EvalFinished(step, found.accuracy, found.items, found.reward_mean))
        return self._reached

    def save(self, step: int) -> None:
        """Write a checkpoint from which the run goes on at ``step + 1``."""
        self.state = self.remember(step)
        self.session.directory.checkpoints.save(self.state, self.roles, keep=self.config.save.keep)

    def finish(self, done: int) -> Summary:
        """Write model, summary and report of a run whose last step was ``done``."""
        finished = done >= self.config.run.steps or self._reached
        if finished and self._evaluator is not None and (self.state.last is None or self.state.last.step != done):
            self.evaluate(done)  # a run that was stopped after its last step, and resumed
        self.state = self.remember(done)
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
        self.session.directory.write_summary(summary)
        title = f"{self.recipe}: {summary.task}"
        console = self.session.console if self._reports else None
        report(summary, first, last, self.session.directory, title, console)
        return summary

    # -- details ---------------------------------------------------------------------------------------------------

    @property
    def generator(self) -> Generator:
        """The generator. Raises ConfigError in a run that has none."""
        if self.roles.generator is None:
            raise ConfigError("this run has no generator: eval.items = 0")
        return self.roles.generator

    @property
    def _given(self) -> dict[str, str]:
        return names_of_given(self._reward, self.config.reward.name, self._workers)

    @property
    def _reached(self) -> bool:
        goal, last = self.config.eval.stop_at, self.state.last
        return goal is not None and last is not None and last.accuracy >= goal

    def _write_model(self) -> Path:
        final = self.session.directory.path / "model"
        aside = final.with_name(".model.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        self.roles.policy.save_pretrained(str(aside.absolute()))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        return final
