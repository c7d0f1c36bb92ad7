"""Supervised fine-tuning on the answers of the data.

collect   take examples
learn     update
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from podium.algorithms import loss_weights
from podium.data import Batch, fields
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import EncodedPairs, PromptStream, encode_pairs, load_examples
from podium.runs.config import SFTConfig
from podium.runs.evaluation import Evaluation
from podium.telemetry import metrics as names
from podium.trainer.checks.preflight import check_examples, check_tokens, find_fitting
from podium.trainer.evaluate import load_held_out_pairs, score_answers
from podium.trainer.prompts import HeldOut, Pair, pair_batch
from podium.trainer.trainer import Trainer


@dataclass(frozen=True)
class Examples:
    """The examples of ``step`` with the weights of their tokens."""

    step: int
    batch: Batch


class SFTTrainer(Trainer[SFTConfig, Pair, Examples]):
    """Trains a policy on prompts with answers.

    Evaluation computes the loss of held-out answers. Where ``eval.metric`` is a figure of completions, evaluation
    generates and grades as in every recipe.

    Args:
        config: A :class:`SFTConfig`.
        cluster: See :class:`PPOTrainer`.
        backend_options: Options of the cluster's backend.
        workers: Classes that replace those of the roles "policy" and, for evaluation, "generator".
        reward: The reward of the evaluation.
        data: Rows to use in place of ``config.data.train``, as in :class:`PPOTrainer`.
        show: Whether the terminal shows the run.
        report: Whether a report is printed at the end.
    """

    @property
    def recipe(self) -> str:
        return "sft"

    def collect(self, step: int) -> Examples:
        """Take examples and weigh their tokens."""
        with self.clock.stage("examples", step, "collect"):
            pairs = self.take(step, self.config.batch.examples)
            batch = pair_batch(pairs)
            mask = batch.jagged(fields.LOSS_MASK)
            weights = mask.like(loss_weights(mask.values, mask.offsets))
            return Examples(step, batch.with_columns({fields.LOSS_WEIGHTS: weights}))

    def learn(self, examples: Examples) -> Mapping[str, float]:
        """Take one optimizer step."""
        with self.clock.stage("update", examples.step, "learn"):
            metrics = self.run.roles.policy.update(examples.batch)
        return {**metrics, names.TOKENS: float(len(examples.batch.jagged(fields.LOSS_MASK).values))}

    def stage_tokens(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(("update", "step"), metrics[names.TOKENS])

    def evaluate(self, step: int) -> bool:
        if self.run.generators is not None:
            self.run.generators.sync_weights(step)  # only here: nothing else is generated
        return super().evaluate(step)

    def score_set(self, held_out: HeldOut, step: int, name: str) -> Evaluation:
        if not isinstance(held_out, EncodedPairs):
            return super().score_set(held_out, step, name)
        folder = self.run.directory.evaluations_of(name)
        return score_answers(self.run.roles.policy, held_out, self.run.data.tokenizer, step, folder, name)

    def load_held_out(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> Mapping[str, HeldOut]:
        if not self.config.scores_answers:
            return super().load_held_out(tokenizer, sampling)
        return load_held_out_pairs(self.config, tokenizer)

    def load_data(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> PromptStream[Pair]:
        del sampling
        data, seed = self.config.data, self.config.run.seed
        evaluates = bool(self.config.eval.items or self.config.engine.replayed_run)  # a replay has no evaluations
        examples = load_examples(data.train, data, "train", seed, evaluates=evaluates)
        pairs = encode_pairs(examples, tokenizer, data)
        kept = find_fitting(self.config.model, data, "training", pairs.token_ids.lengths, pairs.examples)
        pairs = pairs if kept is None else pairs.take(kept)
        check_tokens(self.config.model, "training", int(pairs.token_ids.values.max()))
        check_examples(self.config.model, pairs.token_ids.lengths, pairs.examples, "training")
        return PromptStream[Pair].of(pairs, data, seed)
