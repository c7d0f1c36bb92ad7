"""Best of n: completions of the training prompts are drawn and graded, and the best of each prompt is kept.

prompts ─▶ n completions each ─▶ rewards ─▶ the completion with the highest one ─▶ a row for supervised fine-tuning
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podium.data import fields
from podium.errors import ConfigError
from podium.models import load_tokenizer
from podium.rewards import Grader, Rewards
from podium.rollout.tasks import load_examples
from podium.runs.config import InferenceConfig
from podium.runs.paths import resolve_models
from podium.runtime import Cluster
from podium.telemetry.progress import Counting
from podium.trainer.checks.preflight import check_answers, check_lengths, check_reward, find_columns, with_stop_tokens
from podium.trainer.checks.scored_prompts import check_scored
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import completion_seeds, encode_rows, prompt_batch
from podium_inference.roles import start_generator

__all__ = ["BestOfN", "draw_best"]

_TOGETHER: Final = 64  # prompts whose completions are drawn and graded at once


@dataclass
class BestOfN:
    """What became of the prompts: how many have a row, and how many had no completion that could be one.

    Attributes:
        kept: Prompts with a row.
        unfinished: Prompts of which each completion was cut off, or left out by the reward.
        wrong: Prompts of which no completion is correct by ``reward.correct_at``.
    """

    kept: int = 0
    unfinished: int = 0
    wrong: int = 0


def draw_best(
    config: InferenceConfig, cluster: Cluster, count: BestOfN, reward: Rewards | None = None, *, step: int = 0
) -> Iterator[dict[str, Any]]:
    """Draw ``sampling.n`` completions of each training prompt, and yield a row with the best of each.

    A row has ``prompt``, ``answer`` and ``reward``, and ``tools`` if the prompt has some: supervised fine-tuning reads
    it as it is. An answer that a text of ``sampling.stop_token_ids`` ended has this text at its end, as it was drawn,
    so that a model that learns from the row writes it, too. Completions that were cut off are no answers. With
    ``reward.correct_at`` only prompts with a correct completion have a row (rejection sampling). ``count`` counts
    meanwhile. ``step`` is the number of steps that the model has finished, which a reward reads as
    ``trainer_state.global_step``.

    Raises:
        ConfigError: The model, the data or the reward cannot be loaded, ``sampling.n`` is 1, or there is an
            environment, whose sessions are no single answers.
    """
    if config.sampling.n < 2:
        raise ConfigError(
            f"sampling.n = {config.sampling.n}: one completion of a prompt leaves no choice; set it to 8, for example"
        )
    if config.environment.name:
        raise ConfigError(
            f"environment.name = {config.environment.name!r}: a session is no single answer to keep; leave it out"
        )
    config = resolve_models(config)
    check_reward(config.reward, reward)
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    examples = load_examples(config.data.train, config.data, "train", config.run.seed)
    prompts = encode_rows(examples, tokenizer, config.data, "training")
    check_answers(prompts.examples, config.reward, reward)
    check_scored(config, prompts.examples)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer, config.data)
    check_lengths(config.model, sampling.max_new_tokens, "training", prompts.token_ids.lengths, prompts.examples)
    columns = find_columns(prompts.examples, config.reward)
    in_script = not cluster.capabilities.processes
    grader = Grader(config.reward, reward=reward, columns=columns, steps=config.run.steps, in_script=in_script)
    with grader, start_generator(cluster, config) as roles, Counting("prompts", len(prompts), whole=True) as progress:
        for number, start in enumerate(range(0, len(prompts), _TOGETHER)):
            group = prompts[start : start + _TOGETHER]
            seeds = completion_seeds(config.run.seed, number, len(group), sampling.n)
            batch = roles.generator.generate(prompt_batch(group, seeds), sampling).fetch(fields.GROUP)
            most = sampling.max_new_tokens
            scored = ScoredBatch(
                step=step, steps_before=step, batch=batch, prompts=group, tokenizer=tokenizer, max_new_tokens=most
            )
            yield from _choose(scored.graded(grader, reward_model=roles.reward), config, count)
            progress.done += len(group)


def _choose(scored: ScoredBatch, config: InferenceConfig, count: BestOfN) -> Iterator[dict[str, Any]]:
    """Yield a row for each prompt with an answer."""
    grades, reasons = scored.grades or (), scored.batch.python(fields.FINISH_REASON)
    scores = [grade.score for grade in grades]  # as the reward gave them, where the column of rewards is in float32
    texts = [text for rows in scored.chunks(1 << 16) for text in scored.texts(rows)]
    has_stops = fields.STOP_TEXT in scored.batch
    stops = scored.batch.python(fields.STOP_TEXT) if has_stops else [""] * len(texts)
    rows_by_group: dict[int, list[int]] = {}
    for row, group in enumerate(scored.groups):
        if reasons[row] == "stop":
            rows_by_group.setdefault(group, []).append(row)
    for group, prompt in enumerate(scored.prompts):
        best = _best_of(rows_by_group.get(group, ()), scores)
        if best is None:
            count.unfinished += 1
        elif config.reward.correct_at is not None and not grades[best].correct:
            count.wrong += 1
        else:
            count.kept += 1
            example = prompt.example
            tools = {"tools": example.row["tools"]} if example.row.get("tools") else {}
            yield {"prompt": example.prompt, "answer": texts[best] + stops[best], "reward": scores[best], **tools}


def _best_of(rows: Sequence[int], scores: Sequence[float]) -> int | None:
    """The first of the rows with the highest score."""
    return max(rows, key=lambda row: (scores[row], -row), default=None)
