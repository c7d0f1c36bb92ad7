"""The loop that all recipes share: open, resume, drive the schedule, evaluate, save, report.

fit ─▶ prepare: all that a run has ─▶ resume ─▶ schedule: collect, learn, … ─▶ finish
"""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from threading import Lock
from typing import Any, Generic, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from podium.errors import CheckpointError, LostTooOften, PodiumError
from podium.functions import OF_SCRIPT, describe_object
from podium.models import load_tokenizer
from podium.models.manifest import explain, is_refusal
from podium.rewards import Rewards
from podium.rewards.resolve import list_rewards
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import EncodedExamples, Example, PromptStream
from podium.rollout.tasks.templates import chat_template
from podium.runs.checkpoint_folders import StoredCheckpoints, TrainerState
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.evaluation import Evaluation
from podium.runs.ledger import Ledger
from podium.runs.metric_choice import choose_metric, judge_resumed, knows_accuracy
from podium.runs.named_code import remember_code
from podium.runs.named_files import record
from podium.runs.paths import resolve_resume
from podium.runs.report import report
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import LEDGER
from podium.runs.run_writer import Summary
from podium.runtime import Cluster
from podium.telemetry import (
    EvalFinished,
    Event,
    Note,
    PhaseFinished,
    PhaseStarted,
    Recovered,
    RunSummarized,
    StepFinished,
    Waiting,
    WorkerLost,
    emit,
    flush,
    metrics as names,
    subscribe,
)
from podium.telemetry.held_out import ACCURACY, Metric
from podium.telemetry.sinks.console import lost_output
from podium.trainer.checkpointing import load_checkpoint, write_model
from podium.trainer.checks import preflight
from podium.trainer.checks.overlap import describe_overlaps
from podium.trainer.checks.scored_prompts import check_scored
from podium.trainer.checks.session_fields import describe_session_fields
from podium.trainer.checks.unused import find_unused_settings
from podium.trainer.data_objects import write_data
from podium.trainer.evaluate import score_held_out
from podium.trainer.prompts import HeldOut, pair_batch
from podium.trainer.restart_limit import RunLost, find_lost
from podium.trainer.roles import RoleWorkers
from podium.trainer.run_setup import (
    Run,
    RunData,
    RunOptions,
    count_steps,
    is_graded,
    make_grader,
    open_run,
    read_held_out,
)
from podium.trainer.schedules.steps import Evaluated, Rollout, StageClock, StepCalls, Steps, name_stage
from podium.trainer.step_watch import check_names, check_numbers

C = TypeVar("C", bound=PPOConfig | SFTConfig)
E = TypeVar("E")
R = TypeVar("R", bound=Rollout)

_logger = logging.getLogger(__name__)


class Trainer(ABC, Generic[C, E, R]):
    """The base class of recipes, which define the two halves of a step. See :class:`PPOTrainer` for the arguments.

    Attributes:
        config: The configuration. While ``fit`` runs it has the ``run.steps`` that follow from ``run.epochs``.
        options: What the script passed in addition to the configuration.
        clock: Times the stages of steps.
        state: The state of this process in the latest checkpoint.
        run: The parts of the run while ``fit`` runs: directory, cluster, data, grader, saver, roles.
        ledger: The states of all prompts, while ``fit`` runs.
        steps: The steps, which the schedule drives while ``fit`` runs.
    """

    run: Run[E]
    ledger: Ledger
    steps: Steps

    def __init__(
        self,
        config: C,
        *,
        cluster: Cluster | str = "local",
        backend_options: Mapping[str, Any] | None = None,
        workers: RoleWorkers | None = None,
        reward: Rewards | None = None,
        data: Any = None,
        show: bool = True,
        report: bool = True,
    ) -> None:
        preflight.check_config(type(self), config)
        given = preflight.names_of_given(reward, ", ".join(config.reward.names), workers, type(self))
        if reward is not None and (names := list_rewards(config.reward, reward)):
            names = [name if isinstance(name, str) else describe_object(name) for name in names]
            name = tuple(names) if isinstance(reward, list | tuple) else names[0]
            config = replace(config, reward=replace(config.reward, name=name))
        self.config = config if data is None else write_data(data, config)
        rows = "" if data is None else f"a {type(data).__name__}{OF_SCRIPT.rstrip(', ')}"
        self.options = RunOptions(cluster, dict(backend_options or {}), workers, reward, show, report, given, rows)
        self.clock, self.state = StageClock(), TrainerState()
        self._counts_correct = dict[tuple[str, bool], bool]()  # by the metric that judges, after the first step or not

    # -- what a recipe defines -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def recipe(self) -> str:
        """The name of the recipe in the run's directory, its metrics and its report."""

    @abstractmethod
    def load_data(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> PromptStream[E]:
        """Load the data from which ``collect`` takes. Checkpoints store the place of the stream."""

    @abstractmethod
    def collect(self, step: int) -> R:
        """Run the first half of a step. It may run beside ``learn`` of the step before, in another thread."""

    @abstractmethod
    def learn(self, rollout: R, /) -> Mapping[str, float]:
        """Run the second half of a step. Returns the step's metrics."""

    @abstractmethod
    def stage_tokens(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the number of tokens that each stage of the step processed."""

    def count_tokens(self, row: Any) -> int:
        """Return the number of tokens of a row of the stream of :meth:`load_data`."""
        return len(row[0])

    def join_rows(self, rows: Sequence[Any], step: int) -> Any:
        """Return what the first of :meth:`list_passes` takes, for rows of that stream."""
        del step
        return pair_batch(rows)

    def list_passes(self) -> dict[str, Callable[[Any], Any]]:
        """Return the passes of a step over its rows, which a dry run measures, in their order. Each returns what the
        next one takes. The last is "update"."""
        return {"update": self.run.roles.policy.update}

    @property
    def keeps_apart(self) -> str:
        """Why the two halves cannot run at the same time; empty if they can."""
        return ""

    # -- the run ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train to the last step, or until a stop is requested, and return a summary of the run.

        Raises:
            PodiumError: The error that ended the run. What was computed until then is in the run's directory.
            RunInterrupted: A second signal ended the run, or the first one before it began to train.
        """
        config_before, before = self.config, None
        losses: list[str] = []  # which this attempt mends
        try:
            with ExitStack() as lasting:
                while True:
                    self.clock, self.state = StageClock(), TrainerState()
                    try:
                        with ExitStack() as stack:
                            run = self.run = self._prepare_again(before, stack, lasting)
                            if before is None:  # the run begins here: an earlier failure leaves no run in the directory
                                objects = self.options.objects
                                run.directory.write_config(*record(self.config, run.directory.path, objects))
                                remember_code(run.directory.path, self.config, begun=not self.config.run.resume)
                            while losses:
                                emit(Recovered(losses.pop(0)))
                            return self._train(run, stack)
                    except RunLost as error:
                        before = self.run
                        before.stop.begun = False  # until it trains again, a signal costs nothing
                        losses.append(str(error))
                    resumed = replace(self.config.run, resume=str(before.directory.path))
                    self.config = replace(self.config, run=resumed)
        finally:
            self.config = config_before  # a second call starts with the same configuration
            if "run" in vars(self) and not self.run.cluster.capabilities.processes:
                gc.collect()  # the models of this process are parts of cycles, for which Python looks late

    def _prepare_again(self, before: Run[E] | None, stack: ExitStack, lasting: ExitStack) -> Run[E]:
        """Do :meth:`prepare`. A process that ends meanwhile is one more loss, if the run ``before`` has had one: its
        RunLost is raised."""
        ended: list[str] = []

        def note(event: Event) -> None:
            if isinstance(event, WorkerLost):
                ended.append(f"rank {event.rank} of {event.role} ({event.cause})")

        unsubscribe = subscribe(note)
        try:
            return self.prepare(stack, lasting, before)
        except PodiumError as error:
            causes = find_lost(error) or ended
            if before is None or not causes:
                raise
            raise RunLost(before.losses.add(causes, error)) from error
        finally:
            unsubscribe()

    def prepare(self, stack: ExitStack, lasting: ExitStack, before: Run[E] | None = None) -> Run[E]:
        """Open all parts of the run. See :func:`podium.trainer.run_setup.open_run` for the arguments."""
        self.config = resolve_resume(self.config)
        preflight.check_settings(self.config, self.options.reward)  # before a function that it names is loaded
        if self.config.run.resume:  # before config.yaml is written
            latest = StoredCheckpoints(RunFiles(self.config.run.resume, "checkpoints")).latest()
            with suppress(CheckpointError):  # the damage is told when it is loaded
                given = TrainerState.read(latest).given if latest else {}
                preflight.check_given(given, self.options.given, ", ".join(self.config.reward.names))
        run = open_run(self.recipe, self.config, self.options, self.read_data, stack, lasting, before)
        self.config = cast("C", run.config)
        return run

    def read_data(self) -> RunData[E]:
        """Read tokenizer, prompts and held-out prompts, and check that the model can take them.

        Raises:
            ConfigError, DataError: The run is refused because of its data.
        """
        config = self.config
        shown = config.engine.replayed_run or config.data.shown_train or config.environment.name
        emit(Waiting(f"reading {shown}"))
        tokenizer = load_tokenizer(config.model.tokenizer_source)
        sampling = preflight.with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
        stream = self.load_data(tokenizer, sampling)
        sets = self.load_held_out(tokenizer, sampling) if config.eval.items else {}
        examples: list[Example] = list(getattr(stream.examples, "examples", ()))
        notes = (*describe_overlaps(config, examples, sets), *describe_session_fields(config, examples))
        for sentence in (*find_unused_settings(config), *notes):
            emit(Note(sentence))
        held_out = [row.example for rows in sets.values() if not isinstance(rows, EncodedExamples) for row in rows]
        columns = preflight.find_columns([*examples, *held_out], config.reward)
        if not (config.scores_answers or config.environment.name or config.engine.replayed_run):
            preflight.check_signatures(config.reward, self.options.reward, columns)
        if "reward" not in (self.options.workers or {}):
            check_scored(config, held_out if isinstance(stream.examples, EncodedExamples) else [*examples, *held_out])
        template = chat_template(tokenizer, config.data)
        return RunData(count_steps(config, len(stream)), stream, sets or None, tokenizer, template, sampling, columns)

    def check_grader(self, data: RunData[E]) -> None:
        """Load the rewards as the run does, in a process of their own, and end that.

        Raises:
            ConfigError, RewardError: The run is refused because of its rewards.
        """
        if is_graded(data.config):
            with make_grader(self.options.reward, data) as grader:
                grader.start()

    def load_held_out(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> Mapping[str, HeldOut]:
        """Read the held-out prompts of each evaluation set by its name, that which judges the run first.

        Raises:
            ConfigError, DataError: The run is refused for its data.
        """
        return read_held_out(self.config, tokenizer, sampling, self.options.reward)

    def _train(self, run: Run[E], stack: ExitStack) -> Summary:
        """Train from the latest checkpoint to the end. Raises RunLost if the run is to be resumed."""
        self._evaluated = Evaluated()  # of the step from which it goes on
        self._at_work: dict[str, set[int]] = {}  # by role, the prompts that its processes have
        try:
            first = self.resume() + 1
            after = first - 1 if self.config.run.resume else None
            again = self._evaluated.is_missing(first - 1, self.config) and not self._evaluated.has_others
            stack.enter_context(run.directory.open_metrics(after, again=again))
            self._taking, self._passed_over = Lock(), dict[int, str]()
            self.ledger = Ledger(run.directory.path / LEDGER, run.data.stream.number, self.state.ledger)
            stack.callback(self.ledger.close)
            if run.generators is not None:
                run.generators.suspect = self._suspect_drawn
            self._began = time.monotonic()
            emit(PhaseStarted(self.recipe, self.config.run.steps, first))
            flush()
            self._check_output("the run ends before its first step")
            self.steps = Steps(self._calls(run), self.config, run.declared, first, run.threads)
            run.stop.describe_rest = lambda: self.steps.describe_rest(run.saver.took_s)
            if self.config.eval.at_start and first == 1:
                with name_stage("evaluate", 0):
                    self.evaluate(0)
            run.stop.begun = True
            if first <= self.config.run.steps and not self._describe_end():
                run.schedule(self.steps)
                self.steps.check_whole()
            summary = self.finish(self.steps.done)
            self._check_output(f"the run has ended after step {summary.steps}, and {run.stop.describe_latest()}")
            return summary
        except KeyboardInterrupt:
            run.roles.kill()  # before anything on the way out waits for one of them
            raise
        except Exception as error:
            try:
                run.saver.wait()  # a checkpoint that was copied before the error is still written
            except PodiumError as late:
                _logger.warning("after the error that ends the run: %s", late)
            if isinstance(error, OSError) and is_refusal(error):
                raise PodiumError(run.refuse_disk(explain(error), error)) from error
            if isinstance(error, PodiumError) and not isinstance(error, LostTooOften):
                self._count_loss(run, error)
            raise

    def _count_loss(self, run: Run[E], error: PodiumError) -> None:
        """Raise RunLost if ``error`` came from the end of a process, and the run may go on."""
        if causes := run.roles.lost() or find_lost(error):
            sentences = [run.losses.add(causes, error)]
            for role in run.roles.find_lost_roles():
                sentences.append(run.losses.suspect(role, self._at_work.get(role, ())))
            raise RunLost("; ".join(filter(None, sentences))) from error

    @contextmanager
    def at_work(self, step: int, *roles: str) -> Iterator[None]:
        """Note that the prompts of ``step`` are in the processes of ``roles`` during the block.

        What a process never got did not end it: an end that is known is raised first, and after a loss the processes
        are asked whether they live.
        """
        workers = self.run.roles.workers
        for role in roles:
            if role in workers and (self.run.losses.any or workers[role].group.lost):
                workers[role].group.check_alive()
        prompts = self.ledger.states.in_flight([step])
        for role in roles:
            self._at_work.setdefault(role, set()).update(prompts)
        yield
        for role in roles:  # after an error they stay noted, for the process that was lost
            self._at_work[role].difference_update(prompts)
        self.run.losses.acquit(prompts, *roles)

    def enter_drawn(self, step: int, places: Sequence[int], versions: Sequence[tuple[int, int]]) -> None:
        """Enter in the ledger that the prompts at ``places`` of ``step`` are rolled out, with the ``versions`` of the
        weights."""
        self.ledger.move(step, "rolled_out", places, versions=versions)
        prompts = self.ledger.prompts(step)
        self.run.losses.acquit([prompts[index] for index in places if prompts], "generator")

    def _suspect_drawn(self, worker: str, step: int, places: Sequence[int]) -> str:
        """Note that a generator was lost while it drew the prompts at ``places`` of ``step``. See Losses.suspect."""
        prompts = self.ledger.prompts(step)
        return self.run.losses.suspect(worker, [prompts[index] for index in places if index < len(prompts)])

    def _learn(self, rollout: R) -> Mapping[str, float]:
        with self.at_work(rollout.step, "policy", "critic", "reference", "teacher"):
            return self.learn(rollout)

    def _check_output(self, what: str) -> None:
        """Raise PodiumError if the terminal or pipe that the run prints to is gone. The message ends with ``what``."""
        if self.run.console is not None and (reason := lost_output()):
            raise PodiumError(f"{reason}: {what}")

    def _calls(self, run: Run[E]) -> StepCalls:
        """Return the functions that the steps call."""
        stream, ledger = run.data.stream, self.ledger
        return StepCalls(
            # a lambda, so that a method that is replaced during the run is used
            collect=lambda step: self.collect(step),
            learn=self._learn,
            report=self._report,
            evaluate=self.evaluate,
            save=self.save,
            check_saved=run.saver.check,
            stop_requested=lambda: run.stop.requested,
            place=stream.state,
            take=lambda step: ledger.take(step, stream.number, {**run.losses.suspects, **self._passed_over}),
            train=lambda step: ledger.move(step, "trained"),
            drop=lambda step, reason: ledger.move(step, "dropped", reason=reason),
            apart=self.keeps_apart,
            evaluated=self._evaluated,
        )

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a step with its times, and how much of the data the run has trained on: tokens, and passes over it."""
        check_numbers(metrics, step)
        times = self.clock.finish(step, self.stage_tokens(metrics))
        progress = {
            names.TOKENS_TOTAL: self.clock.totals_tokens.get("step", 0.0),
            names.EPOCH: self._examples_taken / len(self.run.data.stream),
        }
        check_names(metrics, {*times, *progress}, step)
        emit(StepFinished(step, {**metrics, **times, **progress}))

    @property
    def _examples_taken(self) -> int:
        """Number of the examples that the steps have taken which are learned."""
        state: Mapping[str, Any] = self.steps.place
        return state["epoch"] * state["items"] + state["position"]

    def resume(self) -> int:
        """Go back to the latest checkpoint if this run is resumed. Returns the last step that is finished."""
        run = self.run
        if run.checkpoint is not None:
            self.state = load_checkpoint(run.checkpoint, run.roles)
            rows = run.directory.rows_until(self.state.step)
            self.restore(self.state, rows)
            evaluations = [row for row in rows if row["kind"] == "eval"]
            if run.data.held_out is not None:
                self._evaluated = Evaluated.of(self.state.step, self.state.last, evaluations, run.data.held_out)
            self.state = judge_resumed(self.state, self.config, evaluations, is_sum=run.grader.is_sum)
            emit(Note(f"resuming after step {self.state.step} from {run.checkpoint}"))
        elif self.config.run.resume:
            emit(Note(f"{run.directory.path} has no checkpoint yet: starting at step 1"))
        if run.generators is not None:
            run.generators.sync_weights(self.state.step)
        return self.state.step

    def restore(self, state: TrainerState, rows: Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state``, to whose step metrics.jsonl has these ``rows``."""
        self.run.data.stream.restore(state.prompts)
        self.clock.totals_s, self.clock.totals_tokens = dict(state.stage_s), dict(state.stage_tokens)

    def remember(self, step: int) -> TrainerState:
        """Return the state that a checkpoint after ``step`` keeps."""
        now = time.monotonic()
        spent, self._began = now - self._began, now
        ledger, number = self.ledger.sync()
        return replace(
            self.state,
            step=step,
            prompts=self.run.data.stream.advance(self.steps.place, number),
            ledger=ledger,
            wall_s=self.state.wall_s + spent,
            stage_s=dict(self.clock.totals_s),
            stage_tokens=dict(self.clock.totals_tokens),
            given=self.options.given,
            configs=self.run.directory.count_configs(),
        )

    def take(self, step: int, count: int) -> list[E]:
        """Take the next ``count`` examples of the data for ``step``, and enter them in the ledger. A step may do so
        again. Examples that were in flight in two losses of a worker are passed over, and in a resumed run those that
        were trained or dropped before others that were taken earlier."""
        taken, stream, suspects = list[E](), self.run.data.stream, self.run.losses.suspects
        with self._taking:  # a step may take more while the next ones take theirs
            while len(taken) < count:
                numbers = range(stream.number, stream.number + count - len(taken))
                for number, index in zip(numbers, stream.take_indices(len(numbers)), strict=True):
                    if number in suspects or self.ledger.states.is_over(number):
                        continue
                    if reason := self.pass_over(step, number, index):
                        self._passed_over[number] = reason
                    else:
                        taken.append(stream.examples[index])
            self.steps.took(step)
        return taken

    def pass_over(self, step: int, number: int, index: int) -> str | None:
        """Return why ``step`` does not take example ``index`` of the data as prompt ``number``; None to take it."""
        return None

    def evaluate(self, step: int) -> bool:
        """Evaluate the weights after ``step`` on the held-out data. Returns whether that ends the run.

        Raises:
            ConfigError: The first evaluation lacks the figure that ``eval.metric`` names.
        """
        held_out = self.run.data.held_out
        if held_out is None:
            return False
        sets = {name: self.score_set(examples, step, name) for name, examples in held_out.items()}
        self._evaluated = Evaluated(last=step)
        judged, *_ = sets.values()
        metric, decides = Metric(self.state.metric), False
        if not self.state.metric:
            metric, decides = choose_metric(self.config, judged)
        if metric.name not in judged.figures:
            emit(Note(f"step {step}: the evaluation has no {metric.title}, by which the run is judged (eval.metric)"))
        self.state = replace(self.state.after(judged, metric), metric=metric.name if decides else self.state.metric)
        interval = judged.interval(metric.name)
        event, *others = (
            EvalFinished(
                step, e.items, e.figures, metric.name, interval, name, samples=e.samples, scored=e.count(metric.name)
            )
            for name, e in sets.items()
        )
        emit(replace(event, others=tuple(others)))
        best = self.state.best
        if self._tired and best is not None:
            value = f"{metric.title} {metric.write(best.value(metric.name))}"
            emit(Note(f"no evaluation was better than that of step {best.step}, {value} (eval.patience)"))
        return bool(self._find_end(step))

    def score_set(self, held_out: HeldOut, step: int, name: str) -> Evaluation:
        """Evaluate the weights after ``step`` on one evaluation set."""
        run = self.run
        assert run.generators is not None
        assert not isinstance(held_out, EncodedExamples)
        return score_held_out(
            self.config,
            run.generators,
            held_out,
            run.grader,
            run.data.tokenizer,
            run.data.sampling,
            step,
            run.roles.reward,
            run.directory.evaluations_of(name),
            run.sessions,
            name,
            self.knows_accuracy(step),
        )

    def knows_accuracy(self, step: int) -> bool | None:
        """Whether completions are correct or not; None where their scores say so."""
        judge, last = self.state.metric, self.state.last
        if (judge, step > 0) not in self._counts_correct:
            self._counts_correct[judge, step > 0] = knows_accuracy(self.config, judge, step)
        if self._counts_correct[judge, step > 0]:
            return True
        return False if judge and last is not None and ACCURACY not in last.figures else None

    def save(self, step: int) -> None:
        """Begin a checkpoint from which the run resumes at ``step + 1``. It is written while the next steps run."""
        self.run.roles.check_parameters()
        flush()  # a resumed run does not write the rows of earlier steps again, so they must be on the disk
        self.state = self.remember(step)
        self.run.saver.save(self.state, self.run.roles)

    def finish(self, done: int) -> Summary:
        """Write model, summary and report of a run whose last step was ``done``, once its last checkpoint is there."""
        run = self.run
        run.saver.finish()
        finished = done >= self.config.run.steps or bool(self._find_end(done))
        measured = self.state.last is not None and self.state.last.step == done and not self._evaluated.new_sets
        if finished and run.data.held_out is not None and not measured:
            self.evaluate(done)  # a run that was stopped in its last step, or is resumed with fewer steps or new sets
            if done:
                self.save(done)  # it may be the best one
                run.saver.wait()
        if finished:
            run.roles.check_learned()
            self.ledger.drop("the run ended", done + 1)
        self.state = self.remember(done)
        writes = self.config.save.model and finished
        model = write_model(run.directory.files, run.roles.policy, run.saver.extras) if writes else None
        flush()
        summary = run.directory.summarize(
            self.config,
            self.state,
            self.ledger.states,
            examples=len(run.data.stream),
            tokens_per_s=self.clock.tokens_per_s(),
            finished=finished,
            model=model,
        )
        console = run.console if self.options.report else None
        emit(PhaseFinished(self.recipe))
        flush()  # the report reads the metrics, and stands below the rows of the steps, without a bar
        judge, first, last = self.state.judge, self.state.first, self.state.last
        curve = report(summary, judge, first, last, run.directory, f"{self.recipe}: {summary.task}", console)
        emit(RunSummarized(done, summary.figures(), str(curve or "")))
        return summary

    # -- details ---------------------------------------------------------------------------------------------------

    def _find_end(self, step: int) -> str:
        """Return the key by which the evaluation after ``step`` ends the run; "" if it goes on."""
        goal, last, metric = self.config.eval.stop_at, self.state.last, self.state.judge
        if not step or last is None or last.step != step:
            return ""
        if self._tired:
            return "eval.patience"
        return "eval.stop_at" if goal is not None and metric.rank(last.value(metric.name)) >= metric.rank(goal) else ""

    def _describe_end(self) -> bool:
        """Say so if an evaluation has ended the run that is resumed. Returns whether that is so."""
        step = self.state.step
        if key := self._find_end(step):
            off = "0" if self._tired else "null"
            emit(Note(f"{key} has ended the run after step {step}: to train longer, resume it with --{key} {off}"))
        return bool(key)

    @property
    def _tired(self) -> bool:
        return 0 < self.config.eval.patience <= self.state.waited
