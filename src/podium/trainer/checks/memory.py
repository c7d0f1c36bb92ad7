"""The estimate of memory that a dry run prints: what each process holds of models, and what a step adds.

It loads no weights. The size of a model needs torch, and the lengths of the data are those that the run would train on.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from podium.models import ModelConfig
from podium.models.weight_files import find_replaced_heads
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.paths import resolve_resume
from podium.runtime import backend_class
from podium.trainer.checks.plan import is_accelerated

__all__ = ["Amounts", "ModelSize", "describe_memory", "memory_gib", "model_size"]

_MIB, _GIB = 2**20, 2**30
_BFLOAT16: Final = "bfloat16"
_BYTES: Final = {"float32": 4, _BFLOAT16: 2, "float16": 2}


def _nbytes(path: str) -> int:
    """Return the size of a reward model in bytes."""
    from podium.models.loading import load_scorer

    return sum(parameter.nbytes for parameter in load_scorer(path, "meta").parameters())


def describe_memory(
    config: PPOConfig | SFTConfig,
    backend: str,
    options: Mapping[str, Any] | None = None,
    lengths: Sequence[int] | None = None,
) -> str:
    """Return an estimate of the memory that each kind of process takes, as text.

    ``backend`` and ``options`` are those of :func:`podium.connect`. ``lengths`` are the tokens of each prompt of the
    training data, or of each example with its answer; without them, of sessions, they count as the longest allowed.

    Raises:
        ConfigError: The model's configuration cannot be read.
    """
    config = resolve_resume(config)
    accelerated = is_accelerated(backend_class(backend, options).expected_nodes(options or {}))
    size = critic = model_size(config.model)
    if isinstance(config, PPOConfig) and config.has_critic and config.critic.path:
        critic_model = replace(config.model, path=config.critic.path, config={}, lora=None)
        critic = model_size(critic_model, spared=find_replaced_heads(critic_model.path))
    scorer = _nbytes(config.reward.path) if "reward" in config.roles else 0
    teacher = model_size(config.teacher_model) if isinstance(config, PPOConfig) and "teacher" in config.roles else None
    amounts = Amounts.of(config, lengths)
    return "\n".join(["# memory", *_memory(config, size, critic, scorer, amounts, accelerated, teacher)])


def _memory(
    config: PPOConfig | SFTConfig,
    size: ModelSize,
    critic: ModelSize,
    scorer: int,
    amounts: Amounts,
    accelerated: bool,
    teacher: ModelSize | None,
) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    first, total = 0, 0.0
    for roles, count in config.processes:
        parts = memory_gib(config, size, roles, critic, scorer, amounts, accelerated=accelerated, teacher=teacher)
        where = f" each on processes {first}-{first + count - 1}" if count > 1 else f" on process {first}"
        yield f"memory       about {_amount(sum(parts.values()))}{where} (estimate):"
        yield from (f"  {name:<24} {_amount(gib):>11}" for name, gib in parts.items())
        first, total = first + count, total + count * sum(parts.values())
    if first > 1:
        yield f"memory       about {_amount(total)} on all processes"


def _amount(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib * _GIB / _MIB:,.1f} MiB"


@dataclass(frozen=True)
class Amounts:
    """The most that a run computes and holds at the same time.

    Attributes:
        tokens: Tokens of a micro-batch of the policy.
        sequences: Sequences that a generator decodes at the same time.
        length: Tokens of the longest of them, its prompt included.
    """

    tokens: int
    sequences: int
    length: int

    @classmethod
    def of(cls, config: PPOConfig | SFTConfig, lengths: Sequence[int] | None) -> Amounts:
        """Return the amounts of a run whose training data have these lengths; None where those are not known."""
        ranks, sampled = config.placement.ranks_of("policy"), config.sampling.max_new_tokens
        sequences, most = config.engine.max_sequences, config.parallel.micro_batch_tokens
        if not lengths:
            return cls(most, sequences, config.data.max_prompt_tokens + sampled)
        longest, rows = max(lengths), config.eval.items
        if isinstance(config, SFTConfig):
            row, tokens = longest, sum(heapq.nlargest(-(-config.batch.examples // ranks), lengths))
        else:
            row, learned = longest + sampled, -(-config.rows // (config.algorithm.minibatches * ranks))
            prompts = heapq.nlargest(-(-learned // config.sampling.n), lengths)
            tokens, rows = sum(prompts) * config.sampling.n + learned * sampled, max(config.rows, rows)
        generators = max(1, config.placement.generators)
        return cls(min(tokens, max(most, row)), min(sequences, -(-rows // generators)), longest + sampled)


def memory_gib(
    config: PPOConfig | SFTConfig,
    size: ModelSize,
    roles: Collection[str],
    critic: ModelSize | None = None,
    scorer: int = 0,
    amounts: Amounts | None = None,
    *,
    accelerated: bool = False,
    teacher: ModelSize | None = None,
) -> dict[str, float]:
    """Estimate the memory in GiB of one worker process that holds ``roles``, by its uses.

    ``size`` is that of the policy's model, and of the critic's and the teacher's unless they are given; ``scorer`` is
    the reward model's in bytes; ``amounts`` are the most tokens and sequences, by default those that settings allow;
    ``accelerated`` says that the process has an accelerator. Activations are rough: 16 hidden vectors for each token
    and layer (one with gradient checkpointing), and three copies of the logits that exist at once.
    """
    from podium.training.output_layer import logits_at_once  # needs torch

    width, exact = _BYTES[config.model.dtype], _BYTES["float32"]
    copies = exact if width < exact and config.optim.master_weights else 0  # adapters are float32 in any case
    shards = config.placement.ranks_of(next(iter(roles))) if config.parallel.strategy == "fsdp2" else 1
    kept = 1 if config.model.gradient_checkpointing else 16
    amounts = amounts or Amounts.of(config, None)
    tokens = amounts.tokens
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
    if "teacher" in roles:
        parts["teacher weights"] = (teacher or size).parameters * width / shards
    if "reward" in roles:
        parts["reward model"] = scorer
    if "generator" in roles:
        dtype = config.resolved_engine.dtype or (_BFLOAT16 if accelerated else config.model.dtype)
        shared = "policy" in roles and shards == 1 and config.model.lora is None and dtype == config.model.dtype
        if not shared:
            parts["generator's own weights"] = size.parameters * _BYTES[dtype]
        if config.model.lora is not None and "policy" not in roles and not accelerated:
            parts["base of the adapters"] = size.parameters * width  # in host memory, where accelerators have their own
        cached = amounts.sequences * amounts.length
        cache = cached * size.layers * 2 * size.key_value_width * _BYTES[dtype]
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
