"""The roles of a run in their worker processes, and how new weights reach the generator.

colocated   processes 0..R-1  policy [reference] [teacher] [critic]             the generator reads the policy's weights
                              estimator generator [rollout]
split       processes 0..R-1  policy [reference] [teacher] [critic] estimator
            processes R..     generator, each a group of its own                weights are streamed after each step
            one more          [rollout]                                         it asks the generators by HTTP
pools       what placement.pools says: each pool is a set of processes, and the generator is as in one of the two above
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from podium.algorithms import AlgorithmConfig
from podium.errors import ConfigError, PodiumError
from podium.functions import load_function, nearest
from podium.models.loading import vocabulary_size
from podium.rollout.environments import load_rollout_worker, load_sessions
from podium.runs.config import InferenceConfig, PPOConfig, SFTConfig
from podium.runs.schedules import declaration_of, find_schedule
from podium.runtime import Bound, Cluster, Handle, Profile, Worker, colocate
from podium.runtime.endpoints import endpoints_of
from podium.spelling import write_count
from podium.telemetry import Note, Waiting, emit
from podium.trainer.checks.placement import (
    check_placement,
    check_ports,
    describe_placement,
    reserve_places,
    suggest_bfloat16,
    warn_of_bfloat16,
)
from podium.training import ParallelConfig
from podium.workers import (
    ColocatedSync,
    Critic,
    Estimator,
    Generator,
    Learner,
    Policy,
    Reference,
    RewardModel,
    StreamedSync,
    Teacher,
    WeightSync,
)
from podium.workers.learner import Progress
from podium.workers.reference import FollowingReference

_logger = logging.getLogger(__name__)

_ROLES: Final[Mapping[str, type[Worker]]] = {
    "policy": Policy,
    "reference": Reference,
    "teacher": Teacher,
    "critic": Critic,
    "reward": RewardModel,
    "estimator": Estimator,
    "generator": Generator,
}

RoleWorkers = Mapping[str, type[Worker] | Bound[Any]]
"""By role, a user's own class, or ``MyPolicy.bind(...)`` if its constructor takes other arguments."""


@dataclass(frozen=True)
class Roles:
    """Handles of the roles of one run, and the weight sync to the generator."""

    policy: Handle[Policy]
    generators: tuple[Handle[Generator], ...] = ()
    reference: Handle[Reference] | None = None
    teacher: Handle[Teacher] | None = None
    critic: Handle[Critic] | None = None
    reward: Handle[RewardModel] | None = None
    estimator: Handle[Estimator] | None = None
    rollout: Handle[Any] | None = None
    weight_sync: WeightSync | None = None

    @property
    def learners(self) -> dict[str, Handle[Learner]]:
        """The trained roles by name."""
        learners: dict[str, Handle[Learner]] = {"policy": self.policy}
        if self.critic is not None:
            learners["critic"] = self.critic
        return learners

    @property
    def stored(self) -> dict[str, Handle[Learner]]:
        """The roles whose weights change, which have checkpoints, by name."""
        follows = self.reference is not None and hasattr(self.reference, "follow")
        return {**self.learners, **({"reference": cast("Handle[Learner]", self.reference)} if follows else {})}

    def lost(self) -> list[str]:
        """Say which worker processes have ended by themselves, and why. Colocated roles are named together."""
        losses: dict[str, None] = {}  # without the same process again
        for group in (worker.group for worker in self.workers.values()):
            names = ", ".join(sorted((group.name, *group.shares_processes_with)))
            losses |= {f"rank {rank} of {names} ({cause})": None for rank, cause in group.lost.items()}
        return list(losses)

    def find_lost_roles(self) -> list[str]:
        """The roles whose processes have lost one, by the names of their groups."""
        return [name for name, worker in self.workers.items() if worker.group.lost]

    @property
    def generators_are_apart(self) -> bool:
        """Whether the generators' processes hold no other role. Then they can be restarted alone."""
        return not any(handle.group.shares_processes_with for handle in self.generators)

    @property
    def workers(self) -> dict[str, Handle[Any]]:
        """The handles of all roles of the run, by the names of their groups."""
        handles = {role: handle for role in (*_ROLES, "rollout") if (handle := getattr(self, role, None)) is not None}
        return handles | {handle.group.name: handle for handle in self.generators}

    @property
    def asked_generators(self) -> tuple[Handle[Generator], ...]:
        """The generators that the rollout workers ask by HTTP; () if the rollout workers have a generator in their
        processes."""
        return () if any(share_processes(self.rollout, handle) for handle in self.generators) else self.generators

    def kill(self) -> None:
        """End the processes of all roles at once, whatever they do."""
        for worker in self.workers.values():
            worker.group.processes.close(0.0)

    def check_parameters(self) -> None:
        """Check that all trained parameters are finite. Raises PodiumError for one that is not."""
        for role, ranks in self._progress().items():
            for steps, _, wrong in ranks:
                if wrong:
                    raise PodiumError(
                        f"the parameter {wrong} of the {role} is not finite after "
                        f"{write_count(steps, 'optimizer step')}, so nothing is saved: lower the learning rate "
                        "(optim.lr, critic.lr) or optim.weight_decay, and begin again, or resume from the latest "
                        "checkpoint"
                    )

    def check_learned(self) -> None:
        """Check that each trained role has made a step. Raises PodiumError if all its steps were skipped."""
        for role, ranks in self._progress().items():
            steps, skipped, _ = ranks[0]
            if 0 < steps == skipped:
                raise PodiumError(
                    f"each of the {write_count(steps, 'optimizer step')} of the {role} was skipped, because its loss "
                    "or gradient was not finite; nothing was learned, and no model is written: look at the data and "
                    "the loss (algorithm.loss), or lower the learning rate"
                )
            if skipped:
                why = "loss or gradient was not finite"
                emit(
                    Note(
                        f"{skipped} of the {write_count(steps, 'optimizer step')} of the {role} "
                        f"{'was' if skipped == 1 else 'were'} skipped: {why}"
                    )
                )

    def _progress(self) -> dict[str, list[Progress]]:
        """Return the progress of each rank, by trained role."""
        calls = {role: worker.progress.submit() for role, worker in self.learners.items()}
        return {role: call.result() for role, call in calls.items()}


def share_processes(first: Handle[Any] | None, second: Handle[Any]) -> bool:
    """Whether two roles share their worker processes."""
    return first is not None and first.group.processes is second.group.processes


def bind_roles(config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None) -> dict[str, Bound[Any]]:
    """Bind each role of this configuration to its constructor's arguments, in the order in which the roles start.

    Raises:
        ConfigError: ``workers`` names a role that does not exist or that this configuration does not use, or holds
            something that is no worker, or ``run.profile`` names an endpoint that a role does not have.
    """
    named = {role: load_function(name, key=f"worker of the {role}") for role, name in config.worker_names.items()}
    usual = cast("dict[str, type[Worker]]", {**list_classes(config), **named})
    if isinstance(config, PPOConfig) and config.algorithm.reference.reference_refresh:
        usual["reference"] = FollowingReference
    classes = {**usual, **(workers or {})}
    for role in workers or ():
        if role not in config.roles:
            raise ConfigError(f"workers[{role!r}]: this run has no such role; its roles are {', '.join(config.roles)}")
    bound: dict[str, Bound[Any]] = {}
    for role in config.roles:
        worker = classes[role]
        if not isinstance(worker, Bound) and not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ConfigError(f"workers[{role!r}] is {worker!r}: expected a subclass of Worker, or its .bind(...)")
        cls = worker.cls if isinstance(worker, Bound) else worker
        _check_endpoints(role, cls, config)
        for call in config.run.profile:
            if call.startswith(f"{role}.") and (name := call.partition(".")[2]) not in (endpoints := endpoints_of(cls)):
                raise ConfigError(f"run.profile = {call}: no endpoint of {cls.__name__}{nearest(name, endpoints)}")
        bound[role] = worker if isinstance(worker, Bound) else worker.bind(**_arguments(role, config))
    return bound


def _check_endpoints(role: str, cls: type[Worker], config: PPOConfig | SFTConfig) -> None:
    """Check that a user's own class has the endpoints that this run calls, since not all runs call them.

    Raises:
        ConfigError: It lacks one. The message says which, and what to do.
    """
    needed = config.list_endpoints(role)
    apart = ("generator",) in [roles for roles, _ in config.processes]
    if role == "generator" and apart and "rollout" in config.roles:
        needed["serve"] = "which rollout workers in other processes call (environment.name)"
    if role == "estimator" and apart:
        needed["keep"] = "which copies completions from the generator's processes (placement), so that they outlive it"
    if role == "generator" and declaration_of(find_schedule(config.run.schedule)).side_by_side:
        needed["generate_beside"] = f"with which run.schedule = {config.run.schedule} samples several parts at a time"
    if role == "reference" and isinstance(config, PPOConfig) and config.algorithm.reference.reference_refresh:
        needed |= dict.fromkeys(
            ("follow", "copy_state"), "with which algorithm.options.reference_refresh follows the policy"
        )
    resting = ("policy", "critic", "reference", "teacher", *(("generator",) if config.run.staleness == 0 else ()))
    if role in resting and isinstance(config, PPOConfig) and config.parallel.offload != "none":
        needed["rest"] = (
            f"with which parallel.offload = {config.parallel.offload} moves it off its device while it is idle"
        )
    for method, why in needed.items():
        if method not in endpoints_of(cls):
            usual = list_classes(config)[role]
            class_name, package = usual.__name__, usual.__module__.rpartition(".")[0]
            raise ConfigError(
                f"workers[{role!r}]: {cls.__name__} has no endpoint {method!r}, {why}. Derive it from "
                f"{package}.{class_name}, or write the endpoint as {class_name}.{method} is written"
            )


@contextmanager
def start_roles(
    cluster: Cluster, config: PPOConfig | SFTConfig, workers: RoleWorkers | None = None, traces: Path | None = None
) -> Iterator[Roles]:
    """Start each role where ``config.placement`` puts it. The end of the block ends the roles.

    Args:
        traces: Directory for the calls that ``config.run.profile`` records.

    Raises:
        ConfigError: There are several ranks on a backend without collectives, or ``workers`` does not fit.
        PlacementError: There is no room for the ranks or their devices.
        WorkerStartError: A constructor raised.
    """
    bound = bind_roles(config, workers)
    check_placement(config, cluster.backend_name, cluster.capabilities)
    with ExitStack() as stack:
        started, generators = stack.enter_context(start_workers(cluster, config, bound, traces, replicas=True))
        notes = [line for handle in started.values() if hasattr(handle, "note") for line in handle.note().splitlines()]
        for note in dict.fromkeys(notes):
            emit(Note(note))
        weight_sync: WeightSync | None = None
        if generators:
            if config.placement.reads_policy:
                weight_sync = ColocatedSync(generators[0])
            else:
                weight_sync = StreamedSync(started["policy"], generators, delta=config.placement.delta_sync)
            stack.callback(weight_sync.close)
            weight_sync.init()
        yield Roles(**started, generators=generators, weight_sync=weight_sync)


@contextmanager
def start_workers(
    cluster: Cluster,
    config: InferenceConfig,
    bound: Mapping[str, Bound[Any]],
    traces: Path | None = None,
    *,
    replicas: bool = False,
) -> Iterator[tuple[dict[str, Any], tuple[Handle[Generator], ...]]]:
    """Start roles where ``config.placement`` puts them, and give their handles by role, and those of the generators;
    end them with the block.

    With ``replicas`` several generators in processes of their own are groups of one rank, ``generator-0`` and so on.
    """
    ranks = [count for _, count in config.processes]
    started: dict[str, Any] = {}
    generators: list[Handle[Generator]] = []
    parts: dict[tuple[str, ...], list[Any]] = {}  # for each set of processes, the names of its roles, and a handle
    with ExitStack() as stack:
        pool = stack.enter_context(reserve_places(cluster, sum(ranks), config.placement))
        places = dict(zip([roles for roles, _ in config.processes], pool.split(ranks), strict=True))
        by_node = Counter(slot.node for roles, pool in places.items() if "rollout" in roles for slot in pool.slots)
        check_ports(config, max(by_node.values(), default=0))
        emit(Note(describe_placement((roles, pool.slots) for roles, pool in places.items())))
        names = [role for roles in places for role in roles]
        workers = sum(len(roles) * len(pool) for roles, pool in places.items())
        emit(Waiting(f"loading {config.model.path or 'a new model'} for {', '.join(names)}", 0, workers))
        for roles, place in places.items():
            calls = [call for call in config.run.profile if call.partition(".")[0] in roles]
            profile = Profile(calls=calls, directory=traces or "profile") if calls else None
            how, seed = {"timeout_s": config.run.timeout_s, "profile": profile}, config.run.seed
            if replicas and roles == ("generator",) and len(place) > 1:
                handles = [
                    cluster.start(
                        bound["generator"],
                        place[number : number + 1],
                        name=f"generator-{number}",
                        seed=seed + number,
                        **how,
                    )
                    for number in range(len(place))
                ]
                generators += handles
            else:
                together = cluster.start(colocate(**{role: bound[role] for role in roles}), place, seed=seed, **how)
                handles = [*together.values()]
                generators += [together[role] for role in roles if role == "generator"]
                started |= {role: together[role] for role in roles if role != "generator"}
            parts[roles] = [*{handle.group.processes: handle for handle in handles}.values()]
            for handle in handles:
                stack.push(partial(close_role, handle))
        warn_of_bfloat16(config, parts)
        suggest_bfloat16(config, next(iter(generators), None))
        yield started, tuple(generators)


def list_classes(config: InferenceConfig) -> dict[str, type[Any]]:
    """Return Podium's class of each role that this configuration may use."""
    return (
        {**_ROLES, "rollout": load_rollout_worker(config.environment.shown)}
        if "rollout" in config.roles
        else {**_ROLES}
    )


def inference_arguments(role: str, config: InferenceConfig) -> dict[str, Any]:
    """The arguments of the constructor of a role that a run without training may have."""
    if role == "generator":
        return {"model": config.model, "engine": config.resolved_engine}
    if role == "rollout":
        further = load_sessions(config.environment.shown).list_arguments(config.environment)
        return {"model": config.model, "data": config.data, "environment": config.environment, **further}
    parallel = config.parallel if isinstance(config, PPOConfig | SFTConfig) else ParallelConfig()
    return {
        "path": config.reward.path,
        "system_prompt": config.data.system_prompt,
        "max_tokens": parallel.counted_tokens,
    }


def _arguments(role: str, config: PPOConfig | SFTConfig) -> dict[str, Any]:
    """The arguments of a role's constructor."""
    sft = isinstance(config, SFTConfig)
    algorithm = AlgorithmConfig(loss="cross_entropy") if sft else config.resolved_algorithm
    match role:
        case "generator" | "reward" | "rollout":
            return inference_arguments(role, config)
        case "reference":
            return {"model": config.model, "parallel": config.parallel}
        case "teacher":
            assert not sft  # supervised fine-tuning has none
            return {
                "model": config.teacher_model,
                "parallel": config.parallel,
                "vocabulary": vocabulary_size(config.model),
                "top_k": config.algorithm.teacher.teacher_top_k,
            }
        case "estimator":
            return {"algorithm": algorithm}
    model, optim = config.trained_model, config.ending_optim
    if role == "critic" and not sft:
        critic_settings = {"path": config.critic.path, "config": {}} if config.critic.path else {}
        model, optim = replace(model, lora=None, **critic_settings), config.critic_optim
    head = {"value_lr": config.critic.lr} if isinstance(config, PPOConfig) and algorithm.has_value_head else {}
    return {"model": model, "optim": optim, "parallel": config.parallel, "algorithm": algorithm, **head}


def close_role(handle: Any, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
    """Close a role. An error of closing does not replace the error that ends the run. The processes of an interrupted
    run are killed, whatever they do."""
    try:
        if isinstance(error, KeyboardInterrupt):
            handle.group.processes.close(0.0)
        handle.group.close()
    except PodiumError as late:
        if error is None:
            raise
        _logger.warning("%s could not be closed: %s", handle.group.name, late)
