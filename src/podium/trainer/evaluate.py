"""Evaluation on held-out prompts: the generator answers, and the grader judges the answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from transformers import PreTrainedTokenizerBase

from podium.data import fields
from podium.errors import NoRowsError
from podium.rewards import Grade, Grader
from podium.rewards.config import list_learned_parts
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import EncodedPairs, encode_pairs, load_examples
from podium.runs.config import InferenceConfig
from podium.runs.evaluation import Evaluation
from podium.runs.run_files import RunFiles
from podium.runtime import Handle
from podium.spelling import write_count
from podium.telemetry import Note, emit
from podium.telemetry.held_out import LOSS, TOKEN_ACCURACY
from podium.telemetry.metrics import REWARD_PART_PREFIX
from podium.telemetry.progress import Counting
from podium.trainer.checks.preflight import (
    check_examples,
    check_tokens,
    find_fitting,
)
from podium.trainer.completion_files import write_completions, write_examples
from podium.trainer.completions import ScoredBatch
from podium.trainer.generators import Generators
from podium.trainer.held_out_metrics import Sampled, scores_of
from podium.trainer.prompts import Prompt, completion_seeds, pair_batch, prompt_batch
from podium.trainer.sessions import Sessions
from podium.workers import Generator, Policy, RewardModel

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
    step: int,
    reward_model: Handle[RewardModel] | None = None,
    keep: RunFiles | None = None,
    sessions: Sessions | None = None,
    set_name: str = "",
    known: bool | None = None,
) -> Evaluation:
    """Score completions of each of ``prompts`` with the generator's current weights, those after ``step``.

    Completions are drawn as ``config.eval.sampling`` says, with the same seeds every time. Some are kept for the
    report, and all of them in a Parquet file in the folder ``keep``. With ``sessions`` each prompt is the task of an
    environment's session. A session that fails, or ends before the model is asked, is not correct and has the score
    ``config.reward.failure_score``. ``known`` is that of :meth:`.ScoredBatch.with_verdicts`. The accuracy is left out
    where it is not known.

    Raises:
        NoRowsError: All sessions failed, and no run goes on: before its first step, or without ``keep``.
    """
    sampling = config.eval.sampling.apply(sampling)
    seeds = completion_seeds(config.run.seed, None, len(prompts), sampling.n)
    items: list[list[Sampled]] = [[] for _ in prompts]
    reads_answers = False
    most = sampling.max_new_tokens
    ungraded = partial(
        ScoredBatch, step=step, steps_before=step, prompts=prompts, tokenizer=tokenizer, max_new_tokens=most
    )
    scored: ScoredBatch | None = None
    if sessions is not None:
        try:
            batch = sessions.live(prompts, seeds, sampling, step, training=False)
        except NoRowsError as error:
            if not step or keep is None:  # if the first one of a run fails, no later one will work
                raise
            emit(Note(f"{error}\nAll items of this evaluation count as not correct, and the run continues"))
        else:
            scored = sessions.grade(ungraded(batch=batch), grader, config.reward, reward_model)
    else:
        batch = generator.generate(prompt_batch(prompts, seeds), sampling).fetch(fields.GROUP)
        scored = ungraded(batch=batch).graded(grader, reward_model=reward_model)
    if scored is not None:
        if known and not scored.verdicts_known:
            emit(Note(_explain_scores(scored.verdicts, set_name)))
        scored = scored.with_verdicts(known)
        if keep is not None:
            keep.make_folder()
            write_completions(keep, scored, None)
        reads_answers = _collect(scored, grader, items, answers=sampling.n > 1)
    failed = Grade(config.reward.failure_score, ruled=config.reward.failure_score)
    for item in items:
        item += [Sampled(failed)] * (sampling.n - len(item))
    _fill_parts(items, config.judged_by[0])
    sources = [prompt.example.source for prompt in prompts]
    scores = scores_of(items, config.judged_by[0], sources, reads_answers=reads_answers)
    samples = () if scored is None else scored.samples(_SAMPLES)
    return Evaluation.of(step, len(prompts), scores, set_name=set_name, samples=samples)


def _collect(scored: ScoredBatch, grader: Grader, items: Sequence[list[Sampled]], *, answers: bool) -> bool:
    """Put each completion to its item. Returns whether their answers were read."""
    parts = [scored] if scored.left_out is None else [scored, scored.left_out]
    texts = [[text for rows in part.chunks(_READ_TOKENS) for text in part.texts(rows)] for part in parts if answers]
    is_read, lengths = False, [part.token_counts() for part in parts]
    sessions = [part.batch.dense(fields.SESSION).tolist() for part in parts if fields.SESSION in part.batch]
    tokens = Counter[int]()  # by session, of all of its agents
    for numbers, lengths_of_part in zip(sessions, lengths, strict=False):
        for session, length in zip(numbers, lengths_of_part, strict=True):
            tokens[session] += length
    for number, part in enumerate(parts):
        grades = [None if grade.abstained else grade for grade in part.verdicts]
        read = None
        if answers:
            stops = part.batch.python(fields.STOP_TEXT) if fields.STOP_TEXT in part.batch else [""] * len(part.batch)
            judged_texts, ends = ([column[row] for row in part.judged] for column in (texts[number], stops))
            read = grader.read_answers(judged_texts, grades, ends)
            is_read = is_read or read is not None
        reasons = part.batch.python(fields.FINISH_REASON)
        for place, (row, grade) in enumerate(zip(part.judged, grades, strict=True)):
            length = tokens[sessions[number][row]] if sessions else lengths[number][row]
            answer = read[place] if read is not None else None
            items[part.groups[row]].append(Sampled(grade, length, reasons[row] == "length", answer))
    return is_read


def _fill_parts(items: Sequence[list[Sampled]], figure: str) -> None:
    """Give completions whose grade a rule gave, such as those of sessions that failed, the rule's score in each part
    of the reward, and in the part that judges the run, whose ``figure`` would otherwise be that of the others alone."""
    judging = [figure.removeprefix(REWARD_PART_PREFIX)] if figure.startswith(REWARD_PART_PREFIX) else []
    names = [*list_learned_parts(sample.grade for item in items for sample in item if sample.grade), *judging]
    for item in items:
        item[:] = [replace(sample, grade=sample.grade and sample.grade.with_parts(names)) for sample in item]


def _explain_scores(grades: Sequence[Grade], set_name: str) -> str:
    unknown = [grade.score for grade in grades if grade.correct is None]
    odd = [score for score in unknown if score not in (0, 1)]
    verb = "is" if len(odd or unknown) == 1 else "are"
    why = f"{verb} neither 0 nor 1, such as {odd[0]:g}" if odd else f"{verb} the sum of several rewards"
    return (
        f"{len(odd or unknown)} of {write_count(len(grades), 'held-out score')}{f' of {set_name}' * bool(set_name)} "
        f"{why}, and the run is judged by "
        "accuracy: a completion counts as correct from a score of 1 on. eval.metric = reward judges a run by the "
        "scores themselves, and reward.correct_at sets another lowest score"
    )


def score_answers(
    policy: Handle[Policy],
    pairs: EncodedPairs,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
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
