"""Evaluation on held-out prompts: the generator answers, and the grader judges the answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from transformers import PreTrainedTokenizerBase

from podium.data import completion_texts, fields
from podium.errors import ConfigError, NoRowsError
from podium.models import load_tokenizer
from podium.rewards import Grade, Grader, Rewards
from podium.rollout.environments import EnvironmentConfig, load_sessions
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import EncodedPairs, Example, encode_pairs, load_examples
from podium.runs.config import InferenceConfig
from podium.runs.evaluation import Evaluation
from podium.runs.judging import knows_accuracy
from podium.runs.model_paths import resolve_models
from podium.runs.run_files import RunFiles
from podium.runtime import Cluster, Handle
from podium.telemetry import Note, Waiting, emit
from podium.telemetry.held_out import LOSS, TOKEN_ACCURACY
from podium.telemetry.progress import Counting
from podium.trainer.checks.preflight import (
    check_answers,
    check_examples,
    check_reward,
    check_tokens,
    find_columns,
    find_fitting,
    with_stop_tokens,
)
from podium.trainer.completion_files import write_completions, write_examples
from podium.trainer.completions import ScoredBatch
from podium.trainer.generators import Generators
from podium.trainer.held_out_scores import Sampled, scores_of
from podium.trainer.prompts import Prompt, completion_seeds, encode_rows, load_held_out, pair_batch, prompt_batch
from podium.trainer.roles import share_processes, start_generator, start_scorer
from podium.trainer.sessions import Sessions
from podium.workers import Generator, Policy, RewardModel

__all__ = ["evaluate_model", "load_held_out_pairs", "open_sampler", "score_answers", "score_held_out"]

_SAMPLES: Final = 24  # of which the report shows a few that changed
_READ_TOKENS: Final = 1 << 19  # tokens of the rows whose texts are fetched at once
_TOGETHER: Final = 512  # held-out examples that are sent to the policy at once


def score_held_out(
    config: InferenceConfig,
    generator: Handle[Generator] | Generators,
    prompts: Sequence[Prompt],
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    step: int = 0,
    reward_model: Handle[RewardModel] | None = None,
    keep: RunFiles | None = None,
    sessions: Sessions | None = None,
    set_name: str = "",
    known: bool | None = None,
) -> Evaluation:
    """Score completions of each of ``prompts`` with the generator's current weights.

    Completions are drawn as ``config.eval.sampling`` says, with the same seeds every time. Some are kept for the
    report, and all of them in a Parquet file in the folder ``keep``. With ``sessions`` each prompt is the task of an
    environment's session. A session that fails, or ends before the model is asked, is not correct and has the score
    ``config.reward.failure_score``. ``known`` is that of :meth:`.ScoredBatch.with_verdicts`. The accuracy is left out
    where it is not known.

    Raises:
        NoRowsError: All sessions of an evaluation before the first step failed.
    """
    sampling = config.eval.sampling.apply(sampling)
    seeds = completion_seeds(config.run.seed, None, len(prompts), sampling.n)
    items: list[list[Sampled]] = [[] for _ in prompts]
    reads_answers = False
    most = sampling.max_new_tokens
    ungraded = partial(ScoredBatch, step=step, prompts=prompts, tokenizer=tokenizer, max_new_tokens=most)
    scored: ScoredBatch | None = None
    if sessions is not None:
        try:
            batch, _ = sessions.live(prompts, seeds, sampling, step, training=False)
        except NoRowsError as error:
            if not step:  # if the first evaluation fails, no later one will work
                raise
            emit(Note(f"{error}\nAll items of this evaluation count as not correct, and the run continues"))
        else:
            scored = sessions.grade(ungraded(batch=batch), grader, config.reward, reward_model)
    else:
        batch = generator.generate(prompt_batch(prompts, seeds), sampling).fetch(fields.GROUP)
        scored = ungraded(batch=batch).graded(grader, reward_model=reward_model, steps_before=step)
    if scored is not None:
        if known and not scored.verdicts_known:
            emit(Note(_explain_scores(scored.verdicts, set_name)))
        scored = scored.with_verdicts(known)
        if keep is not None:
            keep.make_folder()
            write_completions(keep, scored, None)
        reads_answers = _collect(scored, grader, items, answers=sampling.n > 1)
    for item in items:
        item += [Sampled(Grade(config.reward.failure_score))] * (sampling.n - len(item))
    sources = [prompt.example.source for prompt in prompts]
    scores = scores_of(items, config.judged_by[0], sources, reads_answers=reads_answers)
    samples = () if scored is None else scored.samples(_SAMPLES)
    return Evaluation.of(step, len(prompts), scores, set_name=set_name, samples=samples)


def _collect(scored: ScoredBatch, grader: Grader, items: Sequence[list[Sampled]], *, answers: bool) -> bool:
    """Put each completion to its item. Returns whether their answers were read."""
    parts = [scored] if scored.left_out is None else [scored, scored.left_out]
    texts = [[text for rows in part.chunks(_READ_TOKENS) for text in part.texts(rows)] for part in parts if answers]
    is_read = False
    for number, part in enumerate(parts):
        grades = [None if grade.abstained else grade for grade in part.verdicts]
        read = None
        if answers:
            read = grader.read_answers([texts[number][row] for row in part.judged], grades)
            is_read = is_read or read is not None
        lengths, reasons = part.token_counts(), part.batch.python(fields.FINISH_REASON)
        ends = [*part.judged[1:], len(part.batch)]
        for place, (row, grade) in enumerate(zip(part.judged, grades, strict=True)):
            rows = range(row, ends[place])
            items[part.groups[row]].append(
                Sampled(
                    grade,
                    sum(lengths[row] for row in rows),
                    reasons[rows[-1]] == "length",
                    read[place] if read is not None else None,
                )
            )
    return is_read


def _explain_scores(grades: Sequence[Grade], set_name: str) -> str:
    scores = [grade.score for grade in grades if grade.correct is None]
    return (
        f"{len(scores)} of {len(grades)} held-out scores{f' of {set_name}' * bool(set_name)} are neither 0 nor 1, such "
        f"as {scores[0]:g}, and the run is judged by accuracy: a completion counts as correct from a score "
        "of 1 on. eval.metric = reward judges a run by the scores themselves, and reward.correct_at sets another "
        "lowest score"
    )


def score_answers(
    policy: Handle[Policy],
    pairs: EncodedPairs,
    tokenizer: PreTrainedTokenizerBase,
    step: int = 0,
    keep: RunFiles | None = None,
    set_name: str = "",
) -> Evaluation:
    """Compute the loss of held-out examples with the policy's weights, by a forward pass, and how many of the tokens to
    learn are the most probable ones. Both are means over all these tokens.

    The examples with their figures are kept in a Parquet file in the folder ``keep``.
    """
    scores: dict[str, list[float]] = {LOSS: [], TOKEN_ACCURACY: []}
    weights: list[float] = []
    with Counting("rows", len(pairs)) as count:
        for start in range(0, len(pairs), _TOGETHER):
            batch = pair_batch(pairs[start : start + _TOGETHER])
            weights += [float(sum(mask)) for _, mask in pairs[start : start + _TOGETHER]]
            columns = policy.score_examples(batch)
            for name, column in scores.items():
                column += columns.dense(name).tolist()
            count.done = len(weights)
    if keep is not None:
        keep.make_folder()
        write_examples(keep, step, pairs, tokenizer, scores)
    return Evaluation.of(step, len(pairs), scores, weights=weights, set_name=set_name)


def load_held_out_pairs(config: InferenceConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, EncodedPairs]:
    """Read the held-out examples of each evaluation set by its name, the set that judges the run first, and check that
    the model takes them.

    Raises:
        ConfigError, DataError: The examples have no answers to learn, or the model cannot take them.
    """
    sets: dict[str, EncodedPairs] = {}
    for name, source in config.eval_sets.items():
        data = replace(config.data, eval=source)
        pairs = encode_pairs(load_examples(data.train, data, "test", limit=config.eval.items), tokenizer, data)
        what = f"held-out ({name})" if name else "held-out"
        kept = find_fitting(config.model, data, what, pairs.token_ids.lengths, pairs.examples)
        pairs = pairs if kept is None else pairs.take(kept)
        check_tokens(config.model, what, int(pairs.token_ids.values.max()))
        check_examples(config.model, pairs.token_ids.lengths, pairs.examples, what)
        sets[name] = pairs
    return sets


def evaluate_model(
    config: InferenceConfig,
    cluster: Cluster,
    reward: Rewards | None = None,
    *,
    evaluations: dict[str, Evaluation] | None = None,
) -> dict[str, Evaluation]:
    """Score a model, without training it, on ``config.eval.items`` held-out prompts of each evaluation set.

    Returns the evaluations by the names of their sets, the set of ``eval.metric`` first. One set without a name has the
    name "". Where ``eval.metric`` is the loss or the accuracy of tokens, held-out answers are scored, and the model
    answers nothing.

    Args:
        evaluations: Each evaluation is added to this dictionary as soon as its set is done, so that the caller has what
            there is where a later one fails. It is also what is returned.

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
        with start_scorer(cluster, config) as policy:
            for name, examples in pairs.items():
                evaluations[name] = score_answers(policy, examples, tokenizer)
        return evaluations
    check_reward(config.reward, reward)
    sets: dict[str, list[Prompt]] = {}
    for name, source in config.eval_sets.items():
        data = replace(config.data, eval=source)
        if config.environment.name:
            package = load_sessions(config.environment.shown)
            sets[name] = [*package.load_tasks(data, config.environment, "test", limit=config.eval.items)]
            continue
        sets[name] = load_held_out(data, tokenizer, config.eval.items)
        check_answers((prompt.example for prompt in sets[name]), config.reward, reward)
    columns = find_columns((prompt.example for prompts in sets.values() for prompt in prompts), config.reward)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    known = knows_accuracy(config, "", 0)
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
        emit(Waiting(f"evaluating {sum(map(len, sets.values())):,} prompts"))
        for name, prompts in sets.items():
            evaluations[name] = score_held_out(
                config,
                roles.generator,
                prompts,
                grader,
                tokenizer,
                sampling,
                reward_model=roles.reward,
                sessions=sessions,
                set_name=name,
                known=known or None,
            )
    return evaluations


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
