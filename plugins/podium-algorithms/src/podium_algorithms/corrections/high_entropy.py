"""Only the tokens of the highest entropy train."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import HIGH_ENTROPY, HighEntropyOptions

__all__ = ["high_entropy"]


def highest_entropy(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Mark the tokens of a whole minibatch whose entropy is at least the quantile."""
    entropy_N = wide(inputs.entropy_N)
    count = max(round(config.read_options(HighEntropyOptions).entropy_share * len(entropy_N)), 1)
    bound = entropy_N.topk(min(count, len(entropy_N))).values[-1:]
    return {"high_entropy": (entropy_N >= bound).to(torch.float32)}


@HIGH_ENTROPY
def high_entropy(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 at the share ``entropy_share`` of the minibatch's tokens with the highest entropy, and else 0, ``[N]``.

    Wang et al. 2025, "Beyond the 80/20 Rule", arXiv:2506.01939. The tokens with the entropy of the last one that fits
    all train. It is ``top_entropy_quantile`` of TRL.
    """
    return inputs.figures["high_entropy"]
