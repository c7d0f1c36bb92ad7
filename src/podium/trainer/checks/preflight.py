"""Checks before a run starts. They start no worker and load no weights.

Checks that need a model or a tokenizer import torch themselves. Wrong settings are refused without torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from podium.algorithms import ADVANTAGES, check_functions
from podium.annotations import signature_of
from podium.errors import ConfigError, DataError
from podium.extras import explain_packages
from podium.functions import OF_SCRIPT, describe_object
from podium.models import ModelConfig
from podium.models.weight_files import read_stored_tensors
from podium.rewards import RewardConfig, Rewards
from podium.rewards.call_forms import read_form
from podium.rewards.resolve import check_weights, columns_read, least_score, list_rewards, load_nearby, name_of
from podium.rewards.text import answer_of
from podium.rollout.engines import check_engine
from podium.rollout.engines.config import AUTO, NATIVE, find_engines
from podium.rollout.environments import EnvironmentConfig, load_sessions
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig, Example, check_data
from podium.runs.config import InferenceConfig, PPOConfig, SFTConfig
from podium.runs.metric_choice import counts_correct
from podium.runs.run_reader import check_run
from podium.runs.schedules import declaration_of, find_schedule
from podium.runs.trackers import load_tracker
from podium.runtime import Bound
from podium.spelling import write_count, write_share
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.trainer.roles import RoleWorkers
    from podium.trainer.schedules import Schedule

_NO_SCHEDULES: Final = {
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isgeneratorfunction: "a generator function",
    inspect.isasyncgenfunction: "an asynchronous generator function",
    inspect.isclass: "a class",
}
_REWARD, _REWARD_NAME = "reward", "reward.name"
_ANSWER, _SCORE = "answer", "model_score"


# -- settings, against what is installed and what this machine has ---------------------------------------------------


def check_settings(config: PPOConfig | SFTConfig, reward: Rewards | None = None) -> None:
    """Check that the files, functions and packages that ``config`` names exist.

    A reward that is named by its module is not loaded here, because the run imports it in a process of its own.
    ``reward`` is what a script passes in place of ``reward.name``.

    Raises:
        ConfigError: A function, a package or a model's directory is missing, or a file of its weights cannot be read.
            The message says what to do.
        DataError: A file of the data is missing.
    """
    if isinstance(config, PPOConfig) and config.replays:
        check_run(Path(config.engine.replayed_run))
    else:
        if config.environment.name:
            check_environment(config.environment, config.data)
            check_services(config)
        else:
            check_data(config.data)
        check_reward(config.reward, reward)
    check_verdicts(config, reward)
    _check_schedule(config)
    for call in config.run.profile:
        if call.partition(".")[0] not in config.roles or not call.partition(".")[2]:
            raise ConfigError(
                f"run.profile = {call}: expected ROLE.ENDPOINT, and the roles are {', '.join(config.roles)}"
            )
    check_engine(config.engine)
    _suggest_engine(config)
    for tracker in config.run.trackers:
        load_tracker(tracker)
    paths = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    paths["reward.path"] = config.reward.path
    if isinstance(config, PPOConfig):
        check_functions(config.algorithm)
        _check_penalties(config, reward)
        check_engine(config.engine, config.algorithm.record_reasons)
        config.check_roles(load=True)
        paths["critic.path"] = config.critic.path
        paths["algorithm.options.teacher"] = config.algorithm.teacher.teacher
    for key, path in paths.items():
        if path.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
            raise ConfigError(f"{key} = {path!r}: this directory does not exist")
        if path and key != "model.tokenizer":
            read_stored_tensors(path, key)


def check_environment(environment: EnvironmentConfig, data: DataConfig) -> None:
    """Check that the environment exists, takes its options and has tasks.

    Raises:
        ConfigError: The environment does not exist, an option does not fit, or neither the environment nor the data
            have tasks.
        DataError: A file of the data is missing.
    """
    sessions = load_sessions(environment.shown)
    resolved = sessions.resolve_environment(environment)
    sessions.list_arguments(environment)
    if data.train:
        check_data(data)
    elif resolved.tasks is None:
        raise ConfigError(f"data.train is not set, and {environment.shown} has no tasks of its own: set data.train")


def _suggest_engine(config: PPOConfig | SFTConfig) -> None:
    """Say where generation is slower than it could be, because the engine is not installed that auto would choose."""
    samples = isinstance(config, PPOConfig) or not config.scores_answers
    if samples and config.engine.name == AUTO and NATIVE not in find_engines():
        emit(
            Note(
                f"engine.name = auto: the engine transformers generates; {NATIVE} is faster for Llama, Mistral, Qwen "
                f"and SmolLM, and is not installed: {explain_packages('podium.engines', NATIVE)}"
            )
        )


def check_services(config: PPOConfig | SFTConfig) -> None:
    """Check that a package speaks HTTP, where sessions need one that is known before they begin.

    Raises:
        ConfigError: Generators in processes of their own or a service elsewhere need one, and none is installed.
    """
    apart = not any({"generator", "rollout"} <= {*roles} for roles, _ in config.processes)
    load_sessions(config.environment.shown).check_services(config.environment, apart=apart)


def check_reward(config: RewardConfig, reward: Rewards | None) -> None:
    """Check that the rewards exist, that each has a weight, and that one reads the score of the reward model if the run
    has one. A reward that is named by its module is not loaded.

    ``reward`` is what a script gives in place of ``reward.name``.

    Raises:
        ConfigError: A reward does not exist, the number of weights differs, no reward uses the reward model, or one
            needs it and it is missing.
    """
    rewards = list_rewards(config, reward)
    columns = [columns_read(name) for name in rewards]
    check_weights(config, len(rewards))
    if config.path and not any(read is None or _SCORE in read for read in columns):
        raise ConfigError(
            f"reward.path = {config.path!r} with reward.name = {config.name!r}, which does not read the model's score: "
            "set reward.name to model, or to a function of your own that reads row['model_score']"
        )
    for name, read in zip(rewards, columns, strict=True):
        if _SCORE in (read or ()) and not config.path:
            raise ConfigError(
                f"reward.name = {name_of(name)!r} reads the score of a reward model: set reward.path to one"
            )


def check_verdicts(config: InferenceConfig, reward: Rewards | None) -> None:
    """Check that completions are known to be correct or not, if a setting depends on that.

    ``reward`` is what a script gives in place of ``reward.name``.

    Raises:
        ConfigError: The score is the sum of several rewards, and ``reward.correct_at`` is not set.
    """
    if config.reward.correct_at is not None or not config.reward.adds_up(len(list_rewards(config.reward, reward))):
        return
    for setting, remedy in _list_readers(config):
        raise ConfigError(
            f"{setting} with several rewards, whose sum does not say whether a completion is correct: set "
            f"reward.correct_at to the lowest score of a correct completion, or {remedy}"
        )


def _list_readers(config: InferenceConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that depend on which completions are correct, each with what to write in its place."""
    if counts_correct(config.judged_by[0]) and not config.scores_answers:
        yield f"eval.metric = {config.eval.metric!r}", "eval.metric to reward or reward_parts/NAME"
    if isinstance(config, PPOConfig) and not config.replays:
        choice = config.prompt_choice
        if choice.filter == "accuracy":
            yield f"batch.prompts.filter = {choice.filter!r}", "batch.prompts.filter to rewards"
        if choice.skip_solved is not None:
            yield f"batch.prompts.skip_solved = {choice.skip_solved:g}", "leave skip_solved out"
        if choice.curriculum != "none":
            yield f"batch.prompts.curriculum = {choice.curriculum!r}", "leave curriculum out"


def _check_penalties(config: PPOConfig, reward: Rewards | None) -> None:
    """Check that no penalty among the rewards makes their sum negative, if the advantage estimator takes no such sum.

    Raises:
        ConfigError: One does, by the lowest scores that the rewards declare.
    """
    rewards, advantage = list_rewards(config.reward, reward), config.algorithm.advantage
    if not ADVANTAGES.declaration(advantage).refuses_negative or config.environment.name or config.replays:
        return
    weights = config.reward.weights or (1.0,) * len(rewards)
    leasts = [least_score(function) for function in rewards]
    if any(least is None for least in leasts) or min(weights) < 0:
        return  # the estimator itself refuses what is negative
    sums = {
        name_of(name): weight * (least or 0.0) for name, weight, least in zip(rewards, weights, leasts, strict=True)
    }
    if sum(sums.values()) < 0:
        penalties = ", ".join(name for name, least in sums.items() if least < 0)
        raise ConfigError(
            f"reward.name has {penalties}, which lowers the reward to {sum(sums.values()):g}, and algorithm.advantage "
            f"= {advantage!r} takes no rewards below 0: leave {penalties} out, or set algorithm.advantage to grpo"
        )


def find_columns(examples: Iterable[Example], config: RewardConfig) -> frozenset[str] | None:
    """Return the columns that every row has which the reward gets; None where there is no row."""
    columns: set[str] | None = None
    for row in (example.row for example in examples):
        if columns is None:
            columns = {*row}
        elif not columns <= row.keys():
            columns &= row.keys()
    return None if columns is None else frozenset(columns | ({"model_score"} if config.path else set()))


def check_signatures(config: RewardConfig, reward: Rewards | None, columns: frozenset[str] | None) -> None:
    """Check that each parameter of the rewards has a value, for rows with these columns.

    Rewards that are named by their module are checked where the run imports them.

    Raises:
        ConfigError: A parameter is neither the completion, the row nor a column. The message says what to write.
    """
    for function in list_rewards(config, reward) if columns is not None else ():
        if (loaded := load_nearby(function)) is not None:
            read_form(loaded, name_of(function, short=True)).check(columns or ())


def _check_schedule(config: PPOConfig | SFTConfig) -> None:
    """Check that the schedule exists, and that the halves of steps may run at the same time where it declares so."""
    declared = declaration_of(load_schedule(config.run.schedule))
    if isinstance(config, PPOConfig) and declared.overlaps and config.keeps_apart:
        what = f"run.schedule = {config.run.schedule!r} runs the halves of steps at the same time"
        raise ConfigError(f"{what}, and {config.keeps_apart}")


def load_schedule(name: str) -> Schedule:
    """Return the schedule that ``run.schedule`` names: ``sync``, ``module:function`` or ``path/file.py:function``.

    Raises:
        ConfigError: The function does not exist (the message has the nearest name), or is not a plain function of one
            argument.
    """
    schedule = find_schedule(name)
    subject = f"run.schedule = {name!r}: {name.rpartition(':')[2]!r}"
    for is_kind, kind in _NO_SCHEDULES.items():
        if is_kind(schedule):
            raise ConfigError(f"{subject} is {kind}; write a plain function")
    try:
        signature_of(schedule).bind(None)
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        raise ConfigError(f"{subject} must take exactly one argument, the steps") from None
    return schedule


# -- data, model and functions, once they are loaded -----------------------------------------------------------------


def check_lengths(
    model: ModelConfig,
    max_new_tokens: int,
    what: str,
    lengths: Sequence[int],
    examples: Sequence[Example],
    key: str = "sampling.max_new_tokens",
) -> None:
    """Check that a completion and the longest of the ``what`` prompts fit into the model's positions.

    Args:
        lengths: The number of tokens of the prompt of each of the ``examples``.
        key: The setting that ``max_new_tokens`` comes from.

    Raises:
        ConfigError: They do not fit. The message names the settings that would make them fit.
    """
    from podium.models.loading import position_limit

    most = position_limit(model, generated=True)
    index = max(range(len(lengths)), key=lengths.__getitem__)
    if most is not None and lengths[index] + max_new_tokens > most:
        room = most - max_new_tokens
        longer = position_limit(model) != most
        why = ", beyond which longrope changes the rotation of all tokens, generated ones included" if longer else ""
        shorter = f", or data.max_prompt_tokens to {room} (data.overlong decides what happens to longer prompts)"
        raise ConfigError(
            f"the longest {what} prompt{_describe_place(examples[index])} has {write_count(lengths[index], 'token')}, "
            f"which with {key} = {max_new_tokens} is more than the model's {write_count(most, 'position')}{why}: "
            f"lower {key}" + (shorter if room > 0 else "")
        )


def find_fitting(
    model: ModelConfig,
    data: DataConfig,
    what: str,
    lengths: Sequence[int],
    examples: Sequence[Example],
    max_new_tokens: int | None = None,
) -> list[int] | None:
    """Return the places of the rows for which the model has enough positions, and tell of the others, where
    ``data.bad_rows`` is drop; None where all are kept.

    Args:
        lengths: The number of tokens of each row.
        max_new_tokens: Tokens that follow a row; None where a row has its answer.
    """
    from podium.models.loading import position_limit

    most = position_limit(model, generated=max_new_tokens is not None)
    if data.bad_rows == "refuse" or most is None:
        return None
    most -= max_new_tokens or 0
    beyond = [at for at, length in enumerate(lengths) if length > most]
    if not beyond or len(beyond) == len(lengths):  # all of them are refused with the settings that would help
        return None
    shown = ", ".join(
        f"{examples[at].place or f'number {at}'} ({write_count(lengths[at], 'token')})" for at in beyond[:3]
    )
    room = f" and sampling.max_new_tokens = {max_new_tokens}" if max_new_tokens is not None else ""
    emit(
        Note(
            f"{len(beyond):,} of the {len(lengths):,} {what} rows are too long for the model's positions{room} and "
            f"are left out, the first of them: {shown}"
        )
    )
    left_out = {*beyond}
    return [at for at in range(len(lengths)) if at not in left_out]


def check_tokens(model: ModelConfig, what: str, largest: int) -> None:
    """Check that the model knows the tokens of the ``what`` data, of which ``largest`` is the largest.

    Raises:
        ConfigError: The model does not know the largest token.
    """
    from podium.models.loading import vocabulary_size

    if largest >= (vocabulary := vocabulary_size(model)):
        raise ConfigError(
            f"the {what} data have the token {largest}, and the model has a vocabulary of "
            f"{write_count(vocabulary, 'token')}: the tokenizer is not the model's own; set model.tokenizer"
        )


def check_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
    """Check that the model has a row for each token of the tokenizer, and can sample the ``stop_token_ids``.

    Special tokens without a row that no text contains, such as the placeholder of an image, are noted and allowed.

    Raises:
        ConfigError: Text may have a token without a row, or a completion would never end with a stop token.
    """
    from podium.models.loading import vocabulary_size
    from podium.models.vocabulary import find_ids_beyond, find_text_ids

    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = find_ids_beyond(model, tokenizer)
    remedy = "the tokenizer is not the model's own; set model.tokenizer, or give the model rows for its tokens"
    if beyond:
        id, token = next(iter(beyond.items()))
        what = (
            f"{write_count(len(beyond), 'token')} of the tokenizer, such as {token!r} ({id}), "
            f"{'is' if len(beyond) == 1 else 'are'} beyond the model's vocabulary of {vocabulary_size(model)}"
        )
        if {*beyond} - special:
            raise ConfigError(f"{what}: {remedy} (resize_token_embeddings of transformers)")
        emit(Note(f"{what}. They are special tokens, and a text that contains one is refused"))
    limit, holes = find_text_ids(model, tokenizer) or (vocabulary_size(model), ())
    if never := [id for id in stop_token_ids if not 0 <= id < limit or id in holes]:
        raise ConfigError(
            f"the stop token {never[0]} (sampling.stop_token_ids, the tokenizer's eos_token or generation_config.json) "
            f"is never sampled, so that it ends no completion: "
            + (
                f"the model has no row for it, {remedy}"
                if not 0 <= never[0] < vocabulary_size(model)
                else "it stands for no text"
            )
        )


def check_examples(model: ModelConfig, lengths: Sequence[int], examples: Sequence[Example], what: str) -> None:
    """Check that each of the ``what`` ``examples``, of which prompt and answer have a length in tokens, has enough
    positions.

    Raises:
        ConfigError: Some examples do not fit. The message says how many.
    """
    from podium.models.loading import position_limit

    most = position_limit(model)
    if most is not None and (beyond := sum(length > most for length in lengths)):
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise ConfigError(
            f"{beyond} of the {len(lengths)} {what} examples are longer than the model's "
            f"{write_count(most, 'position')}; the longest{_describe_place(examples[longest])} has "
            f"{write_count(lengths[longest], 'token')}, its answer included: take them out of the data, shorten their "
            "answers, or lower data.max_prompt_tokens (data.overlong decides what happens to longer prompts)"
        )


def _describe_place(example: Example) -> str:
    return f", {example.place}," if example.place else ""


def check_answers(examples: Iterable[Example], config: RewardConfig, reward: Rewards | None = None) -> None:
    """Check that every example has the columns that the rewards declare by :func:`podium.rewards.reads`.

    A note says how many answers are empty, if a reward reads them. ``reward`` is what a script gives in place of
    ``reward.name``.

    Raises:
        DataError: An example lacks a column, or its answer is neither text nor messages, and such rewards end the run.
    """
    rewards = list_rewards(config, reward) if config.on_error != "score" else ()
    columns = {name_of(name): columns_read(name) or frozenset[str]() for name in rewards}
    names = ", ".join(name for name, read in columns.items() if _ANSWER in read)
    needed = {column: name for name, read in columns.items() for column in read - {_ANSWER, _SCORE}}
    count = empty = 0
    for example in examples if names or needed else ():
        with example.name_in_errors():
            if missing := sorted(needed.keys() - example.row.keys()):
                raise DataError(
                    f"reward.name = {needed[missing[0]]!r} reads the column {missing[0]!r}, and the row has "
                    f"{', '.join(example.row)}"
                )
            try:
                count, empty = count + 1, empty + (bool(names) and not answer_of(example.row).strip())
            except ValueError as error:
                raise DataError(f"reward.name = {names!r}: {error}") from None
    if empty:
        emit(
            Note(
                f"{write_share(empty, count, 'answer', 'is', 'are')} empty: the reward {names!r} has nothing to "
                "compare their completions with"
            )
        )


def check_columns(examples: Iterable[Example], columns: Iterable[str], advantage: str) -> None:
    """Check that every example has the ``columns`` of the data that the advantage estimator declares.

    Raises:
        ConfigError: An example lacks a column. The message names the columns that it has.
    """
    for example in examples:
        if missing := [name for name in columns if name not in example.row]:
            with example.name_in_errors():
                raise ConfigError(
                    f"algorithm.advantage = {advantage!r} reads the column {missing[0]!r} of the data, and a training "
                    f"prompt has {', '.join(example.row)}"
                )


def with_stop_tokens(
    sampling: SamplingParams, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> SamplingParams:
    """Return ``sampling`` with stop tokens, after :func:`check_vocabulary`. A note says so if no stop token is known.

    If the configuration names none, they are those of the tokenizer and of the model's generation_config.json, and the
    token with which the chat template ends a turn. Texts become ``RequestParams.stop``; one that is a token of its own,
    such as <|im_end|>, becomes that token.
    """
    from podium.models.vocabulary import generation_ends, resolve_stops

    if any(isinstance(stop, str) for stop in sampling.stop_token_ids):
        untyped: Any = tokenizer  # transformers leaves these types open
        numbers, stops = resolve_stops(sampling.stop_token_ids, tokenizer)
        special = [token.content for token in untyped.added_tokens_decoder.values() if token.special]
        for stop in stops:
            if name := next((name for name in special if name in stop), None):
                raise ConfigError(
                    f"sampling.stop_token_ids has {stop!r}, which has the special token {name!r} beside other text and "
                    "would never be found: write the token alone, or the other text alone"
                )
        sampling = sampling.to_request(stop_token_ids=numbers, stop=stops)
    if sampling.stop_token_ids:
        check_vocabulary(model, tokenizer, sampling.stop_token_ids)
        return sampling
    from podium.rollout.tasks import end_of_turn

    stop_ids: list[int] = []
    for ids in (tokenizer.eos_token_id, generation_ends(model), end_of_turn(tokenizer, data)):
        stop_ids += [ids] if isinstance(ids, int) else cast("list[int]", ids or [])
    if not stop_ids:
        emit(
            Note(
                "the tokenizer has no end-of-sequence token, so every completion has sampling.max_new_tokens = "
                f"{write_count(sampling.max_new_tokens, 'token')}: set eos_token in the tokenizer, or "
                "sampling.stop_token_ids"
            )
        )
    check_vocabulary(model, tokenizer, stop_ids)
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))


def check_config(trainer: type, config: object) -> None:
    """Check that a script gives a trainer the configuration of its recipe.

    Raises:
        ConfigError: It is of another class, which the message names with the remedy.
    """
    bases = [base for cls in trainer.__mro__ for base in getattr(cls, "__orig_bases__", ())]
    sections = [get_args(base)[0] for base in bases if get_args(base)]
    expected = next((section for section in sections if isinstance(section, type)), object)
    if isinstance(config, expected):
        return
    name = expected.__name__
    remedy = f"give it a {name}, as those of podium.trainer"
    if isinstance(config, Mapping):
        remedy = f"build it by podium.trainer.build_config({name}, values)"
    elif isinstance(config, str | os.PathLike):
        remedy = f"read the file by podium.trainer.load_config({name}, {os.fspath(config)!r})"
    raise ConfigError(f"{trainer.__name__} takes a {name}, and was given a {type(config).__name__}: {remedy}")


def names_of_given(
    reward: Rewards | None, reward_name: str, workers: RoleWorkers | None, trainer: type | None = None
) -> dict[str, str]:
    """Return descriptions of the functions and classes that a script passes to a run in addition to its configuration,
    by role.

    A configuration file cannot hold them, so a resume from the file alone would silently use other functions. Each
    checkpoint keeps their names instead. "reward" is the function, "reward.name" the configured name that it replaced,
    and "trainer" a class that is none of Podium's.
    """
    given_objects = {
        "reward model" if role == _REWARD else role: describe_object(
            worker.cls if isinstance(worker, Bound) else worker
        )
        for role, worker in (workers or {}).items()
    }
    if trainer is not None and not trainer.__module__.startswith("podium."):
        given_objects["trainer"] = describe_object(trainer)
    if reward is None:
        return given_objects
    rewards = list_rewards(RewardConfig(), reward)
    names = ", ".join(name if isinstance(name, str) else describe_object(name) for name in rewards)
    return {**given_objects, _REWARD: names, _REWARD_NAME: reward_name}


def check_given(before: Mapping[str, str], now: Mapping[str, str], reward_name: str) -> None:
    """Check that a resumed run gets the same functions and classes that a script passed to the run ``before``.

    Raises:
        ConfigError: A role's class is missing, or the reward function is missing and ``reward.name`` has not changed.
    """
    missing = [name for name in before if name not in now and name not in (_REWARD, _REWARD_NAME)]
    configured = before.get(_REWARD_NAME, "")
    if OF_SCRIPT in configured:  # the run was resumed with its own config.yaml
        configured = ", ".join(RewardConfig().names)
    if _REWARD in before and _REWARD not in now and configured == reward_name:
        missing.append(_REWARD)
    if missing:
        what = ", ".join(f"{name} ({before[name]})" for name in missing)
        remedy = ", or name a reward with reward.name" if missing == [_REWARD] else ""
        raise ConfigError(
            f"the script of this run passed its own {what}, which config.yaml cannot hold: resume the run from that "
            f"script, with run.resume{remedy}"
        )
