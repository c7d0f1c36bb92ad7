"""What a run would do, for a dry run: roles on ranks and devices, the arithmetic of a batch, an estimate of memory.

Nothing is started and no weights are loaded: the model is laid out on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from podium.devices import DTYPES, accelerator_count
from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, resolve_reward
from podium.rollout.tasks import check_data
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.loading import config_to_yaml
from podium.trainer.roles import bind_roles
from podium.workers import LoraConfig, ModelConfig, load_model

__all__ = ["Hosts", "ModelSize", "describe_plan", "memory_gib", "model_size", "placed_hosts"]

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Hosts:
    """Host processes that hold the same roles, by their numbers."""

    numbers: range
    roles: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        return f"host {first}" if first == last else f"hosts {first}-{last}"


@dataclass(frozen=True)
class ModelSize:
    """What the memory of a model follows from."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    key_value_width: int
    vocabulary: int


def describe_plan(config: PPOConfig | SFTConfig, backend: str) -> str:
    """The resolved configuration and the plan, as text.

    Raises:
        ConfigError: no data or reward are named, or there is no such reward, or the model's configuration cannot be
            read.
        DataError: a file of the data is not there.
    """
    check_data(config.data)
    _check_reward(config.reward.name)
    size, path = model_size(config.model), _critic_path(config)
    critic = model_size(replace(config.model, path=path, config={}, lora=None)) if path else size
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    lines += [*_placement(config, backend), "", *_batch(config), "", *_memory(config, size, critic)]
    return "\n".join(lines)


def _check_reward(name: str) -> None:
    """A module's reward is left to the run, which imports it in a process of its own."""
    if name not in NAMED_REWARDS and (":" not in name or name.rpartition(":")[0].endswith(".py")):
        resolve_reward(name)


def placed_hosts(config: PPOConfig | SFTConfig) -> list[Hosts]:
    """Which roles each host process holds, as ``config.placement`` puts them."""
    placement, roles = config.placement, tuple(bind_roles(config))
    if placement.layout == "colocated" or "generator" not in roles:
        return [Hosts(range(placement.ranks), roles)]
    beside = tuple(role for role in roles if role != "generator")
    return [Hosts(range(placement.ranks), beside), Hosts(range(placement.ranks, placement.slots), ("generator",))]


def model_size(model: ModelConfig) -> ModelSize:
    """Sizes of the model that ``model`` describes, without its weights.

    Raises:
        ConfigError: nothing there that transformers knows.
    """
    with torch.device("meta"):
        whole = _from_path(model.path) if model.path else load_model(replace(model, lora=None), "meta")
    settings: Any = whole.config.get_text_config()
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    parameters = sum(p.numel() for p in whole.parameters())
    return ModelSize(
        parameters=parameters,
        trained=parameters if model.lora is None else _adapter_parameters(whole, model.lora),
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        key_value_width=heads * head,
        vocabulary=settings.vocab_size,
    )


def _from_path(path: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: its configuration cannot be read: {error}") from None


def _adapter_parameters(model: PreTrainedModel, lora: LoraConfig) -> int:
    head = model.get_output_embeddings()
    adapted = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (not lora.targets or name.rpartition(".")[2] in lora.targets)
    ]
    return sum(lora.rank * (module.in_features + module.out_features) for module in adapted)


def memory_gib(
    config: PPOConfig | SFTConfig, size: ModelSize, roles: Collection[str], critic: ModelSize | None = None
) -> dict[str, float]:
    """An estimate for one host process that holds ``roles``, by what takes it, in GiB.

    Activations are rough: 16 hidden vectors a token and layer (one with gradient checkpointing), and three copies of
    the logits. Keys and values are those of prompts and completions of the greatest length.

    Args:
        size: of the policy's model.
        roles: of ``policy``, ``reference``, ``critic``, ``generator``.
        critic: size of the critic's model; None: the policy's.
    """
    width = DTYPES[config.model.dtype].itemsize
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
            parts["generator's own weights"] = size.parameters * DTYPES[own].itemsize
        length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        cache = config.engine.slots * length * size.layers * 2 * size.key_value_width * DTYPES[own].itemsize
        most = config.engine.cache_gib
        parts["key/value cache"] = cache if most is None else min(cache, most * _GIB)
    return {name: nbytes / _GIB for name, nbytes in parts.items()}


def _critic_path(config: PPOConfig | SFTConfig) -> str:
    return config.critic.path if isinstance(config, PPOConfig) and config.has_critic else ""


def _placement(config: PPOConfig | SFTConfig, backend: str) -> Iterator[str]:
    placement, hosts = config.placement, placed_hosts(config)
    gpus, slots = accelerator_count(), hosts[-1].numbers.stop
    yield f"backend      {backend}: {slots} host process(es), layout {placement.layout}; devices as on this machine"
    for group in hosts:
        for number in group.numbers:
            device = f"cuda:{number}" if gpus >= slots else "cpu"
            yield f"host {number:<7} {device:<7} {', '.join(group.roles)}"
    yield f"strategy     {config.parallel.strategy} over {placement.ranks} data-parallel rank(s)"


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
    total, hosts = 0.0, placed_hosts(config)
    for group in hosts:
        parts = memory_gib(config, size, group.roles, critic)
        each = " each" if len(group.numbers) > 1 else ""
        yield f"memory       about {_amount(sum(parts.values()))}{each} on {group} (estimate):"
        yield from (f"  {name:<24} {_amount(gib):>11}" for name, gib in parts.items())
        total += len(group.numbers) * sum(parts.values())
    if hosts[-1].numbers.stop > 1:
        yield f"memory       about {_amount(total)} on all hosts"


def _amount(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib * _GIB / _MIB:,.1f} MiB"
