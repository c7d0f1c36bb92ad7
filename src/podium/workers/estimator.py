"""The estimator: advantages and metrics that need all completions of a step at once.

Legend: N tokens over all rows (completions) of a step.
"""

import torch

from podium.algorithms import (
    AdvantageInputs,
    AlgorithmConfig,
    advantage_declaration,
    check_functions,
    compute_advantages,
    flat_groups,
    kl_estimate,
    penalize,
)
from podium.data import Batch, fields
from podium.runtime import Worker, concat, endpoint, first, only, shard
from podium.telemetry import metrics
from podium.workers.texts import sampled_counts

__all__ = ["Estimator"]


class Estimator(Worker):
    """Computes advantages and metrics of the whole batch of a step. It holds no model.

    Only the first rank is called, with all rows: groups, whitening and a user's own advantage look at the whole batch
    and cost a few operations a token, less than collectives would. Tensors come by reference and results stay here, so
    that what passes through the controller grows with rows, not with tokens.

    Args:
        algorithm: The estimator of advantages and its constants.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        check_functions(algorithm)

    @endpoint(dispatch=shard(), collect=concat(), returns="ref", concurrent=True)
    def keep(self, batch: Batch) -> Batch:
        """Copy a generator's tensors into these processes, so that they outlive the generator."""
        return batch

    @endpoint(dispatch=only(0), collect=first(), returns="ref")
    def advantages(self, batch: Batch, kl_coef: float = 0.0) -> Batch:
        """Compute the token columns ``advantages`` and, where a critic is trained, ``returns``.

        Args:
            batch: ``loss_mask``, ``rewards`` and ``group``; ``values`` and ``bootstrap`` where there is a critic;
                ``old_logprobs`` and ``ref_logprobs`` where the KL counts in the reward; what the advantage estimator
                declares; and, where recorded, ``finish_reason`` and the columns of reward parts and of data.
            kl_coef: The coefficient of the KL in the reward.

        Raises:
            ConfigError: The advantage estimator cannot be found here.
            DataError: The estimator did not return finite ``[N]`` tensors that are 0 outside the mask.
        """
        mask, declared = batch.jagged(fields.LOSS_MASK), advantage_declaration(self.algorithm.advantage)
        token_rewards_N = None
        if self.algorithm.kl_in == "reward":
            old_N, ref_N = batch.jagged(fields.OLD_LOGPROBS).values, batch.jagged(fields.REF_LOGPROBS).values
            kl_N = kl_estimate(old_N, ref_N, self.algorithm.kl_estimator)
            token_rewards_N = penalize(old_N.new_zeros(len(old_N)), kl_N, mask.values, kl_coef)
        truncated_B = None
        if fields.FINISH_REASON in batch:
            truncated_B = torch.tensor([reason == "length" for reason in batch.python(fields.FINISH_REASON)])
        inputs = AdvantageInputs(
            rewards_B=batch.dense(fields.REWARDS),
            group_B=batch.dense(fields.GROUP),
            mask_N=mask.values,
            offsets_B1=mask.offsets,
            token_rewards_N=token_rewards_N,
            values_N=batch.jagged(fields.VALUES).values if fields.VALUES in batch else None,
            bootstrap_B=batch.dense(fields.BOOTSTRAP) if fields.BOOTSTRAP in batch else None,
            truncated_B=truncated_B,
            parts_B={
                name.removeprefix(fields.PART): batch.dense(name) for name in batch if name.startswith(fields.PART)
            },
            data={name.removeprefix(fields.DATA): batch.python(name) for name in batch if name.startswith(fields.DATA)},
            **{f"{name}_N": batch.jagged(name).values for name in declared.columns},
        )
        outputs = compute_advantages(inputs, self.algorithm)
        columns = {fields.ADVANTAGES: mask.like(outputs.advantages_N.float())}
        if outputs.returns_N is not None:
            columns[fields.RETURNS] = mask.like(outputs.returns_N.float())
        return Batch(columns)

    @endpoint(dispatch=only(0), collect=first(), concurrent=True, readonly=True)
    def describe(self, batch: Batch) -> dict[str, float]:
        """Return metrics of the rewards and lengths of completions, and how far the generator's log-probabilities are
        from the trainer's.

        Args:
            batch: ``rewards``, ``group`` and ``loss_mask``; for the mismatch of log-probabilities, in nats, also
                ``old_logprobs`` and ``rollout_logprobs``.
        """
        mask, rewards_B = batch.jagged(fields.LOSS_MASK), batch.dense(fields.REWARDS)
        lengths_B = sampled_counts(mask).float()
        figures = {
            metrics.REWARD_MEAN: float(rewards_B.mean()),
            metrics.REWARD_STD: float(rewards_B.std(correction=0)),
            metrics.FLAT_GROUPS: flat_groups(rewards_B, batch.dense(fields.GROUP)),
            metrics.LENGTH_MEAN: float(lengths_B.mean()),
            metrics.LENGTH_MAX: float(lengths_B.max()),
        }
        if fields.OLD_LOGPROBS in batch and bool(mask.values.any()):
            columns = (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS)
            old_N, rollout_N = (batch.jagged(name).values[mask.values] for name in columns)
            apart_N = (old_N - rollout_N).abs()
            figures |= {metrics.MISMATCH_MEAN: float(apart_N.mean()), metrics.MISMATCH_MAX: float(apart_N.max())}
        return figures
