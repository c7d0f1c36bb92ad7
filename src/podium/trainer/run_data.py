"""The data and settings that a run reads before it starts a worker."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import EncodedExamples, PromptStream
from podium.runs.config import PPOConfig, SFTConfig
from podium.trainer.prompts import Prompt

E = TypeVar("E")
HeldOut: TypeAlias = Sequence[Prompt] | EncodedExamples
"""The prompts of an evaluation set, or examples with their answers, of which the loss is computed."""


@dataclass(frozen=True)
class RunData(Generic[E]):
    """The data and settings that a run reads before it starts a worker.

    Attributes:
        config: The configuration, whose ``run.steps`` follows from ``run.epochs``.
        stream: The prompts, from which ``collect`` takes.
        held_out: The evaluation sets by name, that which judges the run first; None without evaluation.
        tokenizer: The tokenizer.
        template: The chat template if it is not the tokenizer's own.
        sampling: How tokens are drawn, with stop tokens.
        columns: The columns that every row has which the reward gets; None where nothing is graded.
    """

    config: PPOConfig | SFTConfig
    stream: PromptStream[E]
    held_out: Mapping[str, HeldOut] | None
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    sampling: SamplingParams
    columns: Collection[str] | None = None
