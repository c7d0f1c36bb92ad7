"""Podium's own losses, ``(LossInputs, AlgorithmConfig) -> TokenLoss``: of policies, of examples, by a teacher, and of
critics. :func:`podium.algorithms.policy_loss` says how those of a policy become one loss.

Legend: N tokens, J most probable ids of a teacher.
"""

from typing import Final

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import LOSSES, ClipOptions
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.errors import DataError
from podium.telemetry.metrics import CLIP_FRACTION, VALUE_LOSS

TEACHER_KL = "teacher/kl"  # KL(policy || teacher) a token, in nats: by k1 from the sampled tokens
TEACHER_TOP_KL = "teacher/kl_top"  # the divergence that is trained with teacher_top_k, in nats a token
TEACHER_REST = "teacher/rest"  # the teacher's probability of all ids but its most probable ones
_LEAST: Final = 1e-6  # below it, 1 minus a sum in float32 is rounding
VALUE_CLIP_FRACTION: Final = "value/clip_fraction"  # share of tokens whose value was held near the old value


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


@LOSSES.own["teacher_kl"]
def teacher_kl(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``exp(logp - logp_old) · (logp_old - logp_teacher)`` at each token, ``[N]``, without gradient in the bracket.

    This is the policy gradient of the reverse divergence KL(policy || teacher) by token, with the divergence at the
    token as its cost: Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab, whose discount of later tokens
    is 0 too. The mean of the gradient is that of the divergence at each place, given the text before it; it is
    the reverse KL of GKD (Agarwal et al. 2024, arXiv:2306.13649, with lambda 1) from one sample. Advantages take no
    part.

    With ``teacher_top_k`` the loss is the divergence of GKD itself, over the ids H that the teacher finds most probable
    and over all others as one outcome: ``sum_H p log(p / q) + (1 - p(H)) log((1 - p(H)) / (1 - q(H)))`` for the policy
    p and the teacher q, or with p and q exchanged for ``teacher_divergence: forward``. It is at most the divergence
    over all ids, and that itself where H is all of them. The old policy takes no part.
    """
    if config.teacher.teacher_top_k:
        return _compare_top(inputs, config.teacher.teacher_divergence == "forward")
    gap_N = (wide(inputs.old_logprobs_N) - wide(inputs.teacher_logprobs_N)).detach()
    ratio_N = bounded_exp(log_ratio(inputs))
    return TokenLoss(ratio_N * gap_N, {TEACHER_KL: wide(inputs.logprobs_N.detach()) - wide(inputs.teacher_logprobs_N)})


def _compare_top(inputs: LossInputs, forward: bool) -> TokenLoss:
    """The divergence over the teacher's most probable ids and all others as one, ``[N]``."""
    if not {"teacher_top", "at_teacher_top"} <= inputs.columns.keys():
        raise DataError(
            "algorithm.options.teacher_top_k is set, and the batch has no column teacher_top: start the teacher with "
            "this number as its top_k, as the trainer does"
        )
    policy_NJ = _with_rest(wide(inputs.columns["at_teacher_top"]))
    teacher_NJ = _with_rest(wide(inputs.columns["teacher_top"].detach().chunk(2, -1)[0]))
    p_NJ, q_NJ = (teacher_NJ, policy_NJ) if forward else (policy_NJ, teacher_NJ)
    divergence_N = (p_NJ.exp() * (p_NJ - q_NJ)).sum(-1)
    gap_N = wide(inputs.logprobs_N.detach()) - wide(inputs.teacher_logprobs_N)
    rest_N = teacher_NJ.detach()[:, -1].exp()
    return TokenLoss(divergence_N, {TEACHER_KL: gap_N, TEACHER_TOP_KL: divergence_N.detach(), TEACHER_REST: rest_N})


def _with_rest(logprobs_NJ: Tensor) -> Tensor:
    """The log-probabilities ``[N, J + 1]`` of J ids, and of all others as one outcome, at least 1e-6."""
    rest_N = (1.0 - logprobs_NJ.exp().sum(-1)).clamp(min=_LEAST)
    return torch.cat([logprobs_NJ, rest_N.log()[:, None]], -1)


def value_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2`` with ``c = config.value_clip``, ``[N]``.

    The squared error: Schulman et al. 2017, arXiv:1707.06347, equation 9. The second square, which
    ``value_clip = None`` leaves out, is not in that paper but in its authors' code: Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729, section 3.

    >>> columns = {"values": torch.ones(1), "old_values": torch.zeros(1), "returns": torch.full((1,), 2.0)}
    >>> inputs = LossInputs(offsets_B1=torch.tensor([0, 1]), columns=columns)
    >>> value_loss(inputs, AlgorithmConfig(value_clip=0.5)).loss_N.tolist()
    [1.125]
    """
    values_N, returns_N = wide(inputs.values_N), wide(inputs.returns_N.detach())
    old_values_N, clip = wide(inputs.old_values_N.detach()), config.value_clip
    loss_N = (values_N - returns_N).square() / 2
    held_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        near_loss_N = (near_N - returns_N).square() / 2
        held_N = near_loss_N > loss_N
        loss_N = torch.maximum(loss_N, near_loss_N)
    return TokenLoss(loss_N, {VALUE_LOSS: loss_N.detach(), VALUE_CLIP_FRACTION: held_N.to(loss_N.dtype)})
