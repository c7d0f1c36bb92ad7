"""Held-out evaluation: the generator answers, the grader judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from podium.errors import ConfigError
from podium.rewards import Grader, RewardFn
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import Example
from podium.runtime import Cluster
from podium.trainer.config import InferenceConfig
from podium.trainer.prompts import PromptSource, encoded, load_held_out
from podium.trainer.roles import started_generator
from podium.trainer.sections import EvalConfig
from podium.trainer.seeds import completion_seeds
from podium.trainer.state import Evaluation
from podium.trainer.stop_tokens import with_stop_tokens
from podium.workers import Generator, completion_texts, load_tokenizer

__all__ = ["Evaluator", "evaluate_model", "evaluation_sampling", "open_sampler"]

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


def evaluate_model(config: InferenceConfig, cluster: Cluster, reward: RewardFn | None = None) -> Evaluation:
    """Score a model that nobody trains on ``config.eval.items`` held-out prompts.

    Raises:
        ConfigError: the model, the data or the reward cannot be had, or ``eval.items`` is 0.
    """
    if not config.eval.items:
        raise ConfigError("eval.items = 0: expected at least 1 to evaluate")
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    held_out = load_held_out(config.data, tokenizer, config.eval.items)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer)
    with Grader(config.reward, reward=reward) as grader, started_generator(cluster, config) as generator:
        return Evaluator(
            generator, held_out, grader, tokenizer, evaluation_sampling(sampling, config.eval), config.run.seed
        ).run(0)


def evaluation_sampling(sampling: SamplingParams, config: EvalConfig) -> SamplingParams:
    """``sampling`` for one completion a prompt, at the temperature of evaluation and from the whole distribution."""
    return replace(sampling, n=1, temperature=config.temperature, top_p=1.0, top_k=0)


@contextmanager
def open_sampler(config: InferenceConfig, cluster: Cluster) -> Iterator[Callable[[str, int], list[str]]]:
    """A function from a prompt and a number, which varies the seed, to ``sampling.n`` completions.

    The prompt is written as ``config.data`` says: system prompt, chat template, longest length.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_source)
    sampling = with_stop_tokens(config.sampling, config.model, tokenizer)
    with started_generator(cluster, config) as generator:

        def sample(prompt: str, number: int = 0) -> list[str]:
            prompts = encoded([Example(prompt, None, {"prompt": prompt})], tokenizer, config.data, "typed")
            seeds = completion_seeds(config.run.seed, number, 1, sampling.n)
            return completion_texts(generator.generate(prompts.batch(seeds), sampling), tokenizer)

        yield sample
