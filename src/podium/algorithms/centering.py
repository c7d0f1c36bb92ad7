"""The expected score of the generator's distribution, which centers the score of each sampled token.

Legend: N tokens with loss, J ids that the generator found most probable at each of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide

_LEAST_REST = 1e-6  # below it, 1 minus a sum in float32 is rounding


class ExpectedScores(NamedTuple):
    """``scores_N`` have the gradient. ``drift_N`` is the sum of the coefficients' absolute values, and ``rest_N`` the
    generator's probability of all ids but the J."""

    scores_N: Tensor
    drift_N: Tensor
    rest_N: Tensor


def expected_scores(inputs: LossInputs, weigh: Callable[[LossInputs], Tensor | None]) -> ExpectedScores:
    """``sum_v q f(p / q) log p`` at each token for the generator q and the policy p, ``[N]``, with the gradient of
    ``log p`` alone: Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning",
    arXiv:2609.20807, equations 7 to 12.

    The sum is over the J ids H. The generator's probabilities of all others are taken to be those of the policy, up to
    the factor ``rho = (1 - q(H)) / (1 - p(H))``. Since the expected score of p under p is 0, the others add
    ``-alpha p`` to the coefficients of H, with ``alpha = rho f(1 / rho)``. f is the weight of a token with the ratio
    p / q: ``weigh``, or 1. If p and q are equal and f(1) is 1, all coefficients are 0.

    Args:
        inputs: With ``rollout_top``, log-probabilities of q and their ids ``[N, 2 * J]``, and ``at_rollout_top``, those
            of p ``[N, J]`` with their gradient.
        weigh: Gives the weight of each token, whose old policy is p; None for 1.
    """
    logp_NJ = wide(inputs.columns["at_rollout_top"])
    with torch.no_grad():
        logq_NJ = wide(inputs.columns["rollout_top"]).chunk(2, -1)[0].to(logp_NJ.dtype)
        p_NJ, q_NJ = (_with_rest(logs.exp()) for logs in (logp_NJ, logq_NJ))
        is_drawn_NJ = q_NJ > 0  # an id without probability has neither a ratio nor a coefficient
        logs = [torch.where(is_drawn_NJ, values, 1.0).log().flatten() for values in (p_NJ, q_NJ)]
        weights_M = weigh(
            LossInputs(
                offsets_B1=torch.arange(len(logs[0]) + 1, device=logp_NJ.device),
                columns={"logprobs": logs[0], "old_logprobs": logs[0], "rollout_logprobs": logs[1]},
            )
        )
        mass_NJ = q_NJ if weights_M is None else q_NJ * weights_M.view_as(q_NJ)
        tail_N1 = mass_NJ[:, -1:] / p_NJ[:, -1:]
        coefficients_NJ = torch.where(is_drawn_NJ, mass_NJ - tail_N1 * p_NJ, 0.0)[:, :-1]
    scores_N = (coefficients_NJ * logp_NJ.clamp(min=torch.finfo(logp_NJ.dtype).min)).sum(-1)
    return ExpectedScores(scores_N, coefficients_NJ.abs().sum(-1), q_NJ[:, -1])


def _with_rest(probs_NJ: Tensor) -> Tensor:
    """Probabilities ``[N, J + 1]`` of J ids, and of all others as one outcome, at least 1e-6."""
    return torch.cat([probs_NJ, (1.0 - probs_NJ.sum(-1, keepdim=True)).clamp(min=_LEAST_REST)], -1)
