"""The data of a run: prompts and examples, encoded once, taken in the order of a stream; and seeds for what is drawn.

What is drawn depends on the run's seed, the step and the place, never on what was drawn before.

Legend: P prompts, n completions a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rollout.tasks import DataConfig, Example, PromptStream, encode_pairs, encode_prompts, load_examples
from podium.telemetry import Note, emit

__all__ = [
    "PairSource",
    "PromptSource",
    "Prompts",
    "completion_seeds",
    "encoded",
    "load_held_out",
    "load_pairs",
    "load_prompts",
    "row_order",
]

T = TypeVar("T")
_EVALUATION = -1


@dataclass(frozen=True)
class Prompts:
    """P prompts with their token ids, their texts and their examples, side by side."""

    token_ids: Sequence[Tensor]
    texts: Sequence[str]
    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, seeds: Tensor) -> Batch:
        """The batch that a generator takes; ``seeds`` is int64 ``[P, n]``. Prompt i is group i.

        The batch asks the generator for texts beside the tokens.
        """
        return Batch(
            {
                fields.PROMPT_TOKENS: Jagged.from_rows(list(self.token_ids)),
                fields.SEED: seeds,
                fields.GROUP: torch.arange(len(self)),
            },
            {"text": True},
        )


class _Source(Generic[T]):
    """Rows in the order of a stream whose place can be kept."""

    def __init__(self, rows: Sequence[T], seed: int) -> None:
        self._stream = PromptStream(rows, seed)

    def __len__(self) -> int:
        return len(self._stream)

    def state(self) -> Mapping[str, Any]:
        """The place of the stream, as JSON can hold it."""
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken. Raises CheckpointError for the state of other data."""
        self._stream.restore(state)


class PromptSource(_Source[int]):
    """Encoded prompts, and a stream over them."""

    def __init__(self, prompts: Prompts, seed: int) -> None:
        super().__init__(range(len(prompts)), seed)
        self._prompts = prompts

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompts.token_ids))

    def all(self) -> Prompts:
        """Every prompt, in the order of the data."""
        return self._prompts

    def take(self, count: int) -> Prompts:
        """The next ``count`` prompts of an endless stream of shuffled epochs."""
        places, whole = self._stream.take(count), self._prompts
        return Prompts(
            [whole.token_ids[place] for place in places],
            [whole.texts[place] for place in places],
            [whole.examples[place] for place in places],
        )


class PairSource(_Source[tuple[Tensor, Tensor]]):
    """Encoded prompts with their answers, and a stream over them."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[bool]]], seed: int) -> None:
        super().__init__([(torch.tensor(tokens), torch.tensor(mask)) for tokens, mask in pairs], seed)

    def take(self, count: int) -> Batch:
        """``tokens`` and ``loss_mask`` of the next ``count`` examples of an endless stream of shuffled epochs."""
        rows = self._stream.take(count)
        tokens = Jagged.from_rows([row for row, _ in rows])
        return Batch({fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(torch.cat([mask for _, mask in rows]))})


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PromptSource:
    """Load the training prompts. Raises ConfigError or DataError as ``load_examples`` and ``encode_prompts`` do."""
    return PromptSource(
        encoded(load_examples(config.train, config, "train", seed), tokenizer, config, "training"), seed
    )


def load_held_out(config: DataConfig, tokenizer: PreTrainedTokenizerBase, items: int) -> PromptSource:
    """Load ``items`` held-out prompts, the same ones in every run. Raises as :func:`load_prompts`."""
    examples = load_examples(config.train, config, "test", limit=items)
    return PromptSource(encoded(examples, tokenizer, config, "held-out"), 0)


def load_pairs(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PairSource:
    """Load prompts with their answers. Raises as :func:`load_prompts`, and DataError where an answer is missing."""
    return PairSource(encode_pairs(load_examples(config.train, config, "train", seed), tokenizer, config), seed)


def encoded(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig, what: str) -> Prompts:
    """Encode ``examples``. A note says how many were too long; ``what`` names them there."""
    found = encode_prompts(examples, tokenizer, config)
    if found.dropped or found.cut:
        emit(
            Note(
                f"{what} prompts of more than data.max_prompt_tokens = {config.max_prompt_tokens}: {found.dropped} "
                f"dropped, {found.cut} cut, of {len(examples)}"
            )
        )
    return Prompts(
        token_ids=[torch.tensor(ids) for ids in found.token_ids],
        texts=[str(tokenizer.decode(ids)) for ids in found.token_ids],
        examples=[examples[place] for place in found.kept],
    )


def completion_seeds(seed: int, step: int | None, prompts: int, n: int) -> Tensor:
    """One seed a completion of a step, int64 ``[prompts, n]``; ``step`` None is evaluation, the same at every step."""
    generator = _generator(seed, _EVALUATION if step is None else step, 0)
    return torch.from_numpy(generator.integers(0, 2**63 - 1, size=(prompts, n), dtype=np.int64))


def row_order(seed: int, step: int, epoch: int, rows: int) -> Tensor:
    """The order in which an epoch goes through a step's rows, int64 ``[rows]``."""
    return torch.from_numpy(_generator(seed, step, 1 + epoch).permutation(rows))


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part % 2**32 for part in key])))
