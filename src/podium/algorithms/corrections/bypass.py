"""The generator's log-probabilities in place of the old ones."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide

__all__ = ["bypass"]


@Declaration(ratio_to="rollout", source="verl, docs/algo/rollout_corr.md, bypass mode")
def bypass(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1, ``[N]``. Its declaration makes the loss read the generator's log-probabilities as ``old_logprobs_N``.

    The ratio then corrects for both the generator's mismatch and the updates of the step, within the bounds of the
    loss, and no pass computes the old log-probabilities: ``bypass_mode`` of verl.
    """
    return torch.ones_like(wide(inputs.logprobs_N.detach()))
