"""The estimate of memory that a dry run prints: what each process holds of models, and what its largest stage adds.

It loads no weights. Sizes and passes are those of the model laid out without its weights, which needs torch, and the
lengths of the data are those that the run would train on.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from podium.errors import ConfigError
from podium.exceptions import describe_error
from podium.models import ModelConfig
from podium.models.weight_files import find_replaced_heads
from podium.rollout.engines.config import find_engines
from podium.rollout.engines.engine_lookup import engine_class
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.paths import resolve_resume
from podium.runtime import backend_class
from podium.spelling import write_count
from podium_dryrun.plan import is_accelerated

if TYPE_CHECKING:
    from torch import nn

    from podium.algorithms import AlgorithmConfig
    from podium_dryrun.pass_memory import PassMemory

__all__ = ["Amounts", "ModelSize", "Row", "column_widths", "describe_memory", "memory_gib", "model_size"]

_MIB, _GIB = 2**20, 2**30
_BFLOAT16: Final = "bfloat16"
_EXACT: Final = 4  # bytes of a float32
_BYTES: Final = {"float32": 4, _BFLOAT16: 2, "float16": 2}

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one setting
_LARGE_MATRICES: Final = 64 << 20
"""Bytes of matrices that are read from memory again for every token, since no cache of a processor holds them."""

_COLUMN_COPIES: Final = 3  # as they were drawn, in the store, and those that the update has taken from it

_log = logging.getLogger("podium")


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
        ConfigError: The model's configuration cannot be read, or ``engine.cache_gib`` is too little for the longest
            completion.
    """
    config = resolve_resume(config)
    nodes = backend_class(backend, options).expected_nodes(options or {})
    accelerated = is_accelerated(nodes)
    size, critic_model = model_size(config.model), None
    if isinstance(config, PPOConfig) and "critic" in config.roles:
        critic_model = replace(config.model, lora=None)
        if config.critic.path:
            critic_model = replace(critic_model, path=config.critic.path, config={})
    critic = None if critic_model is None else model_size(critic_model, spared=find_replaced_heads(critic_model.path))
    scorer = _nbytes(config.reward.path) if "reward" in config.roles else 0
    teacher = model_size(config.teacher_model) if isinstance(config, PPOConfig) and "teacher" in config.roles else None
    amounts = Amounts.of(config, lengths)
    if lengths and isinstance(config, PPOConfig) and not config.replays:
        _check_cache(config, size, amounts, accelerated)
    passes = {"policy": _count_pass(config, config.model, amounts, accelerated)}
    if critic_model is not None:
        passes["critic"] = _count_pass(config, critic_model, amounts, accelerated, scores=False)
    lines = _memory(config, size, critic, scorer, amounts, accelerated, teacher, passes)
    alone = len(nodes) == 1 and not accelerated
    return "\n".join(["# memory", *lines, *(_advise_fewer_ranks(config, size) if alone else ())])


def _memory(
    config: PPOConfig | SFTConfig,
    size: ModelSize,
    critic: ModelSize | None,
    scorer: int,
    amounts: Amounts,
    accelerated: bool,
    teacher: ModelSize | None,
    passes: Mapping[str, PassMemory | None],
) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    first, total = 0, 0.0
    for roles, count in config.processes:
        parts = memory_gib(
            config, size, roles, critic, scorer, amounts, accelerated=accelerated, teacher=teacher, passes=passes
        )
        where = f" each on processes {first}-{first + count - 1}" if count > 1 else f" on process {first}"
        yield f"memory       about {_amount(sum(parts.values()))}{where} (estimate):"
        yield from (f"  {name:<32} {_amount(gib):>11}" for name, gib in parts.items())
        first, total = first + count, total + count * sum(parts.values())
    if first > 1:
        yield f"memory       about {_amount(total)} on all processes"
    yield "not counted  Python and its libraries, about 0.4 GiB in each process"


def _advise_fewer_ranks(config: PPOConfig | SFTConfig, size: ModelSize) -> Iterator[str]:
    """Say where several generators on the cores of one machine are slower than one that has them all: products of few
    rows take as long as reading the matrices. docs/training.md has what was measured."""
    generators, matrices = config.placement.generators, size.matrices * _EXACT
    is_dense = config.parallel.strategy != "fsdp2" and not size.experts
    if generators < 2 or not (is_dense and _is_native(config, size) and isinstance(config, PPOConfig)):
        return
    from podium_native.products import ROW_QUANTUM  # needs torch

    if config.rows <= ROW_QUANTUM and matrices >= _LARGE_MATRICES:
        key = config.placement.key_of("generator")
        yield (
            f"fewer ranks  {write_count(generators, 'generator')} on one machine each read {_amount(matrices / _GIB)} "
            f"of matrices for every token; one generator with all cores reads them once and is faster: {key}: 1"
        )


def _amount(gib: float) -> str:
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{gib * _GIB / _MIB:,.1f} MiB"


class Row(NamedTuple):
    """A row of a micro-batch.

    Attributes:
        number: The number of its prompt. Rows of the same prompt may share it in a pass.
        prompt: Tokens before the first one with loss.
        rest: All others.
    """

    number: int
    prompt: int
    rest: int

    @property
    def inputs(self) -> int:
        """The tokens that the model reads. Nothing follows the last one."""
        return self.prompt + self.rest - 1


@dataclass(frozen=True)
class Amounts:
    """The most that a run computes and holds at the same time.

    Attributes:
        rows: Those of the largest micro-batch of the policy.
        tokens: The tokens that the model reads of it, padding included.
        passes: The number of micro-batches of a minibatch on a rank.
        sequences: Sequences that a generator decodes at the same time.
        length: Tokens of the longest of them, its prompt included.
        prompts: Tokens of the different prompts that go through a generator at the same time.
        step: Tokens of a step's rows on a rank of the policy.
    """

    rows: tuple[Row, ...]
    tokens: int
    passes: int
    sequences: int
    length: int
    prompts: int
    step: int = 0

    @classmethod
    def of(cls, config: PPOConfig | SFTConfig, lengths: Sequence[int] | None) -> Amounts:
        """Return the amounts of a run whose training data have these lengths; None where those are not known."""
        sampled, evaluated = config.sampling.max_new_tokens, config.eval.items
        generators = max(1, config.placement.generators)
        if isinstance(config, SFTConfig):
            rows, drawn = _rows_of_examples(config, lengths), evaluated
        else:
            rows, drawn = _rows_of_prompts(config, lengths), max(config.rows, evaluated)
        step = sum(row.prompt + row.rest for row in rows)
        if isinstance(config, PPOConfig):
            step *= config.algorithm.minibatches
        tokens, passes, rows = _largest_micro_batch(config, rows)
        longest = max(lengths) if lengths else config.data.max_prompt_tokens
        sequences = min(config.engine.max_sequences, -(-drawn // generators))
        prompts = -(-sequences // config.sampling.n) * longest
        if lengths:
            prompts = min(prompts, sum(heapq.nlargest(-(-drawn // generators), lengths)))
        return cls(tuple(rows), tokens, passes, sequences, longest + sampled, prompts, step)


def _rows_of_prompts(config: PPOConfig, lengths: Sequence[int] | None) -> list[Row]:
    """Return the rows of the longest prompts of a minibatch on a rank."""
    ranks, sampled, n = config.placement.ranks_of("policy"), config.sampling.max_new_tokens, config.sampling.n
    count = -(-config.rows // (config.algorithm.minibatches * ranks))
    prompts = -(-count // n)
    longest = heapq.nlargest(prompts, lengths) if lengths else [config.data.max_prompt_tokens] * prompts
    return [Row(number, length, sampled) for number, length in enumerate(longest) for _ in range(n)][:count]


def _rows_of_examples(config: SFTConfig, lengths: Sequence[int] | None) -> list[Row]:
    """Return the longest examples of a step on a rank. Which of their tokens have loss is not known: all count."""
    count = -(-config.batch.examples // config.placement.ranks_of("policy"))
    most = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    longest = heapq.nlargest(count, lengths) if lengths else [most] * count
    return [Row(number, 1, max(1, length - 1)) for number, length in enumerate(longest)]


def _largest_micro_batch(config: PPOConfig | SFTConfig, rows: Sequence[Row]) -> tuple[int, int, list[Row]]:
    """Return the tokens of the micro-batch that has the most, the number of micro-batches that :func:`.cut` makes, and
    the rows of the first."""
    from podium.training.micro_batches import plan, plan_shared, shares_enough  # needs torch

    most = config.parallel.counted_tokens
    packed = config.parallel.batching == "packed"
    prompts = {row.number: row.prompt for row in rows}
    numbers = {number: index for index, number in enumerate(prompts)}
    lengths = [row.inputs for row in rows]
    noisy = config.model.lora is not None and config.model.lora.dropout > 0
    spared = sum(row.prompt for row in rows) - sum(prompts.values())
    if config.parallel.batching == "auto" and not noisy and shares_enough(spared, sum(lengths)):
        group, rests = [numbers[row.number] for row in rows], [row.rest - 1 for row in rows]
        plans = plan_shared([*prompts.values()], rests, group, most)
        sizes = [sum({group[row]: rows[row].prompt for row in part}.values()) + sum(rests[row] for row in part)
                 for part in plans]  # fmt: skip
    else:
        plans = plan(lengths, most, packed=packed)
        sizes = [sum(lengths[row] for row in part) if packed else len(part) * lengths[part[0]] for part in plans]
    tokens = max(sizes)
    return tokens, len(plans), [rows[row] for row in plans[sizes.index(tokens)]]


def _count_pass(
    config: PPOConfig | SFTConfig, model: ModelConfig, amounts: Amounts, accelerated: bool, *, scores: bool = True
) -> PassMemory | None:
    """Count the memory of a pass over the largest micro-batch; None where the model cannot be tried without values."""
    import torch

    from podium.data import Batch, Jagged, fields
    from podium.devices import LEAST_RETURNED, compute_dtype
    from podium.processes import LARGEST_KEPT
    from podium.training.micro_batches import cut
    from podium_dryrun.pass_memory import count_pass

    tokens = Jagged.from_rows([torch.arange(row.prompt + row.rest) + row.number for row in amounts.rows])
    mask = torch.cat([torch.arange(row.prompt + row.rest) >= row.prompt for row in amounts.rows])
    batch = Batch({fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(mask)})
    parallel = config.parallel
    share, packed = parallel.batching == "auto", parallel.batching == "packed"
    (micro,) = cut(batch, 10**9, packed=packed, share=share)
    wish = "bfloat16" if accelerated and parallel.choice.compute == "auto" else parallel.choice.compute
    shards = parallel.strategy == "fsdp2"
    kept_bytes = 0 if accelerated else LEAST_RETURNED if shards else LARGEST_KEPT
    algorithm = config.algorithm.resolve() if scores and isinstance(config, PPOConfig) else None
    try:
        precision = compute_dtype(torch.device("cpu"), wish)
        options: dict[str, Any] = {"scores": scores, "keeps_gradients": not shards, "algorithm": algorithm}
        outline = _lay_out_trained(model, algorithm, spared=find_replaced_heads(model.path) if not scores else ())
        return count_pass(outline, micro, precision, kept_bytes=kept_bytes, **options)
    except Exception as error:  # noqa: BLE001 - whatever an architecture raises whose path depends on values
        _log.debug("the pass of %s is estimated, not counted: %s", model.path, describe_error(error))
        return None


def _lay_out_trained(model: ModelConfig, algorithm: AlgorithmConfig | None, *, spared: Sequence[str]) -> nn.Module:
    """The model on meta, with all that training adds to it."""
    import torch

    from podium.models.adapters import with_adapters
    from podium.models.loading import checkpoint_layers, lay_out, plain_model
    from podium.models.value_head import add_value_head, find_value_head

    outline: Any = lay_out(model, spared=spared)
    if model.gradient_checkpointing:
        checkpoint_layers(outline)
    if model.lora is not None:
        with torch.device("meta"):
            outline = with_adapters(outline, model.lora, model.seed)
    if algorithm is not None and algorithm.has_value_head:
        add_value_head(plain_model(outline))
        head: Any = find_value_head(outline)
        head.to("meta")
    return outline


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
    passes: Mapping[str, PassMemory | None] | None = None,
) -> dict[str, float]:
    """Estimate the memory in GiB of one worker process that holds ``roles``, by its uses.

    These are what the process holds all the time, and what the stage adds that adds most: a pass of the update, the
    generation, or the copy that is made for a checkpoint.

    ``size`` is that of the policy's model, and of the critic's and the teacher's unless they are given; ``scorer`` is
    the reward model's in bytes; ``amounts`` are the most tokens and sequences, by default those that settings allow;
    ``accelerated`` says that the process has an accelerator; ``passes`` has what was counted, by role. Without it, and
    for models that are not counted, activations are rough.
    """
    amounts, passes = amounts or Amounts.of(config, None), passes or {}
    ranks = config.placement.ranks_of(next(iter(roles)))
    shards = ranks if config.parallel.strategy == "fsdp2" else 1
    width, lora = _BYTES[config.model.dtype], config.model.lora is not None
    lasting, copied, gradients = dict[str, float](), 0.0, dict[str, dict[str, float]]()
    stages: list[tuple[str, dict[str, float]]] = [("", {})]
    if "policy" in roles:
        learner = _learner(config, size, lora=lora)
        base = size.parameters * width if lora else 0  # frozen, and in no checkpoint
        lasting["weights"] = (learner.weights + base) / shards
        lasting["optimizer (AdamW)"] = learner.moments / shards
        if learner.masters:
            lasting["float32 copies"] = learner.masters / shards
        gradients["policy"] = {"gradients": learner.gradients / shards}
        copied += learner.weights + learner.moments + learner.masters
        stages.append(("policy", _update(config, size, passes.get("policy"), amounts, shards, "", scores=True)))
    if "critic" in roles:
        critic_size = critic or size
        learner = _learner(config, critic_size, lora=False)
        state = learner.weights + learner.moments + learner.masters
        lasting["critic with optimizer"] = state / shards
        gradients["critic"] = {"critic's gradients": learner.gradients / shards}
        copied += state
        update = _update(config, critic_size, passes.get("critic"), amounts, shards, "critic's ", scores=False)
        stages.append(("critic", update))
    if "reference" in roles and not lora:
        lasting["reference weights"] = size.parameters * width / shards
    if "teacher" in roles:
        lasting["teacher weights"] = (teacher or size).parameters * width / shards
    if "reward" in roles:
        lasting["reward model"] = scorer
    if "generator" in roles:
        dtype = config.resolved_engine.dtype or (_BFLOAT16 if accelerated else config.model.dtype)
        if not ("policy" in roles and shards == 1 and not lora and dtype == config.model.dtype):
            lasting["generator's own weights"] = size.parameters * _BYTES[dtype]
        base = lora and "policy" not in roles and not accelerated  # in host memory; accelerators have their own
        lasting |= {"base of the adapters": size.parameters * width} if base else {}
        lasting |= _cache(config, size, amounts, dtype, accelerated)
        lasting |= _packed(config, size) if not accelerated and dtype == "float32" else {}
        stages.append(("generator", _generation(config, size, amounts, dtype, lasting["key/value cache"])))
    lasting |= _columns(config, size, amounts, roles)
    if copied:
        stages.append(("", {"copy for a checkpoint": copied / ranks}))
    largest = _find_largest(config, stages, gradients, amounts)
    return {name: nbytes / _GIB for name, nbytes in (lasting | largest).items()}


def _find_largest(
    config: PPOConfig | SFTConfig,
    stages: Sequence[tuple[str, dict[str, float]]],
    gradients: Mapping[str, dict[str, float]],
    amounts: Amounts,
) -> dict[str, float]:
    """The stage that adds most, each with its role, and the gradients that are there meanwhile."""
    # A sharded learner lets go of its gradients before a step, and each arises when activations go.
    absent = config.parallel.strategy == "fsdp2" and amounts.passes == 1
    present = (
        {role: part for role, part in gradients.items() if not (absent and role == owner)} for owner, _ in stages
    )
    sums = [
        {name: nbytes for part in (*parts.values(), stage) for name, nbytes in part.items()}
        for parts, (_, stage) in zip(present, stages, strict=True)
    ]
    return max(sums, key=lambda stage: sum(stage.values()))


class _Learner(NamedTuple):
    """Bytes of what a learner trains, over all shards."""

    weights: float
    moments: float
    masters: float
    gradients: float


def _learner(config: PPOConfig | SFTConfig, size: ModelSize, *, lora: bool) -> _Learner:
    """Sizes of a model that is trained whole, or of its adapters, which are float32 in any case."""
    trained = size.trained if lora else size.parameters
    width = _EXACT if lora else _BYTES[config.model.dtype]
    masters = _EXACT if width < _EXACT and config.optim.master_weights else 0
    return _Learner(trained * width, 2 * trained * _EXACT, trained * masters, trained * _EXACT)


def _columns(
    config: PPOConfig | SFTConfig, size: ModelSize, amounts: Amounts, roles: Collection[str]
) -> dict[str, float]:
    """The columns of a step's batch in which a token has several numbers: log-probabilities of probable ids, ids that
    were kept, and experts that were chosen."""
    if not isinstance(config, PPOConfig) or {"policy", "generator"}.isdisjoint(roles):
        return {}
    algorithm = config.algorithm
    nbytes = _EXACT * sum(column_widths(algorithm).values()) + 8 * min(config.sampling.top_k, size.vocabulary)
    if algorithm.router_replay != "none":
        nbytes += 2 * size.choices
    return {"columns of several numbers": _COLUMN_COPIES * amounts.step * nbytes} if nbytes else {}


def _update(
    config: PPOConfig | SFTConfig,
    size: ModelSize,
    counted: PassMemory | None,
    amounts: Amounts,
    shards: int,
    owner: str,
    *,
    scores: bool,
) -> dict[str, float]:
    """What a pass over a micro-batch adds."""
    stage: dict[str, float]
    if counted is not None:
        stage = {f"{owner}activations": counted.activations, f"{owner}temporary tensors": counted.working}
    else:
        stage = {f"{owner}activations (rough)": _rough_activations(config, size, amounts.tokens, scores=scores)}
    if (
        scores and isinstance(config, PPOConfig) and config.algorithm.router_balance
    ):  # logits and probabilities of each layer's router, and a gradient
        stage["routers' logits"] = 3 * amounts.tokens * size.layers * size.experts * _EXACT
    if shards > 1:  # what is in no layer is there as a whole, and so are the layer that computes and the next one
        stage[f"{owner}gathered shards"] = (size.outside + 2 * size.layer) * _BYTES[config.model.dtype]
    return stage


def _rough_activations(config: PPOConfig | SFTConfig, size: ModelSize, tokens: int, *, scores: bool) -> float:
    """What a backward pass needs of layers of the Llama kind. Beside it stand three tensors of logits, and the gradient
    of the output layer."""
    from podium.training.micro_batch_size import activation_numbers
    from podium.training.output_layer import logits_at_once  # needs torch

    widths = {"query_width": size.query_width, "key_value_width": size.key_value_width}
    layer = activation_numbers(hidden=size.hidden, inner=size.inner, **widths)
    layers = tokens * size.layers * layer
    if config.model.gradient_checkpointing:
        layers = tokens * (size.layers * size.hidden + layer)
    logits = 3 * logits_at_once(tokens, size.vocabulary) + size.vocabulary * size.hidden if scores else 0
    return (layers + logits) * _EXACT


def _cache(
    config: PPOConfig | SFTConfig, size: ModelSize, amounts: Amounts, dtype: str, accelerated: bool
) -> dict[str, float]:
    """The generator's keys and values. The native engine has lanes in multiples of 16, of a multiple of 32 positions,
    and in float32 on a CPU."""
    if _is_native(config, size):
        cache = _count_lanes(size, amounts.sequences, amounts.length, _BYTES[dtype] if accelerated else _EXACT)
    else:
        cache = amounts.sequences * amounts.length * size.layers * 2 * size.key_value_width * _BYTES[dtype]
    most = config.engine.cache_gib
    return {"key/value cache": cache if most is None else min(cache, most * _GIB)}


def _count_lanes(size: ModelSize, sequences: int, length: int, width: int) -> int:
    """The bytes of the native engine's lanes for so many sequences of this length, with numbers of ``width`` bytes."""
    from podium_native.cache import LENGTH_QUANTUM, round_up  # needs torch

    return round_up(sequences) * round_up(length, LENGTH_QUANTUM) * size.layers * 2 * size.key_value_width * width


def _check_cache(config: PPOConfig, size: ModelSize, amounts: Amounts, accelerated: bool) -> None:
    """Check that the native engine, which would refuse a prompt, can decode the longest one of the training data.

    Raises:
        ConfigError: Its least number of lanes does not fit into ``engine.cache_gib``.
    """
    gib = config.engine.cache_gib
    if gib is None or not _is_native(config, size):
        return
    dtype = config.resolved_engine.dtype or _BFLOAT16
    least = _count_lanes(size, 1, amounts.length, _BYTES[dtype] if accelerated else _EXACT) / _GIB
    if least > gib:
        raise ConfigError(
            f"engine.cache_gib = {gib:g} is too little for the longest prompt of the training data: the engine needs "
            f"{_amount(least)} for completions of {amounts.length:,} tokens, the prompt included; raise "
            "engine.cache_gib, or lower sampling.max_new_tokens or data.max_prompt_tokens"
        )


def _packed(config: PPOConfig | SFTConfig, size: ModelSize) -> dict[str, float]:
    """The native engine's matrices for at most 16 rows, which it keeps until the weights change."""
    if size.experts or not _is_native(config, size):
        return {}
    from podium_native.packing import most_packed_bytes  # needs torch

    packed = most_packed_bytes(size.matrices * _EXACT, config.sampling.max_new_tokens)
    return {"packed matrices": packed} if packed else {}


def _is_native(config: PPOConfig | SFTConfig, size: ModelSize) -> bool:
    return size.native and config.engine.name in ("auto", "native")


def _generation(
    config: PPOConfig | SFTConfig, size: ModelSize, amounts: Amounts, dtype: str, cache: float
) -> dict[str, float]:
    """What generation adds: keys and values of the prompts of a pass before they have lanes, logits and probabilities
    of each sequence, and half of the cache, beside which the native engine makes a longer one for long completions."""
    from podium.rollout.engines.config import PREFILL_TOKENS

    prompts = min(amounts.prompts, int(config.engine.options.get("prefill_tokens", PREFILL_TOKENS)))
    stage: dict[str, float] = {
        "prompts' keys and values": prompts * size.layers * 2 * size.key_value_width * _BYTES[dtype],
        "logits and probabilities": 2 * amounts.sequences * size.vocabulary * _EXACT,
    }
    if size.native:
        from podium_native.engine import FIRST_ANSWER  # needs torch

        if config.sampling.max_new_tokens > FIRST_ANSWER:
            stage["shorter cache, while it grows"] = cache / 2
    return stage


@dataclass(frozen=True)
class ModelSize:
    """The numbers that the memory of a model follows from.

    Attributes:
        outside: Parameters that belong to no layer, such as the embedding.
        layer: Parameters of the largest layer.
        native: Whether the engine native is installed and generates from the model.
        experts: The experts of a layer, if it is a mixture of experts.
        choices: The experts that all layers choose for a token.
    """

    parameters: int
    trained: int
    layers: int
    hidden: int
    key_value_width: int
    vocabulary: int
    query_width: int = 0
    inner: int = 0
    outside: int = 0
    layer: int = 0
    native: bool = False
    experts: int = 0
    choices: int = 0

    @property
    def matrices(self) -> int:
        """The parameters that are read for each token: all but the embedding, which one row is read of."""
        return self.parameters - self.outside + self.vocabulary * self.hidden


def model_size(model: ModelConfig, *, spared: Sequence[str] = ()) -> ModelSize:
    """Return the sizes of a model, which is laid out on torch's meta device, without weights.

    Args:
        spared: Patterns of names of tensors that need not fit, beside ``model.allow_tensors``.

    Raises:
        ConfigError: The model's configuration cannot be read, or its files have other tensors.
    """
    import torch

    from podium.models.adapters import with_adapters
    from podium.models.loading import decoder_layers, lay_out

    outline = lay_out(model, spared=spared)
    settings: Any = outline.config.get_text_config()
    heads = getattr(settings, "num_attention_heads", 0)  # some models have states in place of attention
    shared = getattr(settings, "num_key_value_heads", None) or heads
    head_width = getattr(settings, "head_dim", None) or settings.hidden_size // max(1, heads)
    parameters = trained = sum(p.numel() for p in outline.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(outline)]
    native = "native" in find_engines() and engine_class("native").supports(outline) is None
    if model.lora is not None:
        with torch.device("meta"):
            adapted = with_adapters(outline, model.lora, model.seed)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    every = next((n for name in _EXPERTS if (n := getattr(settings, name, None))), 0)
    experts = getattr(settings, "num_experts_per_tok", None) or 1
    inner = getattr(settings, "moe_intermediate_size", None) or getattr(settings, "intermediate_size", 0)
    return ModelSize(
        parameters=parameters,
        trained=trained,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        key_value_width=shared * head_width,
        vocabulary=settings.vocab_size,
        query_width=heads * head_width,
        inner=experts * inner,
        outside=parameters - sum(layers),
        layer=max(layers, default=0),
        native=native,
        experts=every,
        choices=settings.num_hidden_layers * experts * bool(every),
    )


def column_widths(algorithm: AlgorithmConfig) -> Mapping[str, int]:
    """Return the float32 numbers that a token has in each column of a batch that has several a token: log-probabilities
    of the most probable ids, and these ids."""
    teacher = algorithm.teacher.teacher_top_k if algorithm.needs_teacher else 0
    widths = {"teacher_top": 2 * teacher, "rollout_top": 2 * algorithm.score_centering}
    return {name: width for name, width in widths.items() if width}
