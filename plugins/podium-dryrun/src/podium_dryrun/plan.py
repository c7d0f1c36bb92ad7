"""The plan that a dry run prints first: the resolved configuration, processes, and the arithmetic of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium.algorithms import LOSSES
from podium.config import config_to_yaml
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.paths import resolve_resume
from podium.runtime import Node, backend_class
from podium.spelling import write_count
from podium.telemetry.held_out import ACCURACY, REWARD, Metric
from podium.trainer.checks.placement import check_placement, sharing
from podium.trainer.checks.preflight import check_settings

__all__ = ["describe_plan", "is_accelerated"]


def describe_plan(config: PPOConfig | SFTConfig, backend: str, options: Mapping[str, Any] | None = None) -> str:
    """Return the resolved configuration and the plan, as text: processes, and the arithmetic of a batch.

    ``backend`` and ``options`` are those of :func:`podium.connect`.

    Raises:
        ConfigError: The run would be refused: something that the configuration names is missing, the backend cannot
            hold the worker processes.
        DataError: A file of the data is missing.
    """
    cls, config = backend_class(backend, options), resolve_resume(config)
    nodes = cls.expected_nodes(options or {})
    check_settings(config)
    if hasattr(cls, "capabilities"):
        check_placement(config, backend, cls.capabilities, nodes)
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    lines += [*_placement(config, backend, nodes), "", *_batch(config), *_objective(config)]
    return "\n".join(lines)


def _placement(config: PPOConfig | SFTConfig, backend: str, nodes: Sequence[Node]) -> Iterator[str]:
    roles_by_process = [roles for roles, count in config.processes for _ in range(count)]
    devices = _devices(nodes, len(roles_by_process))
    yield f"backend      {backend}: {write_count(len(roles_by_process), 'worker process')}, {_layout(config)}"
    for number, (roles, device) in enumerate(zip(roles_by_process, devices, strict=True)):
        yield f"process {number:<4} {device:<7} {', '.join(roles)}"
    ranks = write_count(config.placement.ranks_of("policy"), "data-parallel rank")
    yield f"strategy     {config.parallel.strategy} over {ranks}"


def _devices(nodes: Sequence[Node], processes: int) -> list[str]:
    """Return the device of each process. "gpu/2" is a device that two processes share."""
    if (shares := sharing(nodes, processes)) is not None:
        return shares.interleave([f"gpu/{round(1 / gpu)}" if gpu < 1 else "gpu" for gpu in shares.gpus])
    return [("gpu" if is_accelerated(nodes) else "cpu") if nodes else "device?"] * processes


def is_accelerated(nodes: Sequence[Node]) -> bool:
    return any(node.resources.get("gpu", 0) >= 1 for node in nodes)


def _layout(config: PPOConfig | SFTConfig) -> str:
    pools = config.placement.pools
    return f"pools {', '.join(pools)}" if pools else f"layout {config.placement.layout}"


def _batch(config: PPOConfig | SFTConfig) -> Iterator[str]:
    ranks = config.placement.ranks_of("policy")
    if isinstance(config, SFTConfig):
        examples = config.batch.examples
        yield f"step         {write_count(examples, 'example')}, one optimizer step; {_share(examples, ranks)} a rank"
    else:
        algorithm, n = config.algorithm, config.sampling.n
        prompts, rows = write_count(config.taken, "prompt"), write_count(config.rows, "row")
        yield f"step         {prompts} x {write_count(n, 'completion')} = {rows}"
        if config.replays:
            yield f"replay       of {config.engine.replayed_run}: its completions and rewards; nothing is sampled"
        elif (choice := config.prompt_choice).filter != "none":
            yield (
                f"filter       a prompt is dropped if {choice.reason}; others are drawn in its place, at most "
                f"{choice.refills} times a step"
            )
        rows = config.rows // algorithm.minibatches
        yield (
            f"updates      {write_count(algorithm.epoch_choice.count, 'epoch')} x "
            f"{write_count(algorithm.minibatches, 'minibatch')} = {write_count(algorithm.updates, 'optimizer step')} "
            f"of {write_count(rows, 'row')}; {_share(rows, ranks)} a rank"
        )
        if algorithm.has_value_head:
            trunk = algorithm.critic.critic_trunk
            yield f"critic       a value head on the policy's model, no model of its own (critic_trunk {trunk})"
    evaluated = "before and after" if config.eval.at_start else "after"
    evaluated = f"every {write_count(config.eval.every, 'step')}" if config.eval.every else evaluated
    evaluation = (
        f"at most {write_count(config.eval.items, 'held-out item')} {evaluated}" if config.eval.items else "none"
    )
    if config.eval.items:
        yield f"judged by    {_judge(config)}"
    rhythm = {"steps": config.save.every, "minutes": config.save.minutes}
    saved = " and ".join([f"every {most:g} {unit}" for unit, most in rhythm.items() if most] + ["at the end"])
    steps = f"{write_count(config.run.steps, 'step')} = {write_count(config.optimizer_steps, 'optimizer step')}"
    if config.run.epochs is not None:
        steps = (
            f"{config.run.epochs:g} epoch{'s' * (config.run.epochs != 1)}, whose number of steps follows from the data"
        )
    yield f"run          {steps}; evaluation: {evaluation}; checkpoint {saved}"


def _objective(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield the settings whose defaults depend on the loss and the estimator, each with its origin."""
    if isinstance(config, PPOConfig):
        algorithm = config.resolved_algorithm
        settings = {**config.algorithm.explain(), **algorithm.explain_options()}
        if not any(LOSSES.declaration(name).may_read("clip_low") for name in algorithm.losses):
            settings = {key: setting for key, setting in settings.items() if not key.startswith("clip_")}
        for number, (key, setting) in enumerate(settings.items()):
            value = "null" if setting.value is None else setting.value
            value = str(value).lower() if isinstance(value, bool) else value
            yield f"{'' if number else 'algorithm':12} {key} = {value} ({setting.origin})"
        origin = (
            f"auto, with run.schedule = {config.run.schedule}" if config.algorithm.correction == "auto" else "yours"
        )
        yield f"{'':12} correction = {', '.join(algorithm.corrections) or 'none'} ({origin})"
    else:
        yield from config.explain_objective()


def _judge(config: PPOConfig | SFTConfig) -> str:
    """What judges the run, and what ends it early."""
    figure, set_name = config.judged_by
    title = Metric(figure).title
    if figure == "auto" and config.scores_answers:
        figure = config.usual_figure
        title = Metric(figure).title
    elif figure == "auto":
        title = "accuracy if all scores of the first evaluation are 0 or 1, else reward"
        if config.reward.adds_up(len(config.reward.names)):
            figure, title = REWARD, Metric(REWARD).title
        if config.reward.correct_at is not None:
            figure, title = ACCURACY, f"accuracy, from a score of {config.reward.correct_at:g} on"
    ends = []
    if (goal := config.eval.stop_at) is not None:
        bound = "at least" if Metric(figure).higher_is_better else "at most"
        ends.append(f"it is {bound} {goal:g}")
    if config.eval.patience:
        ends.append(
            f"{write_count(config.eval.patience, 'evaluation brings', 'evaluations in a row bring')} no new best"
        )
    early = f"; the run ends early once {' or '.join(ends)}" if ends else ""
    return f"held-out {title}{f' of {set_name}' if set_name else ''}{early}"


def _share(rows: int, ranks: int) -> str:
    return f"{rows / ranks:,.1f}".removesuffix(".0")
