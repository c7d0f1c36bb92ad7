"""The data's own answers to the prompts of a step, which ``cross_entropy`` in a mapping of losses learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.data import Batch
from podium.errors import ConfigError
from podium.rollout.tasks import Example, PromptStream
from podium.rollout.tasks.encode import encode_pairs
from podium.trainer.checks.preflight import check_examples
from podium.trainer.prompts import Prompt, pair_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.runs.config import PPOConfig


class Answers:
    """The answers of all training prompts that have one, encoded as for supervised fine-tuning.

    Raises:
        ConfigError: The run has sessions of an environment, no prompt has an answer, or one is too long for the model.
        DataError: An answer cannot be encoded.
    """

    def __init__(self, config: PPOConfig, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        which = (
            f"algorithm.loss = {config.algorithm.loss!r}: cross_entropy beside other losses learns the data's answers"
        )
        if config.environment.name:
            raise ConfigError(f"{which}, and the tasks of an environment have none: leave it out")
        with_answer = [example for example in examples if example.answer is not None and example.answer.strip()]
        if not with_answer:
            raise ConfigError(f"{which}, and no training prompt has one: set data.answer_column, or leave it out")
        self.weight = config.algorithm.answer_weight
        self._pairs = encode_pairs(with_answer, tokenizer, config.data, "answers")
        check_examples(config.model, self._pairs.token_ids.lengths, self._pairs.examples, "answered")
        self._places = {id(example): index for index, example in enumerate(self._pairs.examples)}

    @classmethod
    def of(cls, config: PPOConfig, stream: PromptStream[Prompt], tokenizer: PreTrainedTokenizerBase) -> Answers | None:
        """Return the answers of a run's training prompts; None where its loss has no part for them. Raises as above."""
        if config.algorithm.losses.keys() == config.algorithm.sampled_losses.keys():
            return None
        return cls(config, getattr(stream.examples, "examples", ()), tokenizer)

    def batch_of(self, prompts: Sequence[Prompt], groups: Sequence[int], least: int) -> Batch | None:
        """Return the answers to those of a step's ``prompts`` that a minibatch has, by the ``groups`` of its rows; None
        where fewer than ``least`` of them have one."""
        examples = [prompts[group].example for group in dict.fromkeys(groups)]
        places = [self._places[id(example)] for example in examples if id(example) in self._places]
        return pair_batch([self._pairs[index] for index in places]) if len(places) >= max(least, 1) else None
