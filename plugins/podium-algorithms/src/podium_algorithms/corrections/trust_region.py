"""Trust region masking: rows of which any token is too far from the generator do not train."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import kl_estimate
from podium.algorithms.records import LossInputs
from podium_algorithms.declarations import TRUST_REGION, TrustRegionOptions

__all__ = ["trust_region"]


@TRUST_REGION
def trust_region(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if the largest KL(rollout || old) of the row's tokens is at most ``trust_kl`` and else 0, ``[N]``.

    Trust region masking: Li et al. 2025, arXiv:2512.23075. The paper's divergence is over the vocabulary; from the
    sampled token alone it is estimated by k3, as ``seq_max_k3`` of verl's rejection.
    """
    divergence_N = kl_estimate(inputs.rollout_logprobs_N, inputs.old_logprobs_N, "k3").detach()
    largest_B = divergence_N.new_zeros(len(inputs.offsets_B1) - 1).scatter_reduce(0, inputs.row_N, divergence_N, "amax")
    return (largest_B <= config.read_options(TrustRegionOptions).trust_kl).to(divergence_N.dtype)[inputs.row_N]
