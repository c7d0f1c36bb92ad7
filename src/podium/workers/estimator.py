"""The estimator: what a step needs of all its completions at once, token by token.

Legend: N tokens over all rows (completions) of a step.
"""

from __future__ import annotations

from podium.algorithms import (
    AdvantageInputs,
    AlgorithmConfig,
    compute_advantages,
    kl_estimate,
    mismatch,
    penalise,
)
from podium.data import Batch, fields
from podium.runtime import Worker, endpoint, first, only
from podium.telemetry import metrics
from podium.workers.texts import sampled_counts

__all__ = ["Estimator"]


class Estimator(Worker):
    """Advantages and figures of the whole batch of a step. Holds no model.

    Only the first rank is called, with all rows: groups, whitening and an advantage of the user's own look at the whole
    batch, at the price of a few operations a token. To spread them over ranks would take a collective in each, and
    would save less than that costs. Tensors come by reference and results stay here, so that what passes through the
    controller grows with rows, not with tokens.

    Args:
        config: of the algorithm.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @endpoint(dispatch=only(0), collect=first(), returns="ref")
    def advantages(self, batch: Batch, kl_coef: float = 0.0) -> Batch:
        """``advantages``, and ``returns`` where a critic is trained: token columns.

        Args:
            batch: ``loss_mask``, ``rewards`` and ``group``; ``values`` where there is a critic; ``old_logprobs`` and
                ``ref_logprobs`` where the KL counts in the reward.
            kl_coef: of that KL.

        Raises:
            ConfigError: the advantage estimator cannot be found here.
            DataError: it did not return finite ``[N]`` tensors that are 0 outside the mask.
        """
        mask = batch.jagged(fields.LOSS_MASK)
        token_rewards_N = None
        if self.config.kl_in == "reward":
            old_N, ref_N = batch.jagged(fields.OLD_LOGPROBS).values, batch.jagged(fields.REF_LOGPROBS).values
            kl_N = kl_estimate(old_N, ref_N, self.config.kl_estimator)
            token_rewards_N = penalise(old_N.new_zeros(len(old_N)), kl_N, mask.values, kl_coef)
        inputs = AdvantageInputs(
            rewards_B=batch.dense(fields.REWARDS),
            group_B=batch.dense(fields.GROUP),
            mask_N=mask.values,
            offsets_B1=mask.offsets,
            token_rewards_N=token_rewards_N,
            values_N=batch.jagged(fields.VALUES).values if fields.VALUES in batch else None,
        )
        outputs = compute_advantages(inputs, self.config)
        columns = {fields.ADVANTAGES: mask.like(outputs.advantages_N.float())}
        if outputs.returns_N is not None:
            columns[fields.RETURNS] = mask.like(outputs.returns_N.float())
        return Batch(columns)

    @endpoint(dispatch=only(0), collect=first(), concurrent=True, readonly=True)
    def describe(self, batch: Batch) -> dict[str, float]:
        """How long the completions are, and how far the generator's log-probabilities lie from the trainer's, in nats.

        Args:
            batch: ``loss_mask``; for the latter also ``old_logprobs`` and ``rollout_logprobs``.
        """
        mask = batch.jagged(fields.LOSS_MASK)
        lengths_B = sampled_counts(mask).float()
        figures = {metrics.LENGTH_MEAN: float(lengths_B.mean()), metrics.LENGTH_MAX: float(lengths_B.max())}
        if fields.OLD_LOGPROBS in batch:
            columns = (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS)
            old_N, rollout_N = (batch.jagged(name).values[mask.values] for name in columns)
            apart_N = mismatch(old_N, rollout_N).difference_N
            figures |= {metrics.MISMATCH_MEAN: float(apart_N.mean()), metrics.MISMATCH_MAX: float(apart_N.max())}
        return figures
