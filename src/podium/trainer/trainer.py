"""The parts of a run that all recipes share: open, resume, drive the schedule, evaluate, save, report.

fit ─▶ prepare: directory, cluster, data, grader, roles ─▶ resume ─▶ schedule: collect, learn, … ─▶ finish
"""

import logging
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Generic, TypeVar

from transformers.utils.hub import CHAT_TEMPLATE_FILE

from podium.config import config_to_dict
from podium.errors import ConfigError, LostTooOften, PodiumError
from podium.models import load_tokenizer
from podium.models.manifest import explain, is_refusal
from podium.rewards import Grader, RewardFn
from podium.rollout.tasks import PromptStream
from podium.rollout.tasks.writer import chat_template
from podium.runs.checkpoints import TrainerState
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.directory import RunDirectory, Summary, scores_by_set
from podium.runs.evaluation import Evaluation
from podium.runs.files import remove, step_of
from podium.runs.ledger import Ledger
from podium.runs.named_files import as_given, record, remarks
from podium.runs.paths import resolve_resume, run_path
from podium.runs.report import report
from podium.runtime import Cluster, backend_class, connect
from podium.telemetry import (
    EvalFinished,
    Event,
    Note,
    PhaseFinished,
    PhaseStarted,
    Recovered,
    RunSummarized,
    Waiting,
    WorkerLost,
    emit,
    flush,
    subscribe,
)
from podium.telemetry.sinks.console import terminal
from podium.trainer.background_imports import LATER, importing
from podium.trainer.checks.preflight import (
    check_answers,
    check_given,
    check_lengths,
    check_settings,
    check_tokens,
    load_schedule,
    names_of_given,
    unused_settings,
    with_stop_tokens,
)
from podium.trainer.evaluate import score_held_out
from podium.trainer.generators import Generators, parts_of
from podium.trainer.preload import PRELOAD
from podium.trainer.prompts import Prompt, load_held_out
from podium.trainer.recovery import Losses, RunLost
from podium.trainer.roles import Roles, RoleWorkers, started_roles
from podium.trainer.saving import Saver, load_checkpoint
from podium.trainer.schedules.steps import Rollout, StageClock, Steps, named_stage
from podium.trainer.sessions import Sessions
from podium.trainer.tasks import load_tasks

__all__ = ["ECHO_S", "StopRequest", "Trainer", "listen_for_stop"]

C = TypeVar("C", bound=PPOConfig | SFTConfig)
E = TypeVar("E")
R = TypeVar("R", bound=Rollout)

_logger = logging.getLogger(__name__)

ECHO_S: Final = 1.0
"""A signal so soon after the first is the same one: ``make`` and ``timeout`` pass it on to processes that had it."""


class Trainer(ABC, Generic[C, E, R]):
    """The base of recipes, which define the two halves of a step. See :class:`PPOTrainer` for the arguments."""

    roles: Roles
    steps: Steps
    stream: PromptStream[E]
    directory: RunDirectory
    ledger: Ledger
    saver: Saver
    generators: Generators | None
    sessions: Sessions | None

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
        self._backend_options = dict(backend_options or {})
        self._workers = workers
        self._reward = reward
        self._show = show
        self._reports = report
        self.clock = StageClock()
        self.state = TrainerState()
        self._losses = Losses(config.run.max_restarts)
        self._began_at: Mapping[str, Any] | None = None  # the stream's place before the first step, once data are read

    # -- what a recipe defines -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def recipe(self) -> str:
        """The name of the recipe in the run's directory, its metrics and its report."""

    @abstractmethod
    def load_data(self) -> PromptStream[E]:
        """Load the data that ``collect`` takes from. Checkpoints keep the place of the stream."""

    @abstractmethod
    def collect(self, step: int) -> R:
        """Run the first half of a step. It may run beside ``learn`` of the step before, in another thread."""

    @abstractmethod
    def learn(self, rollout: R, /) -> Mapping[str, float]:
        """Run the second half of a step. Returns the step's metrics."""

    @abstractmethod
    def stage_tokens(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the number of tokens that each stage of the step processed."""

    @property
    def keeps_apart(self) -> str:
        """Why the two halves cannot run beside each other; empty where they can."""
        return ""

    # -- the run ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train to the last step, or until somebody asks to stop, and return a summary of the run.

        Raises:
            PodiumError: The error that ended the run. What was computed until then is in the run's directory.
        """
        lost, given = "", (self.config, self._cluster, self._backend_options)
        self._losses, self._began_at = Losses(self.config.run.max_restarts), None
        try:
            with ExitStack() as self._whole:
                while True:
                    self.clock, self.state = StageClock(), TrainerState()
                    try:
                        with ExitStack() as stack:
                            self.prepare(stack)
                            if lost:
                                emit(Recovered(lost))
                            else:  # only now is it a run: what failed until here leaves its directory free
                                self.directory.write_config(*record(self.config, self.directory.path))
                            return self._train(stack)
                    except RunLost as error:
                        lost = str(error)
                    resumed = replace(self.config.run, resume=str(self.directory.path))
                    self.config = replace(self.config, run=resumed)
        finally:
            self.config, self._cluster, self._backend_options = given  # a second call begins as this one did

    def _train(self, stack: ExitStack) -> Summary:
        """Train from the latest checkpoint to the end. Raises RunLost if the run is to be resumed."""
        try:
            first = self.resume() + 1
            self.ledger = Ledger(self.directory.ledger_path, self.stream.number, self.state.ledger)
            stack.callback(self.ledger.close)
            self._began = time.monotonic()
            emit(PhaseStarted(self.recipe, self.config.run.steps, first))
            self.steps = Steps(self, first, self._stop, self._threads)
            if self.config.eval.at_start and first == 1:
                with named_stage("evaluate", 0):
                    self.evaluate(0)
            if first <= self.config.run.steps:
                self._schedule(self.steps)
            self.steps.check_whole()
            return self.finish(self.steps.done)
        except Exception as error:
            try:
                self.saver.wait()  # what was copied before the error is saved
            except PodiumError as late:
                _logger.warning("after the error that ends the run: %s", late)
            if isinstance(error, OSError) and is_refusal(error):
                raise PodiumError(self._disk_refuses(error)) from error
            if isinstance(error, LostTooOften) or not isinstance(error, PodiumError):
                raise
            if not (causes := self.roles.lost()):
                raise
            raise RunLost(self._losses.add(causes, error)) from error

    def prepare(self, stack: ExitStack) -> None:
        """Open all parts of the run and put them on ``stack``. Workers come last, so that other mistakes are quick."""
        self.config = config = resolve_resume(self.config)
        check_settings(config, reward=self._reward is None)
        self._schedule = load_schedule(config.run.schedule)
        if isinstance(self._cluster, str):
            backend_class(self._cluster, self._backend_options)  # before there is a directory: it refuses wrong options
        elif self._backend_options:
            raise ConfigError(f"backend_options = {self._backend_options}: {self._cluster!r} is connected already")
        self.directory = RunDirectory(run_path(config, self.recipe), resume=bool(config.run.resume))
        stack.callback(self.directory.close)
        self._checkpoint = self.directory.checkpoints.latest() if config.run.resume else None
        if config.run.resume:
            if config.run.epochs is None:
                self._refuse_later_checkpoint()
            step = None if self._checkpoint is None else step_of(self._checkpoint.name)
            self.directory.rewind(step)  # before a sink opens the files that this cuts
        stack.enter_context(self.directory.controller_log())
        self._console = terminal() if self._show else None
        for sink in self.directory.sinks(config, self._console):
            stack.enter_context(sink)
        said = [*remarks(config, self.directory.path), *unused_settings(config)]
        for remark in said if self._began_at is None else ():
            emit(Note(remark))
        if isinstance(self._cluster, str):  # it stays for a run that is resumed after a loss
            hints = {"log_dir": self.directory.logs.absolute(), "preload": PRELOAD}
            cluster = connect(self._cluster, hints=hints, **self._backend_options)
            self._cluster, self._backend_options = self._whole.enter_context(cluster), {}
        if self._began_at is None:  # these stay for a run that is resumed after a loss
            self._stop = self._whole.enter_context(listen_for_stop())
            self.read_data()
            config = self.config
            self._refuse_later_checkpoint()
            log_path = self.directory.logs / "reward.log"
            self.grader = self._whole.enter_context(Grader(config.reward, reward=self._reward, log_path=log_path))
            self.grader.start()
            if self._cluster.capabilities.processes:  # elsewhere nobody waits for workers: they load in this process
                self._whole.enter_context(importing(LATER))
            self._began_at = self.stream.state()
        self.stream.restore(self._began_at)
        # Closed after the workers: their end is what ends a call that a thread still waits for.
        ahead = 1 + config.run.max_staleness if config.run.schedule == "asynchronous" else 1
        self._threads = stack.enter_context(ThreadPoolExecutor(ahead, thread_name_prefix="collect"))
        texts = {} if self._template is None else {CHAT_TEMPLATE_FILE: self._template}
        beside = self._cluster.capabilities.concurrent
        self.saver = Saver(self.directory.checkpoints, config.save, texts, beside=beside)
        stack.callback(self.saver.close)
        stack.callback(self.grader.drop)
        self.roles = stack.enter_context(
            started_roles(self._cluster, config, self._workers, (self.directory.path / "profile").absolute())
        )
        self.generators = stack.enter_context(self._open_generators()) if self.roles.generators else None
        self.sessions = self._open_sessions(logged=self._cluster.capabilities.processes)
        stack.callback(subscribe(self._on_loss))

    def _open_generators(self) -> Generators:
        """The generators as one. What they had begun is drawn again with ``sync``, and else continued."""
        assert self.roles.weight_sync is not None
        config, sampling = self.config, self.sampling
        return Generators(
            self.roles.generators,
            self.roles.weight_sync,
            self._losses,
            apart=self.roles.generators_are_apart,
            keeper=self.roles.estimator if self.roles.generators_are_apart else None,
            capacity=parts_of(config.engine.max_sequences, sampling.n)[1],
            timeout_s=config.run.timeout_s * (1 + config.run.max_staleness),  # so many steps are in flight
            journals=None if config.run.schedule == "sync" else self.directory.journals(),
        )

    def _open_sessions(self, *, logged: bool) -> Sessions | None:
        """The rollout workers, which may have logs, as one; None without an environment."""
        if self.roles.rollout is None or self.generators is None:
            return None
        logs = self.directory.logs if logged else None
        sessions = Sessions(self.roles.rollout, self.roles.asked_generators, self.config, self.sampling, logs)
        if self.roles.asked_generators:
            self.generators.returned = sessions.serve
            self.generators.left_out = sessions.leave_out
        return sessions

    def _refuse_later_checkpoint(self) -> None:
        steps, checkpoint = self.config.run.steps, self._checkpoint
        if checkpoint is not None and (step := step_of(checkpoint.name)) is not None and step > steps:
            raise ConfigError(
                f"run.steps = {steps}, and the latest checkpoint of {self.directory.path} is of step {step}: raise "
                "run.steps, or remove later checkpoints to go on from an earlier one"
            )

    def read_data(self) -> None:
        """Read tokenizer, prompts and held-out prompts, and check that the model can take them. ``run.steps`` follows
        from ``run.epochs``.

        Raises:
            ConfigError, DataError: The run is refused for its data.
        """
        config = self.config
        emit(Waiting(f"reading {config.data.train or config.environment.name}"))
        self.tokenizer = load_tokenizer(config.model.tokenizer_source)
        self._template = chat_template(self.tokenizer, config.data)
        self.sampling = with_stop_tokens(config.sampling, config.model, self.tokenizer, config.data)
        self.stream = self.load_data()
        if config.run.epochs is not None:
            steps = math.ceil(config.run.epochs * len(self.stream) / config.taken)
            self.config = config = replace(config, run=replace(config.run, steps=steps, epochs=None))
        self.held_out = self._load_held_out() if config.eval.items else None

    def _load_held_out(self) -> dict[str, list[Prompt]]:
        """The prompts of each evaluation set by its name, the first set first."""
        config, sets = self.config, dict[str, list[Prompt]]()
        for name, place in config.data.eval_sets.items():
            data = replace(config.data, eval=place)
            if config.environment.name:
                sets[name] = [*load_tasks(data, config.environment, "test", limit=config.eval.items)]
                continue
            prompts = load_held_out(data, self.tokenizer, config.eval.items)
            what = f"held-out ({name})" if name else "held-out"
            check_tokens(config.model, what, max(int(prompt.token_ids.max()) for prompt in prompts))
            check_lengths(
                config.model, self.sampling.max_new_tokens, what, max(len(prompt.token_ids) for prompt in prompts)
            )
            if self._reward is None:
                check_answers((prompt.example for prompt in prompts), config.reward)
            sets[name] = prompts
        return sets

    def resume(self) -> int:
        """Go back to the latest checkpoint if this run is resumed. Returns the last step that is finished."""
        if self._checkpoint is not None:
            self.state = load_checkpoint(self._checkpoint, self.roles)
            check_given(self.state.given, self._given, self.config.reward.name)
            self.restore(self.state)
            emit(Note(f"resuming after step {self.state.step} from {self._checkpoint}"))
        elif self.config.run.resume:
            emit(Note(f"{self.directory.path} has no checkpoint yet: starting at step 1"))
        if self.generators is not None:
            self.generators.sync_weights(self.state.step)
        return self.state.step

    def restore(self, state: TrainerState) -> None:
        """Continue from ``state``."""
        self.stream.restore(state.prompts)
        self.clock.totals_s, self.clock.totals_tokens = dict(state.stage_s), dict(state.stage_tokens)

    def remember(self, step: int) -> TrainerState:
        """Return the state that a checkpoint after ``step`` keeps."""
        now = time.monotonic()
        spent, self._began = now - self._began, now
        return replace(
            self.state,
            step=step,
            prompts=self.steps.place,
            ledger=self.ledger.sync(),
            wall_s=self.state.wall_s + spent,
            stage_s=dict(self.clock.totals_s),
            stage_tokens=dict(self.clock.totals_tokens),
            given=self._given,
        )

    def take(self, step: int, count: int) -> list[E]:
        """Take the next ``count`` examples of the data for ``step``, and enter them in the ledger."""
        taken = self.stream.take(count)
        self.steps.took(step)
        return taken

    def evaluate(self, step: int) -> bool:
        """Score the held-out prompts with the weights after ``step``. Returns whether that ends the run."""
        if self.held_out is None or self.generators is None:
            return False
        sets = {name: self._score(prompts, step, name) for name, prompts in self.held_out.items()}
        (_, found), *_ = sets.items()
        self.state = self.state.after(found)
        event, *others = (
            EvalFinished(step, e.accuracy, e.items, e.reward_mean, name, samples=e.samples) for name, e in sets.items()
        )
        emit(replace(event, others=tuple(others)))
        best = self.state.best
        if self._tired and best is not None:
            emit(Note(f"no evaluation was better than that of step {best.step}, {best.accuracy:.1%} (eval.patience)"))
        return self._reached

    def _score(self, prompts: Sequence[Prompt], step: int, name: str) -> Evaluation:
        assert self.generators is not None
        return score_held_out(
            self.config,
            self.generators,
            prompts,
            self.grader,
            self.tokenizer,
            self.sampling,
            step,
            self.roles.reward,
            self.directory.evaluations_of(name),
            self.sessions,
        )

    def save(self, step: int) -> None:
        """Begin a checkpoint from which the run goes on at ``step + 1``. It is written beside the next steps."""
        self.roles.check_parameters()
        flush()  # a run that is resumed from this checkpoint does not write the rows of earlier steps again
        self.state = self.remember(step)
        self.saver.save(self.state, self.roles)

    def check_saved(self) -> None:
        """Raise the error of a checkpoint that could not be written since the last call, if there is one."""
        self.saver.check()

    def finish(self, done: int) -> Summary:
        """Write model, summary and report of a run whose last step was ``done``, once its last checkpoint is there."""
        self.saver.wait()
        finished = done >= self.config.run.steps or self._reached
        if finished and self.held_out is not None and (self.state.last is None or self.state.last.step != done):
            self.evaluate(done)  # a run that was stopped after its last step, and resumed
        if finished:
            self.roles.check_learned()
            self.ledger.drop("the run ended")
        self.state = self.remember(done)
        model = self._write_model() if self.config.save.model and finished else None
        first, last = self.state.first, self.state.last
        flush()
        sets = [name for name in self.config.data.eval_sets if name]
        summary = Summary(
            task=as_given(config_to_dict(self.config), self.directory.path)["data"]["train"],
            seed=self.config.run.seed,
            steps=done,
            wall_s=self.state.wall_s,
            accuracy_before=first.accuracy if first and first.step == 0 else None,
            accuracy_after=last.accuracy if last and last.step == done else None,
            items=last.items if last else 0,
            tokens_per_s=self.clock.tokens_per_s(),
            best_step=self.state.best.step if self.state.best else None,
            best_accuracy=self.state.best.accuracy if self.state.best else None,
            best_checkpoint=str(best) if (best := self.directory.checkpoints.best()) else None,
            prompts=self.ledger.states.counts(),
            dropped=dict(self.ledger.states.reasons),  # of a Counter, asdict() would count the pairs
            sets=scores_by_set(self.directory.metrics_path, sets, done),
            finished=finished,
            model_path=str(model) if model else None,
        )
        self.directory.write_summary(summary)
        console = self._console if self._reports else None
        emit(PhaseFinished(self.recipe))
        flush()  # the report reads the metrics, and stands below the rows of the steps, without a bar
        curve = report(summary, first, last, self.directory, f"{self.recipe}: {summary.task}", console)
        emit(RunSummarized(done, summary.figures(), str(curve or "")))
        return summary

    # -- details ---------------------------------------------------------------------------------------------------

    @property
    def _given(self) -> dict[str, str]:
        return names_of_given(self._reward, self.config.reward.name, self._workers)

    @property
    def _reached(self) -> bool:
        goal, last = self.config.eval.stop_at, self.state.last
        return self._tired or (goal is not None and last is not None and last.accuracy >= goal)

    @property
    def _tired(self) -> bool:
        return 0 < self.config.eval.patience <= self.state.waited

    def _on_loss(self, event: Event) -> None:
        """End what the run waits for as soon as a worker is lost that cannot be restarted alone."""
        if not isinstance(event, WorkerLost):
            return
        groups = [worker.group for worker in self.roles.workers.values()]
        for lost in (group for group in groups if group.lost):
            if lost.name.partition("-")[0] != "generator" or not self.roles.generators_are_apart:
                for group in groups:
                    if not group.lost:
                        group.give_up(lost)
            elif self.sessions is not None and self.generators is not None:
                self.generators.revive()

    def _disk_refuses(self, error: OSError) -> str:
        run, latest = self.directory.path, self.directory.checkpoints.latest()
        goes_on = f"{latest} is whole: then resume with --resume {run}" if latest else "there is no checkpoint yet"
        return f"cannot write {error.filename or f'the files in {run}'}: {explain(error)}. {goes_on}"

    def _write_model(self) -> Path:
        final = self.directory.path / "model"
        aside = final.with_name(".model.tmp")
        remove(aside)
        self.roles.policy.save_pretrained(str(aside.absolute()))
        if self._template is not None:
            (aside / CHAT_TEMPLATE_FILE).write_text(self._template, encoding="utf-8")
        remove(final)
        aside.rename(final)
        return final


class StopRequest:
    """Whether somebody asked the run to end. ``request()`` does what a first signal does."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = 0.0

    def request(self, reason: str = "asked to stop") -> None:
        """End the run after the step that is running, with a checkpoint."""
        self.requested = True
        self.requested_at = time.monotonic()
        emit(Note(f"{reason}: the run finishes this step and saves; a second signal ends it now"))


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Listen for Ctrl-C and SIGTERM during the block, then put the former handlers back.

    The first signal requests a stop, the second raises KeyboardInterrupt in the main thread. Python delivers signals to
    the main thread only. A block in any other thread hears no signal, and ``request()`` is the way to stop.
    """
    stop = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if not stop.requested:
            stop.request(signal.Signals(number).name)
        elif time.monotonic() - stop.requested_at > ECHO_S:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    former = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
