"""What a run has, and how it is opened.

    directory ─▶ sinks ─▶ cluster ─▶ data ─▶ grader ─▶ roles ─▶ generators ─▶ sessions

Workers start last, so that other mistakes are reported quickly. A run that is resumed after a loss keeps cluster, data
and grader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from podium.errors import ConfigError
from podium.models.vocabulary import resolve_stops
from podium.rewards import Grader, Rewards
from podium.rollout.environments import load_sessions
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import PromptStream, end_of_turn
from podium.rollout.tasks.examples import RowReader
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.files import step_of
from podium.runs.named_files import remarks
from podium.runs.paths import run_path
from podium.runs.run_writer import RunDirectory
from podium.runs.schedules import ScheduleDeclaration, declaration_of
from podium.runtime import Cluster, backend_class, connect
from podium.spelling import write_count
from podium.telemetry import Event, Note, OutputLost, WorkerLost, emit, subscribe
from podium.telemetry.sinks.console import terminal
from podium.trainer.checkpointing import ModelExtras, Saver
from podium.trainer.checks.preflight import (
    check_answers,
    check_lengths,
    check_tokens,
    find_fitting,
    load_schedule,
)
from podium.trainer.checks.resumed import describe_changes
from podium.trainer.generators import Generators, parts_of
from podium.trainer.preload import LATER, PRELOAD, importing
from podium.trainer.prompts import HeldOut, Prompt, load_held_out
from podium.trainer.restart_limit import LostWorkers
from podium.trainer.roles import Roles, RoleWorkers, start_roles
from podium.trainer.schedules import Schedule
from podium.trainer.sessions import Sessions
from podium.trainer.signals import StopRequest, listen_for_stop

E = TypeVar("E")

_runs_here: Final[list[Path]] = []  # the one that trains in this process
_claiming: Final = Lock()


@dataclass(frozen=True)
class RunData(Generic[E]):
    """The data and settings that a run reads before it starts a worker.

    Attributes:
        config: The configuration, whose ``run.steps`` follows from ``run.epochs``.
        stream: The prompts, from which ``collect`` takes.
        held_out: The evaluation sets by name, that which judges the run first; None without evaluation.
        tokenizer: The tokenizer.
        template: The chat template if it is not the tokenizer's own.
        sampling: How tokens are drawn, with stop tokens.
        columns: The columns that every row has which the reward gets; None where nothing is graded.
    """

    config: PPOConfig | SFTConfig
    stream: PromptStream[E]
    held_out: Mapping[str, HeldOut] | None
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    sampling: SamplingParams
    columns: Collection[str] | None = None


@dataclass(frozen=True)
class RunOptions:
    """What a script passes to a run in addition to the configuration. See :class:`PPOTrainer` for the arguments."""

    cluster: Cluster | str = "local"
    backend_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workers: RoleWorkers | None = None
    reward: Rewards | None = None
    show: bool = True
    report: bool = True
    given: Mapping[str, str] = field(default_factory=dict[str, str])  # as names_of_given
    data: str = ""  # what the rows were that the script passed

    @property
    def objects(self) -> dict[str, str]:
        """Descriptions of what the script passed and no setting holds, by role."""
        given = {role: name for role, name in self.given.items() if role not in ("reward", "reward.name")}
        return {**given, **({"data": self.data} if self.data else {})}


@dataclass(frozen=True)
class _Lasting(Generic[E]):
    """The parts of a run that stay when it is resumed after a loss."""

    cluster: Cluster
    stop: StopRequest
    data: RunData[E]
    start: Mapping[str, Any]  # the stream's place before the first step
    grader: Grader
    losses: LostWorkers


@dataclass(frozen=True)
class Run(_Lasting[E]):
    """The parts of a run while it trains, from its start until it ends or loses a worker.

    Attributes:
        cluster: The cluster of its workers.
        stop: The request to end the run early.
        data: The data of the run.
        start: The place of the data's stream before the first step.
        grader: The grader of completions.
        losses: The workers that the run has lost.
        config: The configuration, as ``data.config``.
        schedule: The function that arranges the halves of its steps.
        directory: Its directory.
        console: The terminal, where progress is shown.
        checkpoint: The checkpoint from which the run resumes, if there is one.
        threads: The threads in which ``collect`` runs ahead.
        saver: The writer of its checkpoints.
        roles: Its workers.
        generators: All generators as one object; None if the run samples no completions.
        sessions: All rollout workers as one object; None without an environment.
    """

    config: PPOConfig | SFTConfig
    schedule: Schedule
    directory: RunDirectory
    console: Console | None
    checkpoint: Path | None
    threads: Executor
    saver: Saver
    roles: Roles
    generators: Generators | None
    sessions: Sessions | None

    @cached_property
    def declared(self) -> ScheduleDeclaration:
        """The declaration of the schedule."""
        return declaration_of(self.schedule)

    def refuse_disk(self, reason: str, error: OSError) -> str:
        """Return a message that the disk refused a file of the run, with the remedy."""
        path, latest = self.directory.path, self.directory.checkpoints.latest()
        goes_on = f"{latest} is complete: then resume with --resume {path}" if latest else "there is no checkpoint yet"
        return f"cannot write {error.filename or f'the files in {path}'}: {reason}. {goes_on}"


@contextmanager
def _claim_process(path: Path) -> Iterator[None]:
    """Keep other runs out of this process: events of all runs of a process would be in the files of each of them."""
    with _claiming:
        if _runs_here:
            raise ConfigError(
                f"{_runs_here[0]} trains in this process, and its files have the metrics of all that train here: "
                f"begin {path} when it has ended, or in a process of its own. Models that learn in turns go on by "
                "run.resume"
            )
        _runs_here.append(path)
    try:
        yield
    finally:
        _runs_here.remove(path)


def open_run(
    recipe: str,
    config: PPOConfig | SFTConfig,
    options: RunOptions,
    read_data: Callable[[], RunData[E]],
    stack: ExitStack,
    lasting: ExitStack,
    before: Run[E] | None = None,
) -> Run[E]:
    """Open all parts of a run.

    Args:
        recipe: The name of the recipe.
        config: The configuration, which was checked. Its ``run.resume`` is the directory to resume, if there is one.
        options: Further arguments that the script gave.
        read_data: Reads the data.
        stack: Stack that closes the parts that end when the run loses a worker.
        lasting: Stack that closes the parts that outlast such a loss.
        before: The run as it was before it lost a worker.

    Raises:
        ConfigError: Another run trains in this process.
    """
    schedule = load_schedule(config.run.schedule)
    if before is None:
        lasting.enter_context(_claim_process(run_path(config, recipe)))
        _check_cluster(options)  # before the directory is made, since it refuses wrong options
    directory = RunDirectory(run_path(config, recipe), resume=bool(config.run.resume))
    stack.callback(directory.close)
    checkpoint = _find_checkpoint(config, directory) if config.run.resume else None
    stack.enter_context(directory.controller_log())
    console = terminal() if options.show else None
    for sink in directory.sinks(config, console):
        stack.enter_context(sink)
    kept: _Lasting[E]
    if before is not None:
        kept = before
    else:
        for remark in remarks(config, directory.path):
            emit(Note(remark))
        kept = _open_lasting(options, read_data, lasting, directory, checkpoint)
        config = kept.data.config
        if config.run.resume:
            for sentence in describe_changes(config, directory.path, checkpoint):
                emit(Note(sentence))
    kept.data.stream.restore(kept.start)
    # Closed after the workers: their end is what ends a call that a thread still waits for.
    ahead = 1 + config.run.max_staleness if declaration_of(schedule).side_by_side else 1
    threads = stack.enter_context(ThreadPoolExecutor(ahead, thread_name_prefix="collect"))
    extras = _make_extras(config, kept.data)
    saver = Saver(directory.checkpoints, config.save, extras, beside=kept.cluster.capabilities.concurrent)
    stack.callback(saver.close)
    stack.callback(kept.grader.drop)
    traces = directory.files.check("profile", is_written=True)
    roles = stack.enter_context(start_roles(kept.cluster, config, options.workers, traces))
    generators = _make_generators(config, roles, kept, directory) if roles.generators else None
    if generators is not None:
        stack.enter_context(generators)
    run = Run(
        kept.cluster,
        kept.stop,
        kept.data,
        kept.start,
        kept.grader,
        kept.losses,
        config=config,
        schedule=schedule,
        directory=directory,
        console=console,
        checkpoint=checkpoint,
        threads=threads,
        saver=saver,
        roles=roles,
        generators=generators,
        sessions=_open_sessions(config, roles, generators, kept, directory),
    )
    stack.callback(subscribe(partial(_hear_of_loss, run)))
    return run


def _find_checkpoint(config: PPOConfig | SFTConfig, directory: RunDirectory) -> Path | None:
    """Return the checkpoint from which a resumed run goes on, or None if it begins at step 1. Raises ConfigError if the
    run cannot go on from there."""
    checkpoint = directory.checkpoints.latest()
    if config.run.epochs is None:
        _refuse_later_checkpoint(config, checkpoint, directory)
    directory.check_rewind(None if checkpoint is None else step_of(checkpoint.name))
    return checkpoint


def _check_cluster(options: RunOptions) -> None:
    if isinstance(options.cluster, str):
        backend_class(options.cluster, options.backend_options)
    elif options.backend_options:
        backend_options = dict(options.backend_options)
        raise ConfigError(f"backend_options = {backend_options}: {options.cluster!r} is connected already")


def _open_lasting(
    options: RunOptions,
    read_data: Callable[[], RunData[E]],
    lasting: ExitStack,
    directory: RunDirectory,
    checkpoint: Path | None,
) -> _Lasting[E]:
    """Connect to the cluster, read the data and start the grader."""
    stop = lasting.enter_context(listen_for_stop())
    stop.describe_latest, stop.tidy = directory.describe_latest, directory.tidy
    lasting.callback(subscribe(lambda event: stop.request(event.reason) if isinstance(event, OutputLost) else None))
    cluster = options.cluster
    if isinstance(cluster, str):
        hints = {"log_dir": directory.logs.absolute(), "preload": PRELOAD}
        cluster = lasting.enter_context(connect(cluster, hints=hints, **options.backend_options))
    data = read_data()
    config = data.config
    _refuse_later_checkpoint(config, checkpoint, directory)
    in_script = not cluster.capabilities.processes
    grader = make_grader(options.reward, data, log_path=directory.logs / "reward.log", in_script=in_script)
    lasting.enter_context(grader)
    if is_graded(config):
        grader.start()
    if cluster.capabilities.processes:  # otherwise the workers load in this process, which does not wait for them
        lasting.enter_context(importing(LATER))
    losses = LostWorkers(config.run.max_restarts, _remedies(config))
    return _Lasting(cluster, stop, data, data.stream.state(), grader, losses)


def _remedies(config: PPOConfig | SFTConfig) -> dict[str, str]:
    """What a person can do where the prompts of a role end its process."""
    environment = config.environment
    if not environment.name or environment.limits.processes:
        return {}
    return {
        "rollout": f"A session of environment.name = {environment.name!r} may have ended the rollout worker, in whose "
        "process sessions run: with environment.options.processes = 8 each session has a process of its own, whose "
        "end fails this session alone"
    }


def is_graded(config: PPOConfig | SFTConfig) -> bool:
    """Whether the run grades completions."""
    if isinstance(config, PPOConfig):
        return not config.replays
    return bool(config.eval.items) and not config.scores_answers


def make_grader(reward: Rewards | None, data: RunData[Any], **options: Any) -> Grader:
    """Make the grader of a run, which is not started. ``options`` are further ones of :class:`Grader`."""
    config = data.config
    optional = bool(config.environment.name)
    return Grader(
        config.reward,
        reward=reward,
        columns=data.columns,
        steps=config.run.steps,
        optional=optional,
        **options,
    )


def _refuse_later_checkpoint(config: PPOConfig | SFTConfig, checkpoint: Path | None, directory: RunDirectory) -> None:
    steps = config.run.steps
    if checkpoint is not None and (step := step_of(checkpoint.name)) is not None and step > steps:
        raise ConfigError(
            f"run.steps = {steps}, and the latest checkpoint of {directory.path} is of step {step}: raise "
            "run.steps, or remove later checkpoints to go on from an earlier one"
        )


def read_held_out(
    config: PPOConfig | SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    reward: Rewards | None,
    read: RowReader | None = None,
) -> dict[str, list[Prompt]]:
    """Read the prompts of each evaluation set by its name, the set that judges the run first, and check that the model
    takes them.

    ``reward`` is what a script gives to grade them in place of ``config.reward.name``, and ``read`` is that of
    :func:`.load_examples`.
    """
    sets: dict[str, list[Prompt]] = {}
    most = config.eval.sampling.apply(sampling).max_new_tokens
    for name, source in config.eval_sets.items():
        data = replace(config.data, eval=source)
        if config.environment.name:
            package = load_sessions(config.environment.shown)
            sets[name] = [*package.load_tasks(data, config.environment, "test", limit=config.eval.items)]
            continue
        prompts = load_held_out(data, tokenizer, config.eval.items, read)
        what = f"held-out ({name})" if name else "held-out"
        lengths, examples = [len(prompt.token_ids) for prompt in prompts], [prompt.example for prompt in prompts]
        if (kept := find_fitting(config.model, data, what, lengths, examples, most)) is not None:
            prompts = [prompts[at] for at in kept]
        check_tokens(config.model, what, max(int(prompt.token_ids.max()) for prompt in prompts))
        lengths, examples = [len(prompt.token_ids) for prompt in prompts], [prompt.example for prompt in prompts]
        key = "eval.temperature.max_new_tokens" if most != sampling.max_new_tokens else "sampling.max_new_tokens"
        check_lengths(config.model, most, what, lengths, examples, key)
        check_answers((prompt.example for prompt in prompts), config.reward, reward)
        sets[name] = prompts
    return sets


def count_steps(config: PPOConfig | SFTConfig, examples: int) -> PPOConfig | SFTConfig:
    """Return ``config`` with the ``run.steps`` that follow from ``run.epochs``. A note tells of fewer examples than a
    step takes."""
    epochs, steps = config.run.epochs, config.run.steps
    if epochs is not None:
        steps = math.ceil(epochs * examples / config.taken)
    if examples < config.taken and not config.engine.replayed_run:
        key = f"batch.{'prompts' if isinstance(config, PPOConfig) else 'examples'}"
        given = f"run.steps = {steps}" if epochs is None else f"run.epochs = {epochs:g}"
        emit(
            Note(
                f"{key} = {config.taken}, and there are only {write_count(examples, 'example')} to train on: a step "
                f"repeats some of them, and {given} means {steps * config.taken / examples:.1f} passes over "
                f"them; to have no example twice in a step, set {key} to {examples} or less"
            )
        )
    return config if epochs is None else replace(config, run=replace(config.run, steps=steps, epochs=None))


def _make_extras(config: PPOConfig | SFTConfig, data: RunData[Any]) -> ModelExtras:
    """Return what the run's models have beside their weights. Token ids of ``sampling.stop_token_ids`` replace the ends
    of the model there as they do in the run."""
    tokenizer: Any = data.tokenizer  # transformers leaves these types open
    if resolve_stops(config.sampling.stop_token_ids, data.tokenizer)[0]:
        return ModelExtras(data.template, data.sampling.stop_token_ids, ends_alone=True)
    ends = (tokenizer.eos_token_id, end_of_turn(data.tokenizer, config.data), *data.sampling.stop_token_ids)
    return ModelExtras(data.template, ends)


def _make_generators(
    config: PPOConfig | SFTConfig, roles: Roles, kept: _Lasting[Any], directory: RunDirectory
) -> Generators:
    """Return the generators as one object. If only the newest weights sample, interrupted completions are sampled
    again, otherwise they are continued."""
    assert roles.weight_sync is not None
    return Generators(
        roles.generators,
        roles.weight_sync,
        kept.losses,
        apart=roles.generators_are_apart,
        keeper=roles.estimator if roles.generators_are_apart else None,
        capacity=parts_of(config.engine.max_sequences, kept.data.sampling.n)[1],
        timeout_s=config.run.timeout_s * (1 + config.run.max_staleness),  # so many steps are in flight
        journals=None if config.run.staleness == 0 else directory.journals(),
    )


def _open_sessions(
    config: PPOConfig | SFTConfig,
    roles: Roles,
    generators: Generators | None,
    kept: _Lasting[Any],
    directory: RunDirectory,
) -> Sessions | None:
    """Return the rollout workers, which may have logs, as one object; None without an environment."""
    if roles.rollout is None or generators is None:
        return None
    logs = directory.logs if kept.cluster.capabilities.processes else None
    sessions: Sessions = load_sessions(config.environment.shown).Sessions(
        roles.rollout, roles.asked_generators, config, kept.data.sampling, logs, roles.generators
    )
    if roles.asked_generators:
        generators.returned = sessions.serve
        generators.left_out = sessions.leave_out
    return sessions


def _hear_of_loss(run: Run[Any], event: Event) -> None:
    """If a worker is lost that cannot be restarted alone, end all calls for which the run waits."""
    if not isinstance(event, WorkerLost):
        return
    roles = run.roles
    groups = [worker.group for worker in roles.workers.values()]
    restartable = [handle.group for handle in roles.generators] if roles.generators_are_apart else []
    for lost in (group for group in groups if group.lost):
        if not any(lost is group for group in restartable):
            for group in groups:
                if not group.lost:
                    group.give_up(lost)
        elif run.sessions is not None and run.generators is not None:
            run.generators.revive()
