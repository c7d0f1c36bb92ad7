"""Podium's own losses of policies, ``(LossInputs, AlgorithmConfig) -> TokenLoss``, but for that of a teacher.

Legend: N tokens. Each takes part as :func:`podium.algorithms.policy_loss` says.
"""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import LOSSES, ClipOptions
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import CLIP_FRACTION

__all__ = ["cispo", "clip_ratios", "clipped_surrogate", "cross_entropy", "gspo", "log_ratio", "ppo_clip", "reinforce"]


@LOSSES.own["ppo_clip"]
def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs - old_logprobs)``, ``[N]``.

    The clipped surrogate of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. Two bounds instead of one: Yu et
    al. 2025, "DAPO", arXiv:2503.14476, section 3.1.

    >>> columns = {"logprobs": torch.tensor([0.5, -0.1]), "old_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    >>> loss = ppo_clip(LossInputs(offsets_B1=torch.tensor([0, 2]), columns=columns), AlgorithmConfig())
    >>> [round(x, 4) for x in loss.loss_N.tolist()], loss.metrics["policy/clip_fraction"].tolist()
    ([-1.28, -0.9048], [1.0, 0.0])
    """
    return clipped_surrogate(bounded_exp(log_ratio(inputs)), inputs, config)


def log_ratio(inputs: LossInputs) -> Tensor:
    """``logprobs - old_logprobs``, ``[N]``, with the gradient of the former."""
    return wide(inputs.logprobs_N) - wide(inputs.old_logprobs_N.detach())


def clip_ratios(ratio_N: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-r A`` and ``-clip(r, 1 - clip_low, 1 + clip_high) A``, each ``[N]``; the larger one is the loss of PPO."""
    advantages_N = wide(inputs.advantages_N.detach())
    low, high = config.clip_bounds
    return -ratio_N * advantages_N, -ratio_N.clamp(1 - low, 1 + high) * advantages_N


def clipped_surrogate(ratio_N: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """The surrogate for a ratio of tokens or of sequences, and the share of tokens whose gradient is 0 because of a
    bound.

    With the option ``dual_clip = c`` the loss of a token with negative advantage is at most ``-c A``: otherwise the
    force that lowers a token's probability grows with its ratio. Ye et al. 2020, "Mastering Complex Control in MOBA
    Games", arXiv:1912.09729.
    """
    free_N, bounded_N = clip_ratios(ratio_N, inputs, config)
    loss_N = torch.maximum(free_N, bounded_N)
    clipped_N = bounded_N > free_N
    dual_clip = config.read_options(ClipOptions).dual_clip
    if dual_clip is not None:
        advantages_N = wide(inputs.advantages_N.detach())
        ceiling_N = -dual_clip * advantages_N
        runaway_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(runaway_N, ceiling_N, loss_N)
        clipped_N = clipped_N | runaway_N
    return TokenLoss(loss_N, {CLIP_FRACTION: clipped_N.to(loss_N.dtype)})


@LOSSES.own["gspo"]
def gspo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` at every token of a row, ``[N]``.

    Group sequence policy optimization: Zheng et al. 2025, "GSPO", arXiv:2507.18071, equations 5 and 7.
    ``s = exp(mean over the row's tokens of logprobs - old_logprobs)`` is the row's ratio, normalized by its length.
    The aggregation ``sequence-mean`` makes the sum equation 5. Sequence ratios stay near 1, so that the paper clips at
    3e-4 and 4e-4. These three are the defaults of this loss.
    """
    ratio_B = bounded_exp(inputs.row_means(log_ratio(inputs)))
    return clipped_surrogate(ratio_B[inputs.row_N], inputs, config)


@LOSSES.own["cispo"]
def cispo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-w A log p`` with ``w = clip(r, 1 - clip_low, 1 + clip_high)``, which has no gradient, ``[N]``.

    CISPO: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585, equations 4 and 5. ``r = exp(logprobs - old_logprobs)``. A
    token whose ratio is clipped keeps its gradient, which the clipped surrogate of PPO takes from it. The paper sets no
    lower bound, as ``clip_low = 1`` does. TRL's ``epsilon_high`` is the bound itself, ``1 + clip_high``.
    """
    low, high = config.clip_bounds
    ratio_N = bounded_exp(log_ratio(inputs)).detach()
    weights_N = ratio_N.clamp(1 - low, 1 + high)
    loss_N = -weights_N * wide(inputs.advantages_N.detach()) * wide(inputs.logprobs_N)
    return TokenLoss(loss_N, {CLIP_FRACTION: (weights_N != ratio_N).to(loss_N.dtype)})


@LOSSES.own["reinforce"]
def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A log p``, ``[N]``, without ratio or clip.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". It is
    the loss of RLOO, ReMax, OPO and GPG. With several updates a batch it does not know that the policy has moved.
    """
    return TokenLoss(-wide(inputs.advantages_N.detach()) * wide(inputs.logprobs_N))


@LOSSES.own["cross_entropy"]
def cross_entropy(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-log p(target)`` at each token, in nats: supervised fine-tuning. Advantages take no part."""
    return TokenLoss(-wide(inputs.logprobs_N))
