"""Evaluation on held-out prompts: the generator answers, and the grader judges the answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from podium.data import completion_texts, fields
from podium.errors import ConfigError, NoRowsError
from podium.models import load_tokenizer
from podium.rewards import Grader, Rewards
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import Example
from podium.runs.config import InferenceConfig
from podium.runs.evaluation import Evaluation
from podium.runtime import Cluster, Handle
from podium.telemetry import Note, emit
from podium.trainer.checks.preflight import check_answers, check_reward, find_columns, with_stop_tokens
from podium.trainer.completion_files import write_completions
from podium.trainer.completions import ScoredBatch
from podium.trainer.generators import Generators
from podium.trainer.prompts import Prompt, completion_seeds, encode_rows, load_held_out, prompt_batch
from podium.trainer.roles import stand_together, start_generator
from podium.trainer.sessions import Sessions, grade_sessions
from podium.trainer.tasks import load_tasks
from podium.workers import Generator, RewardModel

__all__ = ["evaluate_model", "open_sampler", "score_held_out"]

_SAMPLES: Final = 3


def score_held_out(
    config: InferenceConfig,
    generator: Handle[Generator] | Generators,
    prompts: Sequence[Prompt],
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    step: int = 0,
    reward_model: Handle[RewardModel] | None = None,
    keep: Path | None = None,
    sessions: Sessions | None = None,
) -> Evaluation:
    """Score one completion of each of ``prompts`` with the generator's current weights.

    Completions are sampled at ``config.eval.temperature`` from the whole distribution, with the same seeds every time.
    The report has the first three, and a Parquet file in the directory ``keep`` has all of them. With ``sessions``,
    each prompt is the task of a session of the environment. A session that fails counts as not correct.

    Raises:
        NoRowsError: All sessions of an evaluation before the first step failed.
    """
    sampling = replace(sampling, n=1, temperature=config.eval.temperature, top_p=1.0, top_k=0)
    seeds = completion_seeds(config.run.seed, None, len(prompts), 1)
    if sessions is not None:
        try:
            batch, _ = sessions.live(prompts, seeds, sampling, step, training=False)
        except NoRowsError as error:
            if not step:  # if the first evaluation fails, no later one will work
                raise
            emit(Note(f"{error}\nAll items of this evaluation count as not correct, and the run continues"))
            return Evaluation(step=step, correct=0, items=len(prompts), reward_mean=0.0)
        scored = ScoredBatch(step=step, batch=batch, prompts=prompts, tokenizer=tokenizer)
        scored = grade_sessions(scored, grader, config.reward.correct_at, reward_model)
    else:
        batch = generator.generate(prompt_batch(prompts, seeds), sampling).fetch(fields.GROUP)
        scored = ScoredBatch(step=step, batch=batch, prompts=prompts, tokenizer=tokenizer)
        scored = scored.graded(grader, reward_model=reward_model, steps_before=step)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        write_completions(keep, scored, None)
    return Evaluation(
        step=step,
        correct=sum(grade.correct for grade in scored.verdicts),
        items=len(prompts),
        reward_mean=sum(grade.score for grade in scored.verdicts) / max(1, len(scored.verdicts)),
        samples=scored.samples(_SAMPLES),
    )


def evaluate_model(config: InferenceConfig, cluster: Cluster, reward: Rewards | None = None) -> dict[str, Evaluation]:
    """Score a model, without training it, on ``config.eval.items`` held-out prompts of each evaluation set.

    Returns the evaluations by the names of their sets, the first set first. One set without a name has the name "".

    Raises:
        ConfigError: The model, the data or the reward cannot be loaded, or ``eval.items`` is 0.
    """
    if not config.eval.items:
        raise ConfigError("eval.items = 0: expected at least 1 to evaluate")
    check_reward(config.reward, reward)
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    sets: dict[str, list[Prompt]] = {}
    for name, source in config.data.eval_sets.items():
        data = replace(config.data, eval=source)
        if config.environment.name:
            sets[name] = [*load_tasks(data, config.environment, "test", limit=config.eval.items)]
            continue
        sets[name] = load_held_out(data, tokenizer, config.eval.items)
        check_answers((prompt.example for prompt in sets[name]), config.reward, reward)
    columns = find_columns((prompt.example for prompts in sets.values() for prompt in prompts), config.reward)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    in_script = not cluster.capabilities.processes
    grader = Grader(config.reward, reward=reward, columns=columns, steps=config.run.steps, in_script=in_script)
    with grader, start_generator(cluster, config) as roles:
        sessions = None
        if roles.rollout is not None:
            beside = stand_together(roles.rollout, roles.generator)
            sessions = Sessions(roles.rollout, () if beside else (roles.generator,), config, sampling)
        return {
            name: score_held_out(
                config,
                roles.generator,
                prompts,
                grader,
                tokenizer,
                sampling,
                reward_model=roles.reward,
                sessions=sessions,
            )
            for name, prompts in sets.items()
        }


@contextmanager
def open_sampler(config: InferenceConfig, cluster: Cluster) -> Iterator[Callable[[str, int], list[str]]]:
    """Yield a function that takes a prompt and a number, which varies the seed, and returns ``sampling.n`` completions.

    ``config.data`` says how the prompt is written: system prompt, chat template, and longest length.
    """
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
