"""Held-out evaluation: the generator answers, the grader judges."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from podium.rewards import Grader
from podium.rollout.sampling import SamplingParams
from podium.trainer.prompts import PromptSource
from podium.trainer.seeds import completion_seeds
from podium.trainer.state import Evaluation
from podium.workers import Generator

__all__ = ["Evaluator"]

SAMPLES = 3


@dataclass(frozen=True)
class Evaluator:
    """Scores all of ``prompts`` with whatever weights the generator has, always with the same seeds."""

    generator: Generator
    prompts: PromptSource
    grader: Grader
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    seed: int

    def run(self, step: int) -> Evaluation:
        """One completion a prompt; its first three are kept for the report."""
        prompts = self.prompts.all()
        batch = self.generator.generate(
            prompts.batch(completion_seeds(self.seed, None, len(prompts), self.sampling.n)), self.sampling
        )
        judged = prompts.graded(prompts.judged(batch, self.tokenizer), self.grader)
        return Evaluation(
            step=step,
            correct=int(judged.correct_B.sum()),
            items=len(batch),
            reward_mean=float(judged.rewards_B.mean()),
            samples=judged.samples(SAMPLES),
        )
