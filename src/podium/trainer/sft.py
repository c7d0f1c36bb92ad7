"""Supervised fine-tuning: the answers of the data, token by token.

take examples ─▶ update
"""

from __future__ import annotations

from collections.abc import Mapping

from podium.algorithms import loss_weights
from podium.data import fields
from podium.telemetry import metrics as names
from podium.trainer.config import SFTConfig
from podium.trainer.fitting import Trainer
from podium.trainer.prompts import PairSource, load_pairs

__all__ = ["SFTTrainer"]


class SFTTrainer(Trainer[SFTConfig, PairSource]):
    """Trains a policy on prompts with answers; evaluation generates and grades, as everywhere.

    Args:
        config: a :class:`SFTConfig`.
        cluster, backend_options, workers, reward, show, report: see :class:`PPOTrainer`. The roles are "policy" and,
            to evaluate, "generator".
    """

    @property
    def recipe(self) -> str:
        return "sft"

    def step(self, step: int) -> Mapping[str, float]:
        """Train once. Returns the step's metrics, by their names in :mod:`podium.telemetry.metrics`."""
        with self.clock.stage("examples"):
            batch = self.source.take(self.config.batch.examples)
            mask = batch.jagged(fields.LOSS_MASK)
            batch = batch.with_columns({fields.LOSS_WEIGHTS: mask.like(loss_weights(mask.values, mask.offsets))})
        with self.clock.stage("update"):
            metrics = self.roles.policy.update(batch)
        return {**metrics, names.TOKENS: float(len(mask.values))}

    def stage_tokens(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(("update", "step"), metrics[names.TOKENS])

    def evaluate(self, step: int) -> bool:
        self.roles.publish(step)  # only here: nothing else is generated
        return super().evaluate(step)

    def load_data(self) -> PairSource:
        return load_pairs(self.config.data, self.tokenizer, seed=self.config.run.seed)
