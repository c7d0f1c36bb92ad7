"""The loss of distillation on policy: the divergence from a teacher at the tokens that the policy itself sampled."""

from typing import Final

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import LOSSES
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses.surrogates import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.errors import DataError

__all__ = ["TEACHER_KL", "teacher_kl"]

TEACHER_KL = "teacher/kl"  # KL(policy || teacher) a token, in nats: by k1 from the sampled tokens
TEACHER_TOP_KL = "teacher/kl_top"  # the divergence that is trained with teacher_top_k, in nats a token
TEACHER_REST = "teacher/rest"  # the teacher's probability of all ids but its most probable ones
_LEAST: Final = 1e-6  # below it, 1 minus a sum in float32 is rounding


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
