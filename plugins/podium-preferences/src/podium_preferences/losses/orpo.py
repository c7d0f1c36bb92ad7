"""Odds ratio preference optimization."""

import torch
import torch.nn.functional as F
from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["ORPOOptions", "orpo"]


@section("algorithm.options")
class ORPOOptions:
    """The constants of ORPO: Hong et al. 2024, arXiv:2403.07691, section 5.1."""

    beta: float = Field(default=0.1, ge=0, le=1e3)
    """The loss of the odds ratio is multiplied by this coefficient. The paper calls it λ."""


@Declaration(options=ORPOOptions, source="Hong et al. 2024, ORPO, arXiv:2403.07691, section 5.1")
def orpo(inputs: PreferenceInputs, options: ORPOOptions) -> PreferenceLoss:
    """``-log P(chosen) - β log sigmoid(log odds(chosen) - log odds(rejected))`` of each pair, without a reference.

    ``log P`` is the mean log-probability of an answer's tokens, and ``odds = P / (1 - P)``. Hong et al. 2024, "ORPO",
    arXiv:2403.07691, equations 2 to 7. TRL's first term is over the prompt's tokens too, and a mean over those of all
    rows; here it is the paper's, over the answer of each row. The implied reward is ``β log P``.
    """
    means_A = inputs.token_means(inputs.values_A)
    odds_A = means_A - torch.log1p(-torch.exp(means_A.clamp(max=-1e-9)))
    (chosen_P, _), (chosen_odds_P, rejected_odds_P) = inputs.split(means_A), inputs.split(odds_A)
    losses_P = -chosen_P - options.beta * F.logsigmoid(chosen_odds_P - rejected_odds_P)
    return PreferenceLoss(losses_P, options.beta * means_A)
