"""The clipped surrogate of PPO."""

import torch
from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.config import section
from podium.telemetry.metrics import CLIP_FRACTION

__all__ = ["ClipOptions", "clip_ratios", "clipped_surrogate", "log_ratio", "ppo_clip"]


@section("algorithm.options")
class ClipOptions:
    """A second bound of the clipped surrogate."""

    dual_clip: float | None = Field(default=None, gt=1, le=1e9)
    """The loss of a token with a negative advantage is at most this multiple of the advantage's size. 3 is usual; null
    means no bound."""


@Declaration(scales_advantage=True, options=ClipOptions)
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
