"""Group sequence policy optimization: one ratio for each row."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses.ppo_clip import ClipOptions, clipped_surrogate, log_ratio
from podium.algorithms.records import LossInputs, TokenLoss

__all__ = ["gspo"]


@Declaration(
    scales_advantage=True,
    options=ClipOptions,
    defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean"},
    source="Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 5 and section 5.1",
)
def gspo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` at every token of a row, ``[N]``.

    Group sequence policy optimization: Zheng et al. 2025, "GSPO", arXiv:2507.18071, equations 5 and 7.
    ``s = exp(mean over the row's tokens of logprobs - old_logprobs)`` is the row's ratio, normalized by its length.
    The aggregation ``sequence-mean`` makes the sum equation 5. Sequence ratios stay near 1, so that the paper clips at
    3e-4 and 4e-4. These three are the defaults of this loss.
    """
    ratio_B = bounded_exp(inputs.row_means(log_ratio(inputs)))
    return clipped_surrogate(ratio_B[inputs.row_N], inputs, config)
