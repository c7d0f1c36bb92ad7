"""The optimizer steps of a step, their metrics, and the data's own answers to the prompts of the step, which
``cross_entropy`` in a mapping of losses learns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from podium.algorithms import AlgorithmConfig
from podium.algorithms.metrics import ExplainedVariance, Maximum, TokenMean
from podium.algorithms.objective import MISMATCH_KL
from podium.data import Batch, fields
from podium.errors import ConfigError
from podium.rollout.tasks import Example, PromptStream
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.encode import encode_pairs
from podium.telemetry import metrics as names
from podium.trainer.checks.preflight import check_examples
from podium.trainer.prompts import Prompt, pair_batch, split_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.runs.config import PPOConfig
    from podium.runtime import Call, Handle
    from podium.workers import Policy

# Also where a policy of the user's own reports them.
_LARGEST: Final = frozenset({names.RATIO_MAX, names.MISMATCH_MAX, names.SKIPPED_STEPS})

_UNLIKE_RECORDED: Final = (
    "and a replay (engine.name = 'replay') has the tokens of prompts and not the messages, of which a chat template "
    "would write the prompt and the answer: drop cross_entropy, or train without a replay"
)

MISMATCH: Final = frozenset({names.MISMATCH_MEAN, names.MISMATCH_MAX, MISMATCH_KL})
"""What an optimizer step reports of the distance between generator and policy."""


def join_updates(updates: Sequence[Mapping[str, float]], *, by_first: Collection[str] = ()) -> dict[str, float]:
    """Join the metrics of a step's optimizer steps: the mean of each, which is over all tokens for a
    :class:`TokenMean`, or of a :class:`Maximum` the largest value. The explained variance is that of all tokens.

    >>> join_updates([TokenMean.over(30, {"a": 1.0}) | {"b": 1.0}, TokenMean.over(10, {"a": 5.0}) | {"b": 5.0}])
    {'a': 2.0, 'b': 3.0}

    Args:
        by_first: Metrics with these names are those of the first optimizer step that reports them. The policy had moved
            before the others.
    """
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update][: 1 if name in by_first else None]
        if name in _LARGEST or isinstance(values[0], Maximum):
            joined[name] = max(values, key=lambda value: math.inf if math.isnan(value) else value)
        elif len(values) > 1 and all(isinstance(value, ExplainedVariance) for value in values):
            joined[name] = ExplainedVariance.join(cast("Sequence[ExplainedVariance]", values))
        else:
            joined[name] = _mean([(value.count if isinstance(value, TokenMean) else 1.0, value) for value in values])
    return joined


def _mean(values: Sequence[tuple[float, float]]) -> float:
    """The mean of values with their counts. Those that are over nothing do not count, unless all are."""
    counted = [(count, value) for count, value in values if count > 0] or [(1.0, value) for _, value in values]
    if len(counted) == 1:
        return counted[0][1]  # to the last bit
    return sum(count * value for count, value in counted) / sum(count for count, _ in counted)


def submit_update(
    policy: Handle[Policy],
    minibatch: Batch,
    answers: Answers | None,
    prompts: Sequence[Prompt],
    updates: list[Mapping[str, float]],
) -> list[Call[dict[str, float]]]:
    """Submit an optimizer step by a minibatch of completions, and by the data's ``answers`` to its prompts, if the loss
    has a weight for them. Their loss is added to ``updates``."""
    batch = None
    if answers is not None and answers.weight:
        batch = answers.batch_of(prompts, minibatch.dense(fields.GROUP).tolist())
    if answers is None or batch is None:
        return [policy.update.submit(minibatch)]
    learned = policy.accumulate(batch, AlgorithmConfig(loss="cross_entropy"), weight=answers.weight)
    updates.append({"loss/cross_entropy": learned[names.LOSS] / answers.weight})
    return [policy.accumulate.submit(minibatch), policy.step.submit()]


class Answers:
    """The answers of all training prompts that have one, encoded as for supervised fine-tuning.

    Raises:
        ConfigError: The run has sessions of an environment, no prompt has an answer, one is too long for the model, or
            the run is a replay, whose prompts have another form than those of the recorded run.
        DataError: An answer cannot be encoded.
    """

    def __init__(self, config: PPOConfig, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        which = (
            f"algorithm.loss = {config.algorithm.loss!r}: cross_entropy beside other losses learns the data's answers"
        )
        if config.environment.name:
            raise ConfigError(f"{which}, and the tasks of an environment have no answers: drop cross_entropy")
        self._refusal = f"{which}, {_UNLIKE_RECORDED}"
        if config.replays and ChatEncoder(tokenizer, config.data).template is not None:
            raise ConfigError(self._refusal)
        with_answer = [example for example in examples if example.answer is not None and example.answer.strip()]
        if not with_answer:
            raise ConfigError(f"{which}, and no training prompt has one: set data.answer_column, or drop cross_entropy")
        self.weight = config.algorithm.answer_weight
        data = replace(config.data, split_turns=False)  # a split makes other examples than those of the prompts
        self._pairs = encode_pairs(with_answer, tokenizer, data, "answers")
        check_examples(config.model, self._pairs.token_ids.lengths, self._pairs.examples, "answered")
        self._places = {id(example): index for index, example in enumerate(self._pairs.examples)}

    @classmethod
    def of(cls, config: PPOConfig, stream: PromptStream[Prompt], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """Return the answers of a run's training prompts; None where its loss has no part for them. Raises as above."""
        if config.algorithm.losses.keys() == config.algorithm.sampled_losses.keys():
            return None
        answers = cls(config, getattr(stream.examples, "examples", ()), tokenizer)
        if config.replays:
            answers._check_prompts(stream.examples)
        return answers

    def _check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Check that the answers follow the tokens of the prompts themselves. Raises ConfigError."""
        for prompt in prompts:
            index = self._places.get(id(prompt.example))
            if index is not None and split_answer(self._pairs[index])[0] != prompt.token_ids.tolist():
                raise ConfigError(f"{prompt.example.place}: {self._refusal}")

    def batch_of(self, prompts: Sequence[Prompt], groups: Sequence[int]) -> Batch | None:
        """Return the answers to those of a step's ``prompts`` that a minibatch has, by the ``groups`` of its rows; None
        where none of them has one. There may be fewer than ranks, of which some then have no row."""
        examples = [prompts[group].example for group in dict.fromkeys(groups)]
        places = [self._places[id(example)] for example in examples if id(example) in self._places]
        return pair_batch([self._pairs[index] for index in places]) if places else None
