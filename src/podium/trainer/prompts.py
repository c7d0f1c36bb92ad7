"""Examples as the loops use them: encoded once, taken in the order of a stream, matched with their completions.

Legend: P prompts, n completions a prompt, B = P n rows, prompt-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rewards import Grader
from podium.rollout.tasks import DataConfig, Example, PromptStream, encode_prompts, load_examples
from podium.telemetry import Note, emit
from podium.trainer.completions import Judged, decode_completions

__all__ = ["PromptSource", "Prompts", "load_prompts"]


@dataclass(frozen=True)
class Prompts:
    """P prompts with their token ids and their examples, side by side."""

    token_ids: Sequence[Tensor]
    texts: Sequence[str]
    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, seeds: Tensor) -> Batch:
        """What a generator takes; ``seeds`` int64 ``[P, n]``. Prompt i is group i."""
        return Batch(
            {
                fields.PROMPT_TOKENS: Jagged.from_rows(list(self.token_ids)),
                fields.SEED: seeds,
                fields.GROUP: torch.arange(len(self)),
            }
        )

    def judged(self, batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Judged:
        """The generator's answer as text, not graded yet."""
        groups = batch.dense(fields.GROUP).tolist()
        return Judged(
            batch=batch,
            prompts=[self.texts[group] for group in groups],
            texts=decode_completions(batch, tokenizer),
            answers=[self.examples[group].answer for group in groups],
            grades=None,
        )

    def graded(self, judged: Judged, grader: Grader) -> Judged:
        """With grades. Raises RewardError as the grader does."""
        rows: list[Mapping[str, Any]] = [
            self.examples[group].row for group in judged.batch.dense(fields.GROUP).tolist()
        ]
        return replace(judged, grades=grader.grade(judged.texts, rows))


class PromptSource:
    """Encoded examples and a stream over them whose place can be kept."""

    def __init__(self, prompts: Prompts, seed: int) -> None:
        self._prompts = prompts
        self._stream = PromptStream(range(len(prompts)), seed)

    def __len__(self) -> int:
        return len(self._prompts)

    def all(self) -> Prompts:
        """Every prompt, in the order of the data."""
        return self._prompts

    def take(self, count: int) -> Prompts:
        """The next ``count`` of an endless stream of shuffled epochs."""
        places = self._stream.take(count)
        whole = self._prompts
        return Prompts(
            [whole.token_ids[place] for place in places],
            [whole.texts[place] for place in places],
            [whole.examples[place] for place in places],
        )

    def state(self) -> Mapping[str, Any]:
        """Where the stream stands, as JSON can hold it."""
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        self._stream.restore(state)


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, held_out: int | None = None
) -> PromptSource:
    """The training prompts, or the first ``held_out`` of the held-out ones.

    Raises:
        DataError: the data is missing, malformed, or none of it fits.
    """
    split = "train" if held_out is None else "test"
    examples = load_examples(config.train, config, split, seed, held_out)
    encoded = encode_prompts(examples, tokenizer, config)
    if encoded.dropped or encoded.cut:
        emit(Note(f"{split} prompts too long: {encoded.dropped} dropped, {encoded.cut} cut, of {len(examples)}"))
    kept = [examples[place] for place in encoded.kept]
    token_ids = [torch.as_tensor(ids, dtype=torch.int64) for ids in encoded.token_ids]
    texts = [str(tokenizer.decode(ids.tolist())) for ids in token_ids]
    return PromptSource(Prompts(token_ids, texts, kept), seed)
