"""The loss of a policy worker: clipped surrogate, importance weights, KL to the reference, entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import kl_estimate
from podium.algorithms.losses.ppo_clip import ppo_clip
from podium.algorithms.metrics import IMPORTANCE_CAPPED, IMPORTANCE_MEAN, MISMATCH_KL
from podium.algorithms.off_policy import mismatch, truncated_weights
from podium.algorithms.records import PolicyLossInputs, TokenLoss
from podium.algorithms.segments import wide
from podium.errors import DataError
from podium.telemetry.metrics import ENTROPY, KL, MISMATCH_MAX, MISMATCH_MEAN

__all__ = ["PolicyLoss"]


@dataclass(frozen=True)
class PolicyLoss:
    """``w · ppo_clip + kl_coef · KL(policy || reference) - entropy_coef · entropy`` at each token.

    w are truncated importance weights if ``config.importance_cap`` is set, else 1. The KL takes part if
    ``config.kl_in`` is "loss"; it is reported whenever reference log-probabilities are given.

    >>> import torch
    >>> loss = PolicyLoss(AlgorithmConfig())
    >>> out = loss(PolicyLossInputs(logprobs_N=torch.tensor([-1.0, -2.0]), advantages_N=torch.tensor([1.0, -1.0])))
    >>> out.loss_N.tolist(), sorted(out.metrics)
    ([-1.0, 1.0], ['policy/approx_kl', 'policy/clip_fraction', 'policy/ratio_mean'])
    """

    config: AlgorithmConfig

    def __call__(self, inputs: PolicyLossInputs) -> TokenLoss:
        """The loss at each token, ``[N]``.

        Raises:
            DataError: a column that the configuration asks for is missing; names both.
        """
        config = self.config
        old_N = inputs.logprobs_N.detach() if inputs.old_logprobs_N is None else inputs.old_logprobs_N
        surrogate = ppo_clip(
            inputs.logprobs_N,
            old_N,
            inputs.advantages_N,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        loss_N, metrics, maxima = surrogate.loss_N, dict(surrogate.metrics), dict(surrogate.maxima)
        if inputs.rollout_logprobs_N is not None:
            gap = mismatch(old_N, inputs.rollout_logprobs_N)
            metrics |= {MISMATCH_MEAN: gap.difference_N, MISMATCH_KL: gap.kl_N}
            maxima[MISMATCH_MAX] = gap.difference_N
        if config.importance_cap is not None:
            rollout_N = _required(inputs.rollout_logprobs_N, "rollout_logprobs", "algorithm.importance_cap is set")
            weights_N = truncated_weights(old_N, rollout_N, config.importance_cap)
            loss_N = loss_N * weights_N
            capped_N = (weights_N >= config.importance_cap).to(weights_N.dtype)
            metrics |= {IMPORTANCE_MEAN: weights_N, IMPORTANCE_CAPPED: capped_N}
        if config.kl_in == "loss":
            reference_N = _required(inputs.ref_logprobs_N, "ref_logprobs", "algorithm.kl_in = 'loss'")
            kl_N = kl_estimate(inputs.logprobs_N, reference_N.detach(), config.kl_estimator)
            loss_N = loss_N + config.kl_coef * kl_N
            metrics[KL] = kl_N.detach()
        elif inputs.ref_logprobs_N is not None:
            reference_N = inputs.ref_logprobs_N.detach()
            metrics[KL] = kl_estimate(inputs.logprobs_N.detach(), reference_N, config.kl_estimator)
        if config.entropy_coef:
            entropy_N = _required(inputs.entropy_N, "entropy", "algorithm.entropy_coef is not 0")
            loss_N = loss_N - config.entropy_coef * wide(entropy_N)
        if inputs.entropy_N is not None:
            metrics[ENTROPY] = wide(inputs.entropy_N.detach())
        return TokenLoss(loss_N, metrics, maxima)


def _required(column_N: Tensor | None, name: str, reason: str) -> Tensor:
    if column_N is None:
        raise DataError(f"the policy loss needs the column {name!r}, because {reason}; the batch has none")
    return column_N
