"""The loss of distillation on policy: the divergence from a teacher at the tokens that the policy itself sampled."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses.ppo_clip import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide

__all__ = ["TEACHER_KL", "teacher_kl"]

TEACHER_KL = "teacher/kl"  # KL(policy || teacher) a token, in nats: by k1 from the sampled tokens


@Declaration(needs_teacher=True)
def teacher_kl(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``exp(logp - logp_old) · (logp_old - logp_teacher)`` at each token, ``[N]``, without gradient in the bracket.

    This is the policy gradient of the reverse divergence KL(policy || teacher) by token, with the divergence at the
    token as its cost: Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab, whose discount of later tokens
    is 0 too. The mean of the gradient is that of the divergence at each place, given the text before it; it is
    the reverse KL of GKD (Agarwal et al. 2024, arXiv:2306.13649, with lambda 1) from one sample. Advantages take no
    part.
    """
    gap_N = (wide(inputs.old_logprobs_N) - wide(inputs.teacher_logprobs_N)).detach()
    ratio_N = bounded_exp(log_ratio(inputs))
    return TokenLoss(ratio_N * gap_N, {TEACHER_KL: wide(inputs.logprobs_N.detach()) - wide(inputs.teacher_logprobs_N)})
