"""Evaluation and sampling of a model without training it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from podium.data import completion_texts
from podium.errors import ConfigError
from podium.models import load_tokenizer
from podium.rewards import Grader, Rewards
from podium.rollout.environments import EnvironmentConfig, load_sessions
from podium.rollout.tasks import Example
from podium.runs.config import InferenceConfig
from podium.runs.evaluation import Evaluation
from podium.runs.metric_choice import knows_accuracy
from podium.runs.paths import resolve_models
from podium.runtime import Cluster
from podium.spelling import write_count
from podium.telemetry import Waiting, emit
from podium.trainer.checks.preflight import (
    check_answers,
    check_reward,
    check_verdicts,
    find_columns,
    with_stop_tokens,
)
from podium.trainer.checks.scored_prompts import check_scored
from podium.trainer.evaluate import load_held_out_pairs, score_answers, score_held_out
from podium.trainer.prompts import Prompt, completion_seeds, encode_rows, load_held_out, prompt_batch
from podium.trainer.roles import share_processes
from podium.trainer.sessions import Sessions
from podium.training.config import Precision
from podium_inference.roles import start_generator, start_scorer

__all__ = ["evaluate_model", "open_sampler"]


def evaluate_model(
    config: InferenceConfig,
    cluster: Cluster,
    reward: Rewards | None = None,
    *,
    step: int = 0,
    evaluations: dict[str, Evaluation] | None = None,
    precision: Precision | Mapping[str, Any] = "auto",
) -> dict[str, Evaluation]:
    """Score a model, without training it, on ``config.eval.items`` held-out prompts of each evaluation set.

    Returns the evaluations by the names of their sets, the set of ``eval.metric`` first. One set without a name has the
    name "". Where ``eval.metric`` is the loss or the accuracy of tokens, held-out answers are scored, and the model
    answers nothing.

    Args:
        step: The number of steps that the model has finished, which a reward reads as ``trainer_state.global_step``.
        evaluations: Each evaluation is added to this dictionary as soon as its set is done, so that the caller has what
            there is where a later one fails. It is also what is returned.
        precision: Held-out answers are scored in this data type, as ``parallel.precision`` says it of a run. The data
            type in which completions are drawn is ``config.engine.dtype``.

    Raises:
        ConfigError: The model, the data or the reward cannot be loaded, or ``eval.items`` is 0.
    """
    evaluations = {} if evaluations is None else evaluations
    if not config.eval.items:
        raise ConfigError("eval.items = 0: expected at least 1 to evaluate")
    config = resolve_models(config)
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    if config.scores_answers:
        pairs = load_held_out_pairs(config, tokenizer)
        with start_scorer(cluster, config, precision) as policy:
            for name, examples in pairs.items():
                evaluations[name] = score_answers(policy, examples, tokenizer, step)
        return evaluations
    check_reward(config.reward, reward)
    check_verdicts(config, reward)
    sets = _load_sets(config, tokenizer, reward)
    check_scored(config, (prompt.example for prompts in sets.values() for prompt in prompts))
    columns = find_columns((prompt.example for prompts in sets.values() for prompt in prompts), config.reward)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    has_accuracy = knows_accuracy(config, "", 0)
    in_script = not cluster.capabilities.processes
    grader = Grader(
        config.reward,
        reward=reward,
        columns=columns,
        steps=config.run.steps,
        optional=bool(config.environment.name),
        in_script=in_script,
    )
    with grader, start_generator(cluster, config) as roles:
        sessions: Sessions | None = None
        if roles.rollout is not None:
            beside = share_processes(roles.rollout, roles.generator)
            generators = () if beside else (roles.generator,)
            sessions = load_sessions(config.environment.shown).Sessions(roles.rollout, generators, config, sampling)
        emit(Waiting(f"evaluating {write_count(sum(map(len, sets.values())), 'prompt')}"))
        for name, prompts in sets.items():
            evaluations[name] = score_held_out(
                config,
                roles.generator,
                prompts,
                grader,
                tokenizer,
                sampling,
                step,
                reward_model=roles.reward,
                sessions=sessions,
                set_name=name,
                known=has_accuracy or None,
            )
    return evaluations


def _load_sets(
    config: InferenceConfig, tokenizer: PreTrainedTokenizerBase, reward: Rewards | None
) -> dict[str, list[Prompt]]:
    """Load the held-out prompts of each evaluation set, or the tasks of its sessions, by the name of the set."""
    sets: dict[str, list[Prompt]] = {}
    for name, source in config.eval_sets.items():
        data = replace(config.data, eval=source)
        if config.environment.name:
            package = load_sessions(config.environment.shown)
            sets[name] = [*package.load_tasks(data, config.environment, "test", limit=config.eval.items)]
            continue
        sets[name] = load_held_out(data, tokenizer, config.eval.items)
        check_answers((prompt.example for prompt in sets[name]), config.reward, reward)
    return sets


@contextmanager
def open_sampler(config: InferenceConfig, cluster: Cluster) -> Iterator[Callable[[str, int], list[str]]]:
    """Yield a function that takes a prompt and a number, which varies the seed, and returns ``sampling.n`` completions.

    ``config.data`` says how the prompt is written: system prompt, chat template, and longest length.
    """
    config = resolve_models(config)
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    config = replace(config, reward=replace(config.reward, path=""))  # samples are not scored
    config = replace(config, environment=EnvironmentConfig())  # nor do they live in one
    with start_generator(cluster, config) as roles:

        def sample(prompt: str, number: int = 0) -> list[str]:
            prompts = encode_rows([Example(prompt, None, {"prompt": prompt})], tokenizer, config.data, "typed")
            seeds = completion_seeds(config.run.seed, number, 1, sampling.n)
            return completion_texts(roles.generator.generate(prompt_batch(prompts, seeds), sampling), tokenizer)

        yield sample
