"""Settings that have no effect, because nothing in the run reads them. This module imports no torch and loads none of
the user's functions: what those read is not known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Final, cast

from podium.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig
from podium.rollout.engines.config import REPLAY, EngineConfig
from podium.rollout.tasks import DataConfig
from podium.rollout.tasks.rows import means_files
from podium.runs.config import InferenceConfig, PPOConfig, SFTConfig
from podium.runs.schedules import SCHEDULES, declaration_of, find_schedule
from podium.runs.sections import CriticConfig, RunConfig
from podium.training.config import OptimConfig

_OF_SCRIPT: Final = ".data"  # the folder of files that hold the rows of a script
_WITHOUT_ADVANTAGES: Final = frozenset({"teacher_kl", "cross_entropy"})  # losses in which no advantage takes part


def find_unused_settings(config: InferenceConfig) -> list[str]:
    """Return a sentence for each setting that has no effect, because nothing in the run reads it: the run trains in
    sessions of an environment, on completions, or by a loss or an estimator of Podium's or a package's that does
    without it."""
    unused = [*_list_of_training(config)] if isinstance(config, PPOConfig | SFTConfig) else []
    unused += [*_list_of_data(config), *_list_of_engine(config.engine)]
    if isinstance(config, SFTConfig):
        return [*unused, *_list_of_sessions(config)]
    if config.environment.options and not config.environment.name:
        unused.append("environment.options has no effect without environment.name")
    if config.data.split_turns:
        unused.append("data.split_turns = true has no effect: only supervised fine-tuning learns turns of the data")
    if isinstance(config, PPOConfig):
        unused += [*_list_by_function(config.algorithm), *_list_of_algorithm(config), *_list_of_run(config)]
        unused += [*_list_without_signal(config), *_list_dropped(config)]
    if not config.environment.name:
        return unused
    return unused + [
        f"data.{name} = {value!r} has no effect with environment.name: no prompt is cut or left out, and a session "
        "ends when the model's context is full"
        for name in ("max_prompt_tokens", "overlong")
        if (value := getattr(config.data, name)) != getattr(DataConfig(), name)
    ]


def _list_of_training(config: PPOConfig | SFTConfig) -> Iterator[str]:
    if config.optim.master_weights != OptimConfig().master_weights and config.model.dtype == "float32":
        yield (
            "optim.master_weights = false has no effect with model.dtype = 'float32': only parameters in bfloat16 have "
            "copies in float32"
        )
    if (compute := config.parallel.choice.compute) == "float32" and config.model.dtype != "float32":
        yield (
            f"parallel.precision = {compute} has no effect with model.dtype = {config.model.dtype!r}, in which the "
            "parameters are multiplied: set model.dtype = float32 if products shall be computed in it"
        )
    if not config.eval.items and not config.engine.replayed_run:  # a replay has no evaluations
        for key, value in {"eval.every": config.eval.every, "save.keep_best": config.save.keep_best}.items():
            if value:
                yield f"{key} = {value} has no effect with eval.items = 0, which leaves all evaluations out"


def _list_of_data(config: InferenceConfig) -> Iterator[str]:
    """Yield a sentence for each setting of datasets, where all data are plain files."""
    data, plain = config.data, DataConfig()
    sources = [source for source in (*data.train_sources, *data.eval_sets.values()) if source]
    if not sources or not all(map(means_files, sources)):
        return
    if data.options:
        yield "data.options has no effect with files, whose rows are read as they are: datasets and tasks have options"
    of_script = any(_OF_SCRIPT in PurePath(source).parts for source in sources)  # its splits were read before
    for name in () if of_script else ("train_split", "eval_split"):
        if (value := getattr(data, name)) != getattr(plain, name):
            yield f"data.{name} = {value!r} has no effect with files: datasets have splits"


def _list_of_engine(engine: EngineConfig) -> Iterator[str]:
    """Yield a sentence for each setting that an engine of Podium's own does not read."""
    reasons = {
        "transformers": ("which keeps no cache between batches: engine.max_sequences bounds a batch", ("cache_gib",)),
        REPLAY: ("which generates nothing", ("cache_gib", "max_sequences", "dtype")),
    }
    reason, names = reasons.get(engine.name, ("", ()))
    for name in names:
        if (value := getattr(engine, name)) != getattr(EngineConfig(), name):
            yield f"engine.{name} = {value!r} has no effect with engine.name = {engine.name!r}, {reason}"


def _list_of_sessions(config: SFTConfig) -> Iterator[str]:
    """Yield a sentence for an environment whose sessions nothing plays."""
    environment = config.environment
    if config.scores_answers and (environment.name or environment.options):
        key = "environment.name" if environment.name else "environment.options"
        yield f"{key} has no effect: a loss judges the run, and nothing is sampled; set eval.metric to reward to sample"


def _list_by_function(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a sentence for each setting that neither loss nor estimator reads, of Podium or of a package."""
    plain = AlgorithmConfig()
    for functions, names, keys in (
        (LOSSES, algorithm.losses, ("clip_low", "clip_high")),
        (ADVANTAGES, (algorithm.advantage,), ("gamma", "lam", "value_clip")),
    ):
        if not all(name in functions for name in names):
            continue
        for key in keys:
            value = getattr(algorithm, key)
            if value == getattr(plain, key) or any(functions.declaration(name).may_read(key) for name in names):
                continue
            readers = functions.list_where(lambda declared, key=key: key in (declared.reads or ()))
            named = getattr(algorithm, functions.key.partition(".")[2])
            yield (
                f"algorithm.{key} = {value!r} has no effect with {functions.key} = {named!r}: the installed "
                f"functions that read it are {', '.join(readers)}"
            )


def _list_of_algorithm(config: PPOConfig) -> Iterator[str]:
    """Yield a sentence for each setting of the algorithm that needs another one."""
    algorithm, options, plain = config.algorithm, config.algorithm.options, _defaults_of(config)
    if algorithm.losses.keys() <= _WITHOUT_ADVANTAGES:
        for key in ("advantage", "normalize_advantage"):
            if (value := getattr(algorithm, key)) != getattr(plain, key):
                yield (
                    f"algorithm.{key} = {value!r} has no effect with algorithm.loss = {algorithm.loss!r}, in which no "
                    "advantage takes part"
                )
        if algorithm.loss == "cross_entropy":
            yield (
                "algorithm.loss = 'cross_entropy' learns all completions alike, and no reward has an effect; to learn "
                "answers of the data, use podium train sft"
            )
    if algorithm.kl_in == "none" and algorithm.kl_estimator != plain.kl_estimator:
        yield (
            f"algorithm.kl_estimator = {algorithm.kl_estimator!r} has no effect with algorithm.kl_in = 'none', where "
            "no KL is measured"
        )
    if algorithm.epoch_choice.max_kl is not None and algorithm.updates == 1:
        yield (
            f"algorithm.epochs.max_kl = {algorithm.epoch_choice.max_kl:g} has no effect where a step is one update: it "
            "ends the updates that follow; raise algorithm.epochs.count or algorithm.minibatches"
        )
    needed = {"teacher_divergence": "teacher_top_k", "reference_mix": "reference_refresh"}
    for option, other in needed.items():
        if option in options and not options.get(other):
            yield f"algorithm.options.{option} = {options[option]!r} has no effect without algorithm.options.{other}"
    if algorithm.correction == "auto" and "weight_cap" in options and config.run.schedule == "sync":
        yield (
            f"algorithm.options.weight_cap = {options['weight_cap']!r} has no effect with algorithm.correction = "
            "'auto' and run.schedule = 'sync', which need no correction: set algorithm.correction to truncate"
        )


def _list_without_signal(config: PPOConfig) -> Iterator[str]:
    """Yield a sentence for what leaves nothing to learn."""
    algorithm = config.algorithm
    declared = (LOSSES.declaration(name) for name in algorithm.losses if name in LOSSES)
    flat = [option for loss in declared for option in loss.flat_options]
    for option in flat if flat and algorithm.updates == 1 and algorithm.ratio_to == "old" else ():
        yield (
            f"algorithm.options.{option} has no effect where a step is one update: its term has no gradient where the "
            "ratio to the policy before the update is 1; raise algorithm.epochs.count or algorithm.minibatches"
        )
    weighs_parts = algorithm.advantage in ADVANTAGES and ADVANTAGES.declaration(algorithm.advantage).weighs_parts
    if config.reward.weights and not any(config.reward.weights) and not weighs_parts:
        scored = "a completion that the environment does not score" if config.environment.name else "every completion"
        yield f"reward.weights are all 0, so that {scored} scores 0 and nothing is learned of the rewards"


def _list_dropped(config: PPOConfig) -> Iterator[str]:
    """Yield a sentence for a filter that drops prompts which would teach something."""
    choice = config.prompt_choice
    if choice.filter != "none" and config.learns_flat and not config.replays:
        yield (
            f"batch.prompts.filter = {choice.filter!r} drops prompts whose completions are all equally good, and "
            f"{config.learns_flat} learns from them too: set it to none to train them"
        )


def _list_of_run(config: PPOConfig) -> Iterator[str]:
    """Yield a sentence for each setting of the critic and of the schedule that nothing reads, and where the policy
    takes no step."""
    is_registered = config.algorithm.advantage in ADVANTAGES
    for key in ("path", "lr") if is_registered and not config.has_critic else ():
        if (value := getattr(config.critic, key)) != getattr(CriticConfig(), key):
            yield (
                f"critic.{key} = {value!r} has no effect with algorithm.advantage = {config.algorithm.advantage!r}, "
                "which needs no critic"
            )
    schedule, staleness = config.run.schedule, config.run.max_staleness
    bounds = schedule not in SCHEDULES or declaration_of(find_schedule(schedule)).side_by_side
    if staleness != RunConfig().max_staleness and not bounds:
        yield f"run.max_staleness = {staleness} has no effect with run.schedule = {schedule!r}"
    warmup = config.algorithm.critic.critic_warmup
    if 0 < config.run.steps <= warmup and config.run.epochs is None:
        yield (
            f"the policy is not trained: algorithm.options.critic_warmup = {warmup} steps train the critic alone, and "
            f"the run ends after run.steps = {config.run.steps}"
        )


def _defaults_of(config: PPOConfig) -> AlgorithmConfig:
    """The section algorithm of a run that sets nothing in it."""
    (section,) = (field for field in fields(cast("Any", config)) if field.name == "algorithm")
    return cast("Any", section.default).default_factory()  # as podium.config.prefer sets it
