"""The data of a run, encoded once, and the seeds of completions and orders.

A random number depends on the run's seed, the step and its place in the step, and never on earlier random numbers.

Legend: P prompts, n completions a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rollout.tasks import DataConfig, EncodedExamples, EncodedPrompts, Example, encode_prompts, load_examples
from podium.rollout.tasks.examples import RowReader
from podium.rollout.tasks.messages import message_text
from podium.telemetry import Note, emit
from podium.telemetry.formatting import percent

Pair = tuple[list[int], list[bool]]
"""The tokens of a prompt with its answer, and their loss mask."""

_EVALUATION, _CURRICULUM = -1, -2


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt: its token ids, the example that it was made from, and the decoder of its tokenizer."""

    token_ids: Tensor
    example: Example
    decode: Callable[[list[int]], object]

    @cached_property
    def text(self) -> str:
        """The decoded text of the token ids, for showing and storing the prompt."""
        return str(self.decode(self.token_ids.tolist()))

    @property
    def shown(self) -> str:
        """The prompt for people: its text, or the turns of the conversation without the template."""
        prompt = self.example.prompt
        if isinstance(prompt, str):
            return prompt
        if len(prompt) == 1:
            return message_text(prompt[0])
        return "\n".join(f"{message['role']}: {message_text(message)}" for message in prompt)


class Prompts(Sequence[Prompt]):
    """Prompts whose token ids are in one array. Each :class:`Prompt` is made on access."""

    def __init__(
        self, examples: Sequence[Example], encoded: EncodedPrompts, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.examples = [examples[index] for index in encoded.kept]
        self.token_ids = encoded.token_ids
        self.digest = encoded.digest
        self._tokenizer = tokenizer

    def take(self, rows: Sequence[int]) -> Prompts:
        """These prompts alone."""
        ids = self.token_ids.take(rows)
        encoded = EncodedPrompts(ids, [*rows], 0, 0, ids.digest if self.digest else "")
        return Prompts(self.examples, encoded, self._tokenizer)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        return Prompt(self.token_ids.tensor(place).long(), self.examples[place], self._tokenizer.decode)


HeldOut: TypeAlias = Sequence[Prompt] | EncodedExamples
"""The prompts of an evaluation set, or examples with their answers, of which the loss is computed."""


class TaskPrompt(Prompt):
    """A task of an environment. Its sessions decide what the model reads. ``text`` is for people."""

    @cached_property
    def text(self) -> str:
        return self.shown


class Tasks(Sequence[TaskPrompt]):
    """The tasks of one side of the data, or of the environment itself.

    Args:
        examples: Their rows.
        digest: A checksum of their content.
    """

    def __init__(self, examples: Sequence[Example], digest: str) -> None:
        self.examples = [*examples]
        self.digest = digest

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        return TaskPrompt(torch.empty(0, dtype=torch.int64), self.examples[place], str)


def prompt_batch(prompts: Sequence[Prompt], seeds: Tensor) -> Batch:
    """Return the batch for a generator, which asks for texts in addition to tokens. Prompt i is group i.

    Args:
        prompts: P prompts.
        seeds: A seed for each completion, int64 ``[P, n]``.
    """
    columns = {
        fields.PROMPT_TOKENS: Jagged.from_rows([prompt.token_ids for prompt in prompts]),
        fields.SEED: seeds,
        fields.GROUP: torch.arange(len(prompts)),
    }
    return Batch(columns, {"text": True})


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """The batch of examples to learn, with ``tokens`` and ``loss_mask``."""
    tokens = Jagged.from_rows([torch.tensor(row) for row, _ in pairs])
    mask = tokens.like(torch.cat([torch.tensor(row) for _, row in pairs]))
    return Batch({fields.TOKENS: tokens, fields.LOSS_MASK: mask})


def split_answer(pair: Pair) -> tuple[list[int], list[int], list[bool]]:
    """Return the tokens of the prompt, those of the answer, which may have turns of others in it, and the mask of
    these."""
    tokens, mask = pair
    first = mask.index(True) if True in mask else len(mask)
    return tokens[:first], tokens[first:], mask[first:]


def load_held_out(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, items: int, read: RowReader | None = None
) -> list[Prompt]:
    """Load ``items`` held-out prompts of the first evaluation set, which are the same in every run. ``read`` is that of
    :func:`.load_examples`.

    Raises:
        ConfigError, DataError: No prompt fits the model.
    """
    examples = load_examples(config.train, config, "test", limit=items, read=read)
    return list(encode_rows(examples, tokenizer, config, "held-out"))


def encode_rows(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig, what: str
) -> Prompts:
    """Encode ``examples``. A note says how many of the ``what`` prompts were too long. Raises as ``encode_prompts``."""
    encoded_prompts = encode_prompts(examples, tokenizer, config)
    dropped, cut = encoded_prompts.dropped, encoded_prompts.cut
    if dropped or cut:
        emit(
            Note(
                f"{what} prompts of more than data.max_prompt_tokens = {config.max_prompt_tokens}: {dropped} dropped, "
                f"{cut} cut, of {len(examples)} ({percent((dropped + cut) / len(examples))})"
            )
        )
    return Prompts(examples, encoded_prompts, tokenizer)


def completion_seeds(seed: int, step: int | None, prompts: int, n: int) -> Tensor:
    """Return a seed for each completion of a step: int64 ``[prompts, n]``. ``step`` None means an evaluation, whose
    seeds are always the same."""
    generator = _generator(seed, _EVALUATION if step is None else step, 0)
    return torch.from_numpy(generator.integers(0, 2**63 - 1, size=(prompts, n), dtype=np.int64))


def row_order(seed: int, step: int, epoch: int, rows: int) -> Tensor:
    """Return the order in which an epoch trains on a step's rows: int64 ``[rows]``."""
    return torch.from_numpy(_generator(seed, step, 1 + epoch).permutation(rows))


def draw_uniform(seed: int, number: int) -> float:
    """Return a random number of 0 to 1 for prompt ``number`` of a run."""
    return float(_generator(seed, _CURRICULUM, number).random())


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part % 2**32 for part in key])))
