"""Clipped importance sampling: the policy gradient of all tokens, under weights that are clipped."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses.ppo_clip import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import CLIP_FRACTION

__all__ = ["cispo"]


@Declaration(
    scales_advantage=True,
    defaults={"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
    source="MiniMax 2025, M1, arXiv:2506.13585, equations 4 and 5; weights up to 5 as in TRL's form of ScaleRL, "
    "arXiv:2510.13786",
)
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
