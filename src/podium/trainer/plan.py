"""What a run would do, for a dry run: roles on ranks and devices, the arithmetic of a batch, an estimate of memory.

Nothing is started and no weights are loaded: the model is laid out on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from podium.devices import DTYPES, accelerator_count
from podium.errors import ConfigError
from podium.trainer.config import PPOConfig, SFTConfig
from podium.trainer.loading import config_to_yaml
from podium.trainer.roles import bind_roles
from podium.workers import LoraConfig, ModelConfig, load_model

__all__ = ["ModelSize", "describe_plan", "memory_gib", "model_size"]

_GIB = 2**30


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
        ConfigError: no data are named, or the model's configuration cannot be read.
    """
    if not config.data.train:
        raise ConfigError("data.train is not set: expected a .jsonl or .parquet file, a dataset, or reasoning_gym:TASK")
    size = model_size(config.model)
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    lines += [*_placement(config, backend), "", *_batch(config), "", *_memory(config, size)]
    return "\n".join(lines)


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


def memory_gib(config: PPOConfig | SFTConfig, size: ModelSize) -> dict[str, float]:
    """An estimate for each rank that holds all of its roles, by what takes it, in GiB.

    Activations are rough: 16 hidden vectors a token and layer (one with gradient checkpointing), and three copies of
    the logits.
    """
    width = DTYPES[config.model.dtype].itemsize
    shards = config.placement.ranks if config.parallel.strategy == "fsdp2" else 1
    roles = bind_roles(config)
    kept = 1 if config.model.gradient_checkpointing else 16
    tokens = config.parallel.micro_batch_tokens
    parts = {
        "weights": size.parameters * width / shards,
        "gradients": size.trained * width / shards,
        "optimizer (AdamW)": 2 * size.trained * width / shards,
        "activations": tokens * (size.layers * size.hidden * kept + 3 * size.vocabulary) * 4,
    }
    if "critic" in roles:
        parts["critic with optimizer"] = 4 * size.parameters * width / shards
    if "reference" in roles and config.model.lora is None:
        parts["reference weights"] = size.parameters * width / shards
    if "generator" in roles:
        if shards > 1 or config.model.lora is not None or config.engine.dtype not in (None, config.model.dtype):
            parts["generator's own weights"] = size.parameters * width
        cache_width = DTYPES[config.engine.dtype or config.model.dtype].itemsize
        length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        parts["key/value cache"] = config.engine.slots * length * size.layers * 2 * size.key_value_width * cache_width
    return {name: nbytes / _GIB for name, nbytes in parts.items()}


def _placement(config: PPOConfig | SFTConfig, backend: str) -> Iterator[str]:
    placement = config.placement
    gpus = accelerator_count()
    roles = list(bind_roles(config))
    hosts: list[tuple[range, list[str]]] = [(range(placement.ranks), roles)]
    if placement.layout == "split" and "generator" in roles:
        beside = [role for role in roles if role != "generator"]
        hosts = [(hosts[0][0], beside), (range(placement.ranks, placement.slots), ["generator"])]
    yield f"backend      {backend}: {hosts[-1][0].stop} host process(es), layout {placement.layout}"
    for ranks, names in hosts:
        for rank in ranks:
            device = f"cuda:{rank}" if gpus >= placement.slots else "cpu"
            yield f"host {rank:<7} {device:<7} {', '.join(names)}"
    yield f"strategy     {config.parallel.strategy} over {placement.ranks} data-parallel rank(s)"


def _batch(config: PPOConfig | SFTConfig) -> Iterator[str]:
    ranks = config.placement.ranks
    if isinstance(config, SFTConfig):
        examples = config.batch.examples
        yield f"step         {examples} examples, one optimizer step; {examples / ranks:g} a rank"
    else:
        algorithm, n = config.algorithm, config.sampling.n
        yield f"step         {config.batch.prompts} prompts x {n} completions = {config.rows} rows"
        rows = config.rows // algorithm.minibatches
        yield (
            f"updates      {algorithm.epochs} epoch(s) x {algorithm.minibatches} minibatch(es) = {algorithm.updates} "
            f"optimizer step(s) of {rows} rows; {rows / ranks:g} a rank"
        )
        yield f"tokens       at most {config.rows * config.sampling.max_new_tokens} sampled a step"
    yield f"run          {config.run.steps} steps = {config.optimizer_steps} optimizer steps; " + _cadence(config)


def _cadence(config: PPOConfig | SFTConfig) -> str:
    evaluation = f"{config.eval.items} held-out items " + (
        f"every {config.eval.every} steps"
        if config.eval.every
        else "before and after"
        if config.eval.at_start
        else "after"
    )
    saving = f"every {config.save.every} steps" if config.save.every else "at the end"
    return f"evaluation: {evaluation if config.eval.items else 'none'}; checkpoint {saving}"


def _memory(config: PPOConfig | SFTConfig, size: ModelSize) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    parts = memory_gib(config, size)
    yield f"memory       about {sum(parts.values()):.2f} GiB a rank (estimate):"
    for name, gib in parts.items():
        yield f"  {name:<24} {gib:8.3f} GiB"
