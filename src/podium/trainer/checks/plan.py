"""The plan that a dry run prints: processes, the arithmetic of a batch, and an estimate of memory.

It starts no worker and loads no weights. Only the size of a model needs torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from podium.algorithms.declarations import CLIPPING_LOSSES, LOSSES
from podium.config import config_to_yaml
from podium.models import ModelConfig
from podium.models.weight_files import find_replaced_heads
from podium.runs.config import PPOConfig, PreferenceRun, SFTConfig
from podium.runs.paths import resolve_resume
from podium.runtime import Node, backend_class
from podium.telemetry.held_out import ACCURACY, Metric
from podium.trainer.checks.placement import check_placement, sharing
from podium.trainer.checks.preflight import check_settings

__all__ = ["ModelSize", "describe_plan", "memory_gib", "model_size"]

_MIB, _GIB = 2**20, 2**30
_BFLOAT16: Final = "bfloat16"
_BYTES: Final = {"float32": 4, _BFLOAT16: 2, "float16": 2}


def describe_plan(config: PPOConfig | SFTConfig, backend: str, options: Mapping[str, Any] | None = None) -> str:
    """Return the resolved configuration and the plan, as text: processes, the arithmetic of a batch, and memory.

    ``backend`` and ``options`` are those of :func:`podium.connect`.

    Raises:
        ConfigError: The run would be refused: something that the configuration names is missing, the backend cannot
            hold the worker processes, or the model's configuration cannot be read.
        DataError: A file of the data is missing.
    """
    cls, config = backend_class(backend, options), resolve_resume(config)
    nodes = cls.expected_nodes(options or {})
    check_settings(config)
    if hasattr(cls, "capabilities"):
        check_placement(config, backend, cls.capabilities, nodes)
    size = critic = model_size(config.model)
    if isinstance(config, PPOConfig) and config.has_critic and config.critic.path:
        critic_model = replace(config.model, path=config.critic.path, config={}, lora=None)
        critic = model_size(critic_model, spared=find_replaced_heads(critic_model.path))
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    scorer = _nbytes(config.reward.path) if "reward" in config.roles else 0
    lines += [
        *_placement(config, backend, nodes),
        "",
        *_batch(config),
        *_objective(config),
        "",
        *_memory(config, size, critic, scorer, _is_accelerated(nodes)),
    ]
    return "\n".join(lines)


def _placement(config: PPOConfig | SFTConfig, backend: str, nodes: Sequence[Node]) -> Iterator[str]:
    roles_by_process = [roles for roles, count in config.processes for _ in range(count)]
    devices = _devices(nodes, len(roles_by_process))
    yield f"backend      {backend}: {len(roles_by_process)} worker process(es), {_layout(config)}"
    for number, (roles, device) in enumerate(zip(roles_by_process, devices, strict=True)):
        yield f"process {number:<4} {device:<7} {', '.join(roles)}"
    yield f"strategy     {config.parallel.strategy} over {config.placement.ranks_of('policy')} data-parallel rank(s)"


def _devices(nodes: Sequence[Node], processes: int) -> list[str]:
    """Return the device of each process. "gpu/2" is a device that two processes share."""
    if (shares := sharing(nodes, processes)) is not None:
        return shares.in_turns([f"gpu/{round(1 / gpu)}" if gpu < 1 else "gpu" for gpu in shares.gpus])
    return [("gpu" if _is_accelerated(nodes) else "cpu") if nodes else "device?"] * processes


def _is_accelerated(nodes: Sequence[Node]) -> bool:
    return any(node.resources.get("gpu", 0) >= 1 for node in nodes)


def _layout(config: PPOConfig | SFTConfig) -> str:
    pools = config.placement.pools
    return f"pools {', '.join(pools)}" if pools else f"layout {config.placement.layout}"


def _batch(config: PPOConfig | SFTConfig) -> Iterator[str]:
    ranks = config.placement.ranks_of("policy")
    if isinstance(config, SFTConfig):
        examples = config.batch.examples
        yield f"step         {examples} examples, one optimizer step; {_share(examples, ranks)} a rank"
    else:
        algorithm, n = config.algorithm, config.sampling.n
        yield f"step         {config.batch.prompts} prompts x {n} completions = {config.rows} rows"
        rows = config.rows // algorithm.minibatches
        yield (
            f"updates      {algorithm.epochs} epoch(s) x {algorithm.minibatches} minibatch(es) = {algorithm.updates} "
            f"optimizer step(s) of {rows} rows; {_share(rows, ranks)} a rank"
        )
    evaluated = "before and after" if config.eval.at_start else "after"
    evaluated = f"every {config.eval.every} steps" if config.eval.every else evaluated
    evaluation = f"at most {config.eval.items} held-out items {evaluated}" if config.eval.items else "none"
    if config.eval.items:
        yield f"judged by    {_judge(config)}"
    rhythm = {"steps": config.save.every, "minutes": config.save.minutes}
    saved = " and ".join([f"every {most:g} {unit}" for unit, most in rhythm.items() if most] + ["at the end"])
    steps = f"{config.run.steps} steps = {config.optimizer_steps} optimizer steps"
    if config.run.epochs is not None:
        steps = f"{config.run.epochs:g} epoch(s), whose number of steps follows from the data"
    yield f"run          {steps}; evaluation: {evaluation}; checkpoint {saved}"


def _objective(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield the settings whose defaults depend on the loss and the estimator, each with its origin."""
    if isinstance(config, PPOConfig):
        settings = {**config.algorithm.explain(), **config.algorithm.explain_options()}
        if config.algorithm.loss in set(LOSSES) - set(CLIPPING_LOSSES):
            settings = {key: setting for key, setting in settings.items() if not key.startswith("clip_")}
        for number, (key, setting) in enumerate(settings.items()):
            value = "null" if setting.value is None else setting.value
            value = str(value).lower() if isinstance(value, bool) else value
            yield f"{'' if number else 'algorithm':12} {key} = {value} ({setting.origin})"
    elif isinstance(config, PreferenceRun):
        from podium.algorithms.preferences import explain_options  # needs torch

        yield f"algorithm    loss = {config.algorithm.loss_name}"
        for key, setting in explain_options(config.algorithm).items():
            yield f"{'':12} options.{key} = {setting.value:g} ({setting.origin})"


def _judge(config: PPOConfig | SFTConfig) -> str:
    """What judges the run, and what ends it early."""
    figure, set_name = config.judged_by
    title = Metric(figure).title
    if figure == "auto" and config.scores_answers:
        figure = config.usual_figure
        title = Metric(figure).title
    elif figure == "auto":
        title = "accuracy if all scores of the first evaluation are 0 or 1, else reward"
        if config.reward.correct_at is not None:
            figure, title = ACCURACY, f"accuracy, from a score of {config.reward.correct_at:g} on"
    ends = []
    if (goal := config.eval.stop_at) is not None:
        bound = "at least" if Metric(figure).higher_is_better else "at most"
        ends.append(f"it is {bound} {goal:g}")
    if config.eval.patience:
        ends.append(f"{config.eval.patience} evaluations in a row bring no new best")
    early = f"; the run ends early once {' or '.join(ends)}" if ends else ""
    return f"held-out {title}{f' of {set_name}' if set_name else ''}{early}"


def _share(rows: int, ranks: int) -> str:
    return f"{rows / ranks:,.1f}".removesuffix(".0")


def _nbytes(path: str) -> int:
    """Return the size of a reward model in bytes."""
    from podium.models.loading import load_scorer

    return sum(parameter.nbytes for parameter in load_scorer(path, "meta").parameters())


def _memory(
    config: PPOConfig | SFTConfig, size: ModelSize, critic: ModelSize, scorer: int, accelerated: bool
) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    first, total = 0, 0.0
    for roles, count in config.processes:
        parts = memory_gib(config, size, roles, critic, scorer, accelerated=accelerated)
        where = f" each on processes {first}-{first + count - 1}" if count > 1 else f" on process {first}"
        yield f"memory       about {_amount(sum(parts.values()))}{where} (estimate):"
        yield from (f"  {name:<24} {_amount(gib):>11}" for name, gib in parts.items())
        first, total = first + count, total + count * sum(parts.values())
    if first > 1:
        yield f"memory       about {_amount(total)} on all processes"


def _amount(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib * _GIB / _MIB:,.1f} MiB"


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_gib(
    config: PPOConfig | SFTConfig,
    size: ModelSize,
    roles: Collection[str],
    critic: ModelSize | None = None,
    scorer: int = 0,
    *,
    accelerated: bool = False,
) -> dict[str, float]:
    """Estimate the memory in GiB of one worker process that holds ``roles``, by its uses.

    ``size`` is that of the policy's model, and of the critic's unless ``critic`` is given; ``scorer`` is the reward
    model's in bytes; ``accelerated`` says that the process has an accelerator. Activations are rough: 16 hidden vectors
    for each token and layer (one with gradient checkpointing), and three copies of the logits that exist at once. Keys
    and values are those of prompts and completions of the greatest length.
    """
    from podium.training.output_layer import logits_at_once  # needs torch

    width, exact = _BYTES[config.model.dtype], _BYTES["float32"]
    copies = exact if width < exact and config.optim.master_weights else 0  # adapters are float32 in any case
    shards = config.placement.ranks_of(next(iter(roles))) if config.parallel.strategy == "fsdp2" else 1
    kept = 1 if config.model.gradient_checkpointing else 16
    tokens = config.parallel.micro_batch_tokens
    parts: dict[str, float] = {}
    if "policy" in roles:
        parts["weights"] = size.parameters * width / shards
        parts["gradients"] = size.trained * exact / shards
        parts["optimizer (AdamW)"] = 2 * size.trained * exact / shards
        if copies and config.model.lora is None:
            parts["float32 copies"] = size.trained * copies / shards
        logits = 3 * logits_at_once(tokens, size.vocabulary)
        parts["activations"] = (tokens * size.layers * size.hidden * kept + logits) * 4
    if "critic" in roles:
        parts["critic with optimizer"] = (width + 3 * exact + copies) * (critic or size).parameters / shards
    if "reference" in roles and config.model.lora is None:
        parts["reference weights"] = size.parameters * width / shards
    if "reward" in roles:
        parts["reward model"] = scorer
    if "generator" in roles:
        dtype = config.resolved_engine.dtype or (_BFLOAT16 if accelerated else config.model.dtype)
        shared = "policy" in roles and shards == 1 and config.model.lora is None and dtype == config.model.dtype
        if not shared:
            parts["generator's own weights"] = size.parameters * _BYTES[dtype]
        length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        cache = config.engine.max_sequences * length * size.layers * 2 * size.key_value_width * _BYTES[dtype]
        most = config.engine.cache_gib
        parts["key/value cache"] = cache if most is None else min(cache, most * _GIB)
    return {name: nbytes / _GIB for name, nbytes in parts.items()}


@dataclass(frozen=True)
class ModelSize:
    """The numbers that the memory of a model follows from."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    key_value_width: int
    vocabulary: int


def model_size(model: ModelConfig, *, spared: Sequence[str] = ()) -> ModelSize:
    """Return the sizes of a model, which is laid out on torch's meta device, without weights.

    Args:
        spared: Patterns of names of tensors that need not fit, beside ``model.allow_tensors``.

    Raises:
        ConfigError: The model's configuration cannot be read, or its files have other tensors.
    """
    import torch

    from podium.models.loading import lay_out, with_adapters

    outline = lay_out(model, spared=spared)
    settings: Any = outline.config.get_text_config()
    heads = getattr(settings, "num_attention_heads", 0)  # some models have states in place of attention
    shared = getattr(settings, "num_key_value_heads", None) or heads
    head_width = getattr(settings, "head_dim", None) or settings.hidden_size // max(1, heads)
    parameters = trained = sum(p.numel() for p in outline.parameters())
    if model.lora is not None:
        with torch.device("meta"):
            adapted = with_adapters(outline, model.lora, model.seed)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return ModelSize(
        parameters=parameters,
        trained=trained,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        key_value_width=shared * head_width,
        vocabulary=settings.vocab_size,
    )
