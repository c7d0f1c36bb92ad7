"""Examples as the loops use them: encoded once, taken in the order of a stream, matched with their completions.

Legend: P prompts, n completions a prompt, B = P n rows, prompt-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rewards import Grade, Grader
from podium.rollout.tasks import DataConfig, Example, PromptStream, encode_pairs, encode_prompts, load_examples
from podium.telemetry import Note, emit
from podium.trainer.completions import Judged

__all__ = ["PairSource", "PromptSource", "Prompts", "encoded", "load_held_out", "load_pairs", "load_prompts"]

_GRADED_TOKENS: Final = 1 << 19  # of whose rows the texts are here together: enough to keep all graders busy


@dataclass(frozen=True)
class Prompts:
    """P prompts with their token ids and their examples, side by side."""

    token_ids: Sequence[Tensor]
    texts: Sequence[str]
    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, seeds: Tensor) -> Batch:
        """What a generator takes; ``seeds`` int64 ``[P, n]``. Prompt i is group i. Asks for texts beside the tokens."""
        return Batch(
            {
                fields.PROMPT_TOKENS: Jagged.from_rows(list(self.token_ids)),
                fields.SEED: seeds,
                fields.GROUP: torch.arange(len(self)),
            },
            {"text": True},
        )

    def judged(self, batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Judged:
        """The generator's answer, not graded yet; of its tensors only ``group`` is fetched."""
        batch = batch.fetch(fields.GROUP)
        groups: list[int] = batch.dense(fields.GROUP).tolist()
        return Judged(
            batch=batch,
            prompts=[self.texts[group] for group in groups],
            answers=[self.examples[group].answer for group in groups],
            tokenizer=tokenizer,
        )

    def graded(self, judged: Judged, grader: Grader) -> Judged:
        """With grades, a chunk of texts after the other. Raises RewardError as the grader does."""
        examples: list[Mapping[str, Any]] = [
            self.examples[group].row for group in judged.batch.dense(fields.GROUP).tolist()
        ]
        grades: list[Grade] = []
        for rows in judged.chunks(_GRADED_TOKENS):
            grades += grader.grade(judged.texts(rows), examples[rows.start : rows.stop])
        return replace(judged, grades=grades)


class PromptSource:
    """Encoded prompts, and a stream over them whose place can be kept."""

    def __init__(self, prompts: Prompts, seed: int) -> None:
        self._prompts = prompts
        self._stream = PromptStream(range(len(prompts)), seed)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompts.token_ids))

    def all(self) -> Prompts:
        """Every prompt, in the order of the data."""
        return self._prompts

    def take(self, count: int) -> Prompts:
        """The next ``count`` of an endless stream of shuffled epochs."""
        places, whole = self._stream.take(count), self._prompts
        return Prompts(
            [whole.token_ids[place] for place in places],
            [whole.texts[place] for place in places],
            [whole.examples[place] for place in places],
        )

    def state(self) -> Mapping[str, Any]:
        """Where the stream stands, as JSON can hold it."""
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken. Raises CheckpointError for that of other data."""
        self._stream.restore(state)


class PairSource:
    """Encoded prompts with their answers, and a stream over them whose place can be kept."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[bool]]], seed: int) -> None:
        self._rows = [(torch.tensor(tokens), torch.tensor(mask)) for tokens, mask in pairs]
        self._stream = PromptStream(self._rows, seed)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, count: int) -> Batch:
        """``tokens`` and ``loss_mask`` of the next ``count`` of an endless stream of shuffled epochs."""
        rows = self._stream.take(count)
        tokens = Jagged.from_rows([row for row, _ in rows])
        return Batch({fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(torch.cat([mask for _, mask in rows]))})

    def state(self) -> Mapping[str, Any]:
        """Where the stream stands, as JSON can hold it."""
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken. Raises CheckpointError for that of other data."""
        self._stream.restore(state)


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PromptSource:
    """The training prompts. Raises ConfigError or DataError as ``load_examples`` and ``encode_prompts`` do."""
    return PromptSource(
        encoded(load_examples(config.train, config, "train", seed), tokenizer, config, "training"), seed
    )


def load_held_out(config: DataConfig, tokenizer: PreTrainedTokenizerBase, items: int) -> PromptSource:
    """``items`` held-out prompts, the same ones in every run. Raises as :func:`load_prompts`."""
    examples = load_examples(config.train, config, "test", limit=items)
    return PromptSource(encoded(examples, tokenizer, config, "held-out"), 0)


def load_pairs(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PairSource:
    """The training prompts with their answers. Raises as :func:`load_prompts`, and DataError without an answer."""
    return PairSource(encode_pairs(load_examples(config.train, config, "train", seed), tokenizer, config), seed)


def encoded(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig, what: str) -> Prompts:
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
