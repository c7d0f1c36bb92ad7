"""What a run would do, for a dry run: roles on processes and devices, the arithmetic of a batch, an estimate of memory.

Nothing is started and no weights are loaded. Only :func:`describe_plan` imports torch, for the size of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from podium.config import config_to_yaml
from podium.runtime import Node, backend_class
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.preflight.settings import check_placement, check_settings

if TYPE_CHECKING:
    from podium.trainer.preflight.model_size import ModelSize

__all__ = ["Processes", "describe_plan", "memory_gib", "placed_processes"]

_MIB, _GIB = 2**20, 2**30
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Processes:
    """Worker processes that hold the same roles, by their numbers."""

    numbers: range
    roles: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        return f"process {first}" if first == last else f"processes {first}-{last}"


def describe_plan(config: PPOConfig | SFTConfig, backend: str, options: Mapping[str, Any] | None = None) -> str:
    """Return the resolved configuration and the plan, as text.

    Args:
        config: The configuration of the run.
        backend: The backend's name or address, as for :func:`podium.connect`.
        options: The backend's options.

    Raises:
        ConfigError: The run would be refused: something that the configuration names is missing, the backend cannot
            hold the worker processes, or the model's configuration cannot be read.
        DataError: A file of the data is missing.
    """
    cls = backend_class(backend, options)
    nodes = cls.expected_nodes(options or {})
    check_settings(config)
    if hasattr(cls, "capabilities"):
        check_placement(config.placement, backend, cls.capabilities, nodes)
    from podium.trainer.preflight.model_size import model_size

    size, path = model_size(config.model), _critic_path(config)
    critic = model_size(replace(config.model, path=path, config={}, lora=None)) if path else size
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    lines += [*_placement(config, backend, nodes), "", *_batch(config), "", *_memory(config, size, critic)]
    return "\n".join(lines)


def placed_processes(config: PPOConfig | SFTConfig) -> list[Processes]:
    """Return which roles each worker process holds, as ``config.placement`` puts them."""
    placement, roles = config.placement, config.roles
    if placement.layout == "colocated" or "generator" not in roles:
        return [Processes(range(placement.ranks), roles)]
    beside = tuple(role for role in roles if role != "generator")
    generators = range(placement.ranks, placement.processes)
    return [Processes(range(placement.ranks), beside), Processes(generators, ("generator",))]


def memory_gib(
    config: PPOConfig | SFTConfig, size: ModelSize, roles: Collection[str], critic: ModelSize | None = None
) -> dict[str, float]:
    """An estimate for one worker process that holds ``roles``, by what takes it, in GiB.

    Activations are rough: 16 hidden vectors a token and layer (one with gradient checkpointing), and three copies of
    the logits. Keys and values are those of prompts and completions of the greatest length.

    Args:
        config: The configuration of the run.
        size: Sizes of the policy's model.
        roles: Some of ``policy``, ``reference``, ``critic``, ``generator``.
        critic: Sizes of the critic's model. None means those of the policy's.
    """
    width = _BYTES[config.model.dtype]
    shards = config.placement.ranks if config.parallel.strategy == "fsdp2" else 1
    kept = 1 if config.model.gradient_checkpointing else 16
    tokens = config.parallel.micro_batch_tokens
    parts: dict[str, float] = {}
    if "policy" in roles:
        parts["weights"] = size.parameters * width / shards
        parts["gradients"] = size.trained * width / shards
        parts["optimizer (AdamW)"] = 2 * size.trained * width / shards
        parts["activations"] = tokens * (size.layers * size.hidden * kept + 3 * size.vocabulary) * 4
    if "critic" in roles:
        parts["critic with optimizer"] = 4 * (critic or size).parameters * width / shards
    if "reference" in roles and config.model.lora is None:
        parts["reference weights"] = size.parameters * width / shards
    if "generator" in roles:
        own = config.engine.dtype or config.model.dtype
        shared = "policy" in roles and shards == 1 and config.model.lora is None and own == config.model.dtype
        if not shared:
            parts["generator's own weights"] = size.parameters * _BYTES[own]
        length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        cache = config.engine.max_sequences * length * size.layers * 2 * size.key_value_width * _BYTES[own]
        most = config.engine.cache_gib
        parts["key/value cache"] = cache if most is None else min(cache, most * _GIB)
    return {name: nbytes / _GIB for name, nbytes in parts.items()}


def _critic_path(config: PPOConfig | SFTConfig) -> str:
    return config.critic.path if isinstance(config, PPOConfig) and config.has_critic else ""


def _placement(config: PPOConfig | SFTConfig, backend: str, nodes: Sequence[Node]) -> Iterator[str]:
    placed = placed_processes(config)
    count = placed[-1].numbers.stop
    device = "gpu" if sum(node.resources.get("gpu", 0) for node in nodes) >= count else "cpu"
    yield f"backend      {backend}: {count} worker process(es), layout {config.placement.layout}"
    for group in placed:
        for number in group.numbers:
            yield f"process {number:<4} {device if nodes else 'device?':<7} {', '.join(group.roles)}"
    yield f"strategy     {config.parallel.strategy} over {config.placement.ranks} data-parallel rank(s)"


def _batch(config: PPOConfig | SFTConfig) -> Iterator[str]:
    ranks = config.placement.ranks
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
        yield f"tokens       at most {config.rows * config.sampling.max_new_tokens} sampled a step"
    yield f"run          {config.run.steps} steps = {config.optimizer_steps} optimizer steps; " + _cadence(config)


def _share(rows: int, ranks: int) -> str:
    return f"{rows / ranks:,.1f}".removesuffix(".0")


def _cadence(config: PPOConfig | SFTConfig) -> str:
    evaluation = f"at most {config.eval.items} held-out items " + (
        f"every {config.eval.every} steps"
        if config.eval.every
        else "before and after"
        if config.eval.at_start
        else "after"
    )
    saving = f"every {config.save.every} steps" if config.save.every else "at the end"
    return f"evaluation: {evaluation if config.eval.items else 'none'}; checkpoint {saving}"


def _memory(config: PPOConfig | SFTConfig, size: ModelSize, critic: ModelSize) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    total, placed = 0.0, placed_processes(config)
    for group in placed:
        parts = memory_gib(config, size, group.roles, critic)
        each = " each" if len(group.numbers) > 1 else ""
        yield f"memory       about {_amount(sum(parts.values()))}{each} on {group} (estimate):"
        yield from (f"  {name:<24} {_amount(gib):>11}" for name, gib in parts.items())
        total += len(group.numbers) * sum(parts.values())
    if placed[-1].numbers.stop > 1:
        yield f"memory       about {_amount(total)} on all processes"


def _amount(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib * _GIB / _MIB:,.1f} MiB"
