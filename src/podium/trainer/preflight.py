"""Checks before a run starts, and the plan that a dry run prints. Neither starts a worker or loads weights.

Only what needs a model or a tokenizer imports torch, where it needs it. A wrong setting is answered without torch.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from podium.algorithms import check_functions
from podium.config import config_to_yaml
from podium.errors import ConfigError, DataError
from podium.functions import load_function
from podium.rewards import NAMED_REWARDS, READS_ANSWER, RewardConfig, RewardFn, resolve_reward
from podium.rewards.text import answer_of
from podium.rollout.engines import check_engine
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig, Example, check_data
from podium.runtime import Bound, Capabilities, Node, backend_class
from podium.telemetry import Note, emit
from podium.trainer.config import SCHEDULES, PPOConfig, SFTConfig
from podium.trainer.run_path import resolve_resume
from podium.workers import ModelConfig
from podium.workers.weight_files import replaced_heads, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.trainer.roles import RoleWorkers
    from podium.trainer.schedules import Schedule

__all__ = [
    "ModelSize",
    "accelerators_each",
    "check_answers",
    "check_columns",
    "check_examples",
    "check_given",
    "check_lengths",
    "check_placement",
    "check_reward",
    "check_settings",
    "check_tokens",
    "describe_plan",
    "load_schedule",
    "memory_gib",
    "model_size",
    "names_of_given",
    "with_stop_tokens",
]

_NO_SCHEDULES: Final = {
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isgeneratorfunction: "a generator function",
    inspect.isasyncgenfunction: "an asynchronous generator function",
    inspect.isclass: "a class",
}
_WITHOUT_COLLECTIVES: Final = frozenset({"generator", "reward", "estimator"})
_REWARD, _REWARD_NAME = "reward", "reward.name"
_MIB, _GIB = 2**20, 2**30
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


# -- settings, against what is installed and what this machine has ---------------------------------------------------


def check_settings(config: PPOConfig | SFTConfig, *, reward: bool = True) -> None:
    """Check that the files, functions and packages that ``config`` names are there.

    A reward that is named by its module is not loaded: the run imports it in a process of its own. ``reward`` is False
    where a script gives a function in its place.

    Raises:
        ConfigError: A function, a package or a model's directory is missing, or a file of its weights cannot be read.
            The message says what to do.
        DataError: A file of the data is missing.
    """
    if config.run.resume:
        _refuse_code_of(Path(config.run.resume), config)
    check_data(config.data)
    name = config.reward.name
    if reward and name not in NAMED_REWARDS and (":" not in name or name.rpartition(":")[0].endswith(".py")):
        resolve_reward(name)
    check_reward(config.reward, given=not reward)
    load_schedule(config.run.schedule)
    check_engine(config.engine)
    for tracker in config.run.trackers:
        if find_spec(tracker) is None:
            raise ConfigError(f"run.trackers names {tracker}, which is not installed: pip install 'podium[trackers]'")
    paths = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    paths["reward.path"] = config.reward.path
    if isinstance(config, PPOConfig):
        check_functions(config.algorithm)
        config.check_roles(load=True)
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        if path.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
            raise ConfigError(f"{key} = {path!r}: there is no such directory")
        if path and key != "model.tokenizer":
            stored_tensors(path, key)


def _refuse_code_of(run: Path, config: PPOConfig | SFTConfig) -> None:
    """Refuse functions in files of the run: a user who resumes the run of a stranger takes only data from there.
    Refuse those of Python's own library too, such as ``builtins:exec``, which runs as code what it should grade."""
    names = {"reward.name": config.reward.name, "run.schedule": config.run.schedule}
    if isinstance(config, PPOConfig):
        names |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
    for key, name in names.items():
        file = _file_of(name.rpartition(":")[0])
        path = Path(file).expanduser().resolve()
        own = path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts
        if own or file in ("built-in", "frozen"):
            raise ConfigError(
                f"{key} = {name!r} is a function of Python's own library, which runs as no part of a run that is "
                f"resumed: give another one with --{key}"
            )
        if file and path.is_relative_to(run.resolve()):
            raise ConfigError(
                f"{key} = {name!r} is code in the directory of the run that is resumed, and nothing there is run as "
                f"code: read {file}, move it elsewhere, and give its new place with --{key}"
            )


def _file_of(place: str) -> str:
    """The file that ``place`` of a function is, or that holds the module or package; "" for one that is not found."""
    if not place or place.endswith(".py"):
        return place
    try:
        spec = find_spec(place.partition(".")[0])
    except ValueError:  # a module without a specification, such as __main__
        return ""
    return "" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def check_reward(reward: RewardConfig, *, given: bool) -> None:
    """Check that the reward reads the score of the reward model, where there is one. ``given`` is True where a script
    gives a function in place of ``reward.name``.

    Raises:
        ConfigError: The reward model would be of no use, or is missing.
    """
    if reward.path and not given and reward.name in NAMED_REWARDS and reward.name != "model":
        raise ConfigError(
            f"reward.path = {reward.path!r} with reward.name = {reward.name!r}, which does not read the model's score: "
            "set reward.name to model, or to a function of your own that reads row['model_score']"
        )
    if reward.name == "model" and not given and not reward.path:
        raise ConfigError("reward.name = 'model' is the score of a reward model: set reward.path to one")


def load_schedule(name: str) -> Schedule:
    """Return the schedule that ``run.schedule`` names: ``sync``, ``module:function`` or ``path/file.py:function``.

    Raises:
        ConfigError: There is no such function, and the message has the nearest name that exists; or the name is not
            that of a plain function that can be called with one argument.
    """
    found = load_function(name, key="run.schedule", known=SCHEDULES)
    subject = f"run.schedule = {name!r}: {name.rpartition(':')[2]!r}"
    for is_kind, kind in _NO_SCHEDULES.items():
        if is_kind(found):
            raise ConfigError(f"{subject} is {kind}; write a plain function")
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        raise ConfigError(f"{subject} must take exactly one argument, the steps") from None
    return found


def check_placement(config: PPOConfig | SFTConfig, backend: str, can: Capabilities, nodes: Sequence[Node] = ()) -> None:
    """Check that a backend called ``backend`` can hold the worker processes, on ``nodes`` as far as they are known.

    Raises:
        ConfigError: The backend has no collectives over several ranks, or its nodes have too few cores.
    """
    placement, processes = config.placement, sum(count for _, count in config.processes)
    for roles, ranks in config.processes:
        if ranks > 1 and not can.collectives and not {*roles} <= _WITHOUT_COLLECTIVES:
            raise ConfigError(
                f"{placement.key_of(roles[0])} = {ranks}: {backend} has no collectives over several ranks; set it to "
                "1, or use the backend local"
            )
    cores = [int(node.resources.get("cpu", 0)) for node in nodes]
    if nodes and placement.cpus and sum(count // placement.cpus for count in cores) < processes:
        raise ConfigError(
            f"placement.cpus = {placement.cpus}: {processes} worker process(es) of so many cores do not fit "
            f"into {' + '.join(map(str, cores))} cores; lower it, or leave it out for an equal share"
        )


def accelerators_each(nodes: Sequence[Node], processes: int) -> int:
    """Accelerators of each worker process: 1 if ``nodes`` have enough for all of them, else 0."""
    return int(sum(node.resources.get("gpu", 0) for node in nodes) >= processes)


# -- data, model and functions, once they are loaded -----------------------------------------------------------------


def check_lengths(model: ModelConfig, max_new_tokens: int, what: str, longest: int) -> None:
    """Check that a completion and the longest of the ``what`` prompts, in tokens, fit into the model's positions.

    Raises:
        ConfigError: They do not fit. The message names the settings that would make them fit.
    """
    from podium.workers.models import longest_text

    most = longest_text(model, generated=True)
    if most is not None and longest + max_new_tokens > most:
        room = most - max_new_tokens
        longer = longest_text(model) != most
        why = ", beyond which longrope rotates the whole text anew, also what was generated before" if longer else ""
        shorter = f", or data.max_prompt_tokens to {room} (data.overlong says what becomes of longer ones)"
        raise ConfigError(
            f"the longest {what} prompt has {longest} tokens, which with sampling.max_new_tokens = {max_new_tokens} is "
            f"more than the model's {most} positions{why}: lower sampling.max_new_tokens"
            + (shorter if room > 0 else "")
        )


def check_tokens(model: ModelConfig, what: str, largest: int) -> None:
    """Check that the model knows the tokens of the ``what`` data, of which ``largest`` is the largest.

    Raises:
        ConfigError: It does not.
    """
    from podium.workers.models import vocabulary_size

    if largest >= (known := vocabulary_size(model)):
        raise ConfigError(
            f"the {what} data have the token {largest}, and the model has a vocabulary of {known} tokens: the "
            "tokenizer is not the model's own; set model.tokenizer"
        )


def check_examples(model: ModelConfig, lengths: Sequence[int]) -> None:
    """Check that each example, whose prompt and answer have a length in tokens, fits into the model's positions.

    Raises:
        ConfigError: One does not fit. The message says how many do not.
    """
    from podium.workers.models import longest_text

    most = longest_text(model)
    if most is not None and (beyond := sum(length > most for length in lengths)):
        raise ConfigError(
            f"{beyond} of the {len(lengths)} training examples are longer than the model's {most} positions; the "
            f"longest has {max(lengths)} tokens, its answer included: take them out of the data, shorten their "
            "answers, or lower data.max_prompt_tokens (data.overlong says what becomes of longer prompts)"
        )


def check_answers(examples: Iterable[Example], reward: RewardConfig) -> None:
    """Check that every example has an answer which the reward can read, if the reward is one of Podium's that read it.

    A note says how many answers are empty.

    Raises:
        DataError: An example has no answer, or one that is neither text nor messages, and such rewards end the run.
    """
    if reward.name not in READS_ANSWER or reward.on_error == "score":
        return
    count = empty = 0
    for example in examples:
        try:
            count, empty = count + 1, empty + (not answer_of(example.row).strip())
        except ValueError as error:
            raise DataError(f"reward.name = {reward.name!r}, prompt {str(example.prompt)[:60]!r}: {error}") from None
    if empty:
        emit(Note(f"{empty} of {count} answers are empty: the reward {reward.name!r} compares with nothing there"))


def check_columns(examples: Iterable[Example], columns: Iterable[str], advantage: str) -> None:
    """Check that every example has the ``columns`` of the data that the advantage estimator declares.

    Raises:
        ConfigError: An example lacks a column. The message names the columns that it has.
    """
    for row in (example.row for example in examples):
        if missing := [name for name in columns if name not in row]:
            raise ConfigError(
                f"algorithm.advantage = {advantage!r} reads the column {missing[0]!r} of the data, and a training "
                f"prompt has {', '.join(row)}"
            )


def with_stop_tokens(
    sampling: SamplingParams, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> SamplingParams:
    """Return ``sampling`` with stop tokens. A note says so where there are none.

    Where the configuration names none, they are those of the tokenizer, of the model's own generation_config.json, and
    the token with which the chat template ends a turn.
    """
    if sampling.stop_token_ids:
        return sampling
    from transformers import GenerationConfig

    from podium.rollout.tasks import end_of_turn

    own = None
    if model.path:
        try:
            own = GenerationConfig.from_pretrained(model.path).eos_token_id
            if not all(isinstance(one, int) for one in (own if isinstance(own, list) else [own or 0])):
                raise TypeError(f"eos_token_id = {own!r}")
        except OSError:  # a model need not have the file
            pass
        except Exception as error:
            raise ConfigError(f"{model.path}: its generation_config.json cannot be read: {error}") from error
    found: list[int] = []
    for ids in (tokenizer.eos_token_id, own, end_of_turn(tokenizer, data)):
        found += [ids] if isinstance(ids, int) else cast("list[int]", ids or [])
    if not found:
        emit(
            Note(
                "the tokenizer has no end-of-sequence token, so every completion has sampling.max_new_tokens = "
                f"{sampling.max_new_tokens} tokens: set eos_token in the tokenizer, or sampling.stop_token_ids"
            )
        )
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(found)))


def names_of_given(reward: RewardFn | None, reward_name: str, workers: RoleWorkers | None) -> dict[str, str]:
    """Return names of the functions and classes that a script gives a run beside its configuration, by role.

    A configuration file cannot hold them, so a resume from it would go on with others and say nothing. Each checkpoint
    keeps their names instead. "reward" is the function, "reward.name" the configured name that it replaced.
    """
    given = {
        "reward model" if role == _REWARD else role: _name(worker.cls if isinstance(worker, Bound) else worker)
        for role, worker in (workers or {}).items()
    }
    return given if reward is None else {**given, _REWARD: _name(reward), _REWARD_NAME: reward_name}


def check_given(before: Mapping[str, str], now: Mapping[str, str], reward_name: str) -> None:
    """Check that a resumed run is given what a script gave the run ``before``.

    Raises:
        ConfigError: A role's class is missing; or the reward function is, and ``reward.name`` is the one from before.
    """
    missing = [name for name in before if name not in now and name not in (_REWARD, _REWARD_NAME)]
    if _REWARD in before and _REWARD not in now and before.get(_REWARD_NAME) == reward_name:
        missing.append(_REWARD)
    if missing:
        what = ", ".join(f"{name} ({before[name]})" for name in missing)
        remedy = ", or name a reward with reward.name" if missing == [_REWARD] else ""
        raise ConfigError(
            f"this run was given its own {what} from Python, which its config.yaml cannot hold: resume it from the "
            f"script that gave it, with run.resume{remedy}"
        )


def _name(given: object) -> str:
    return f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', type(given).__name__)}"


# -- the plan of a dry run -------------------------------------------------------------------------------------------


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
        own = replace(config.model, path=config.critic.path, config={}, lora=None)
        critic = model_size(own, spared=replaced_heads(own.path))
    lines = ["# resolved configuration", config_to_yaml(config).rstrip(), "", "# plan"]
    scorer = _nbytes(config.reward.path) if "reward" in config.roles else 0
    lines += [*_placement(config, backend, nodes), "", *_batch(config), "", *_memory(config, size, critic, scorer)]
    return "\n".join(lines)


def _placement(config: PPOConfig | SFTConfig, backend: str, nodes: Sequence[Node]) -> Iterator[str]:
    held = [roles for roles, count in config.processes for _ in range(count)]
    device = ("gpu" if accelerators_each(nodes, len(held)) else "cpu") if nodes else "device?"
    yield f"backend      {backend}: {len(held)} worker process(es), {_layout(config)}"
    yield from (f"process {number:<4} {device:<7} {', '.join(roles)}" for number, roles in enumerate(held))
    yield f"strategy     {config.parallel.strategy} over {config.placement.ranks_of('policy')} data-parallel rank(s)"


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
        yield f"tokens       at most {config.rows * config.sampling.max_new_tokens} sampled a step"
    evaluated = "before and after" if config.eval.at_start else "after"
    evaluated = f"every {config.eval.every} steps" if config.eval.every else evaluated
    evaluation = f"at most {config.eval.items} held-out items {evaluated}" if config.eval.items else "none"
    rhythm = {"steps": config.save.every, "minutes": config.save.minutes}
    saved = " and ".join([f"every {most:g} {unit}" for unit, most in rhythm.items() if most] + ["at the end"])
    steps = f"{config.run.steps} steps = {config.optimizer_steps} optimizer steps"
    yield f"run          {steps}; evaluation: {evaluation}; checkpoint {saved}"


def _share(rows: int, ranks: int) -> str:
    return f"{rows / ranks:,.1f}".removesuffix(".0")


def _nbytes(path: str) -> int:
    """The size of a reward model."""
    from podium.workers.models import load_scorer

    return sum(parameter.nbytes for parameter in load_scorer(path, "meta").parameters())


def _memory(config: PPOConfig | SFTConfig, size: ModelSize, critic: ModelSize, scorer: int) -> Iterator[str]:
    millions = f"{size.parameters / 1e6:,.2f} M parameters, {size.trained / 1e6:,.2f} M trained"
    yield f"model        {millions}, {config.model.dtype}"
    first, total = 0, 0.0
    for roles, count in config.processes:
        parts = memory_gib(config, size, roles, critic, scorer)
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
) -> dict[str, float]:
    """Estimate the memory in GiB of one worker process that holds ``roles``, by what takes the memory.

    ``size`` is that of the policy's model, and of the critic's unless ``critic`` is given; ``scorer`` is the reward
    model's in bytes. Activations are rough: 16
    hidden vectors for each token and layer (one with gradient checkpointing), and three copies of the logits. Keys and
    values are those of prompts and completions of the greatest length.
    """
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
        parts["activations"] = tokens * (size.layers * size.hidden * kept + 3 * size.vocabulary) * 4
    if "critic" in roles:
        parts["critic with optimizer"] = (width + 3 * exact + copies) * (critic or size).parameters / shards
    if "reference" in roles and config.model.lora is None:
        parts["reference weights"] = size.parameters * width / shards
    if "reward" in roles:
        parts["reward model"] = scorer
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

    from podium.workers.models import lay_out, with_adapters

    whole = lay_out(model, spared=spared)
    settings: Any = whole.config.get_text_config()
    heads = getattr(settings, "num_attention_heads", 0)  # some models have states in place of attention
    shared = getattr(settings, "num_key_value_heads", None) or heads
    head_width = getattr(settings, "head_dim", None) or settings.hidden_size // max(1, heads)
    parameters = trained = sum(p.numel() for p in whole.parameters())
    if model.lora is not None:
        with torch.device("meta"):
            adapted = with_adapters(whole, model.lora, model.seed)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return ModelSize(
        parameters=parameters,
        trained=trained,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        key_value_width=shared * head_width,
        vocabulary=settings.vocab_size,
    )
